# shellcheck shell=bash
# A Slurm cluster with 4 GPUs a node, as NERSC's Perlmutter: copy it to submit/sites/NAME.sh, edit, submit with SITE=NAME.
# Not tried by us. Sources: docs.nersc.gov/machinelearning/pytorch and /launchers (modules, tasks, GPUs and cores a node);
# slurm.schedmd.com/srun.html. On Perlmutter submit with: sbatch -A PROJECT -C gpu -q debug submit.slurm
# Its queues, with their nodes and hours, by docs.nersc.gov/jobs/policy: debug 1-8, 0.5 h

module load pytorch || return 1  # the site's PyTorch, mpi4py and NCCL with its plugin for the network

export MPICH_GPU_SUPPORT_ENABLED=0  # else Cray's MPI wants a library for GPUs; by MPI goes only what is on CPUs
export SITE_MPICC="cc -shared" HOROVOD_GPU_OPERATIONS=NCCL  # for make setup

# export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn  # where the doctor finds that they take another network
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun of Slurm 22.05 to 23.02 does not take it from the header

# Every task sees all GPUs of its node and takes the one of its local rank. One task that fails ends the job.
launch() { srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none "$@"; }

# shellcheck shell=bash
# Perlmutter (NERSC): Slurm, 4 A100s and 64 cores per node, Slingshot 11. Written from its documentation; not tried by us.
# Sources: docs.nersc.gov/machinelearning/pytorch (modules); [1] github.com/NERSC/dl-at-scale-training, submit_pm.sh
# (February 2025). NERSC counts hardware threads, two per core: each of four tasks has 32. Submit with:
#     SITE=perlmutter sbatch -A PROJECT -C gpu -q debug --cpus-per-task=32 submit.slurm
# Queue debug: 1 to 8 nodes, 0.5 h; the others: docs.nersc.gov/jobs/policy

module load pytorch || return 1  # the site's PyTorch, mpi4py and NCCL with its plugin for the network

export MPICH_GPU_SUPPORT_ENABLED=0  # else Cray's MPI needs a GPU library; only CPU buffers go through MPI
export SITE_MPICC="cc -shared" HOROVOD_GPU_OPERATIONS=NCCL  # for make setup
export FI_MR_CACHE_MONITOR=userfaultfd HDF5_USE_FILE_LOCKING=FALSE  # [1]
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-32}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task

# Slurm gives the first task the first cores, and GPU 3 is nearest to them, so the order is reversed [1]. Every task sees
# all GPUs of its job and uses that of its local rank. A task that fails ends the job.
gpus=${SLURM_GPUS_ON_NODE:-4}
if [ "$gpus" = 4 ]; then export CUDA_VISIBLE_DEVICES=3,2,1,0; fi  # chapter 1's job has one GPU
launch() { srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none "$@"; }

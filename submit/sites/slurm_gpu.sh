# shellcheck shell=bash
# A Slurm cluster with NVIDIA GPUs, by the workshop's own environment (make setup, without SITE=). Copy it to
# submit/sites/NAME.sh, edit, submit with SITE=NAME. Not tried by us. Sources: slurm.schedmd.com/srun.html and /mpi_guide.html,
# docs.nvidia.com/deeplearning/nccl/user-guide (env). What your site has: sinfo -o "%P %l %G %c %m"; srun --mpi=list
# Submit with what the site asks for, and with memory, if its default is small:
#     SITE=NAME sbatch -A PROJECT -p PARTITION --mem=0 submit.slurm             (0: all of the node's, for whole nodes)

# module load cuda openmpi || return 1  # nothing for the workshop's own environment. For the site's PyTorch: its modules,
# export SITE_MPICC=mpicc HOROVOD_GPU_OPERATIONS=NCCL  # this, and make setup SITE=NAME

# NCCL and gloo find InfiniBand and its address (ib0) themselves on most clusters. Where the doctor finds another network:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
export MPIR_CVAR_CH4_NETMOD=ofi  # slurm_cpu.sh says why
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun of Slurm 22.05 to 23.02 does not take it from the header
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# Every task sees all GPUs of its node and takes the one of its local rank. One task that fails ends the job.
# pmi2 is for the workshop's MPICH; for a site's Open MPI it is --mpi=pmix, for a Cray's MPI, or none, leave it out.
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=pmi2 --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none "$@"
}

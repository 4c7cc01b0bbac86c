# shellcheck shell=bash
# A Slurm cluster with NVIDIA GPUs, with the workshop's own environment (make setup, without SITE=). Copy it to
# a disk that all nodes see, edit, submit with SITE=/path/of/it (submit/NEW_SITE.md). Not tried by us. Sources:
# slurm.schedmd.com/srun.html and /mpi_guide.html, docs.nvidia.com/deeplearning/nccl/user-guide (env). What your site has:
# sinfo -o "%P %l %G %c %m"; srun --mpi=list
# Submit with the site's options, and with memory, if its default is small:
#     SITE=/shared/mine.sh sbatch -A PROJECT -p PARTITION --mem=0 submit.slurm             (0: all memory of the node)

# For the site's PyTorch (not for the workshop's own) uncomment these two lines, with its modules, and run make setup SITE=NAME:
# module load cuda openmpi || return 1
# export SITE_MPICC=mpicc HOROVOD_GPU_OPERATIONS=NCCL

# NCCL and gloo find InfiniBand and its address (ib0) themselves on most clusters. If the doctor finds another network:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
export MPIR_CVAR_CH4_NETMOD=ofi  # slurm_cpu.sh says why
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# Every task sees all GPUs of its node and uses that of its local rank. A task that fails ends the job.
# pmi2 is for the workshop's MPICH; with a site's Open MPI use --mpi=pmix; with Cray MPI, or no MPI, remove it.
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=pmi2 --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none "$@"
}

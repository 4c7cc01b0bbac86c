# shellcheck shell=bash
# A Slurm cluster with MVAPICH 4: an MPICH, so its mpiexec (Hydra) tells a rank PMI_RANK, and no MV2_ variable means anything.
# Written from its documentation; not tried by us. Source: github.com/OSU-Nowlab/MVAPICH-docs of February 2025 (quick-plus,
# hydra, cvar). MVAPICH2-GDR, which came before, is mvapich.sh.

module load mvapich-plus || return 1  # or your site's name for it

export MVP_ENABLE_GPU=0  # by MPI goes only what is on CPUs; NCCL carries what is on GPUs
export SITE_MPICC=mpicc HOROVOD_GPU_OPERATIONS=NCCL  # for make setup

# Every rank sees all GPUs of its node and takes the one of its local rank; it keeps all cores, for its threads.
launch() {
    local ranks=${RANKS:-$SLURM_NTASKS} nodes=${NODES:-$SLURM_NNODES}
    mpiexec -n "$ranks" -ppn "$((ranks / nodes))" -bind-to none "$@"
}

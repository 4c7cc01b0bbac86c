# shellcheck shell=bash
# A Slurm cluster with MVAPICH 4: an MPICH, so its mpiexec (Hydra) sets PMI_RANK, and MV2_ variables have no effect.
# Written from its documentation; not tried by us. Source: github.com/OSU-Nowlab/MVAPICH-docs of February 2025 (quick-plus,
# hydra, cvar). MVAPICH2-GDR, which came before, is mvapich.sh.

module load mvapich-plus || return 1  # or its name at your site

export MVP_ENABLE_GPU=0  # only CPU buffers go through MPI; NCCL sends GPU buffers
export SITE_MPICC=mpicc HOROVOD_GPU_OPERATIONS=NCCL  # for make setup

# Every rank sees all GPUs of its node, uses that of its local rank, and may use all cores for its threads.
launch() {
    local ranks=${RANKS:-$SLURM_NTASKS} nodes=${NODES:-$SLURM_NNODES}
    mpiexec -n "$ranks" -ppn "$((ranks / nodes))" -bind-to none "$@"
}

# shellcheck shell=bash
# A Slurm cluster with MVAPICH2-GDR, like Owens (Ohio Supercomputer Center) in the study this workshop continues.
# That study's published command was garbled; this file does what it meant. Not tried by us.
# Source of the variables: that study, and mvapich.cse.ohio-state.edu/userguide/gdr

module load mvapich2-gdr || return 1  # or its name at your site
: "${MVAPICH:?the folder that MVAPICH is in, with lib/libmpi.so}"

# Messages from GPU memory, in blocks of 8 MB, without GPUDirect RDMA; errors without a backtrace.
export MV2_USE_CUDA=1 MV2_USE_GDR=0 MV2_CUDA_BLOCK_SIZE=8388608 MV2_DEBUG_SHOW_BACKTRACE=0
export MV2_ENABLE_TOPO_AWARE_COLLECTIVES=0
export MV2_CPU_BINDING_POLICY=hybrid MV2_HYBRID_BINDING_POLICY=spread  # a rank gets neighbouring cores for its threads

export SITE_MPICC=mpicc HOROVOD_GPU_OPERATIONS=MPI  # for make setup: Horovod uses MVAPICH, DDP uses NCCL

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task

# The library is preloaded into the ranks, not into srun: Python is not linked to it, and it must be loaded before CUDA.
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --kill-on-bad-exit=1 \
        --export="ALL,LD_PRELOAD=$MVAPICH/lib/libmpi.so" "$@"
}

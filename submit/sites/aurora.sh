# shellcheck shell=bash
# Aurora (ALCF): PBS, 6 Intel GPUs per node, each visible as two GPUs, Cray PALS, Slingshot 11. Written from its
# documentation; not tried by us. Sources, at docs.alcf.anl.gov/aurora, read in August 2026: [1] data-science/frameworks/pytorch
# [2] data-science/frameworks/oneCCL  [3] running-jobs-aurora. PyTorch calls these GPUs xpu, and
# the library that connects them xccl; the chapters ask PyTorch for both (torch.accelerator, in PyTorch 2.7 and later).
# Chapter 2 trains on CPUs: Horovod 0.28.1 does not support Intel GPUs. Submit with:
#     qsub -A PROJECT -q debug -l select=2 -l filesystems=flare -v SITE=aurora submit.pbs
# Queues, with their nodes and hours [3]: debug 1-2, 1 h; debug-scaling 2-256, 1 h; capacity 1-16, 168 h

module load frameworks || return 1  # [1] the site's PyTorch and mpi4py
export SITE_MPICC=mpicc  # for make setup, which then uses that PyTorch

export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128  # [3] from compute nodes
export CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi  # [2] the minimum for oneCCL
export FI_MR_CACHE_MONITOR=userfaultfd  # [2]

# PALS has its own variables; the ranks get torchrun's, and connect over Slingshot [1]. Each rank has four cores [1];
# without --depth only one (github.com/argonne-lcf/user-guides/issues/901).
# shellcheck disable=SC2016 # for the shell of each rank
as_torchrun='export RANK=${PALS_RANKID:?is this mpiexec PALS?} LOCAL_RANK=${PALS_LOCAL_RANKID:?}; exec "$@"'
cores=4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79
launch() {
    local ranks=${RANKS:-$((12 * $(sort -u "$PBS_NODEFILE" | wc -l)))} job=${PBS_JOBID:-0}
    export WORLD_SIZE=$ranks MASTER_PORT=$((20000 + ${job%%[!0-9]*} % 10000)) TORCHELASTIC_RUN_ID=$job
    MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE" | cut -d. -f1).hsn.cm.aurora.alcf.anl.gov
    export MASTER_ADDR
    mpiexec --pmi=pmix -n "$ranks" --ppn 12 --depth 4 --cpu-bind "list:$cores" bash -c "$as_torchrun" as_torchrun "$@"
}

# shellcheck shell=bash
# Polaris (ALCF): PBS, 4 A100 a node, Cray PALS, Slingshot 11. Written from its documentation; not tried by us.
# Sources, at docs.alcf.anl.gov/polaris: [1] data-science/frameworks/pytorch  [2] running-jobs/using-gpus
# [3] applications-and-libraries/libraries/nccl  [4] running-jobs; and [5] github.com/argonne-lcf/alcf-nccl-tests

module use /soft/modulefiles || return 1  # [1] the site's PyTorch, DeepSpeed and mpi4py
module load conda || return 1
conda activate || return 1

export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128  # [4] from compute nodes

# NCCL through libfabric (AWS-OFI plugin) instead of TCP sockets. [5] measures for 2 nodes 36 GB/s of bus bandwidth, and
# 3 to 9.5 without. [3] Some programs hang with it; then: unset NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_COLLNET_ENABLE NCCL_NET
export NCCL_NET="AWS Libfabric" NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1
export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib:${LD_LIBRARY_PATH:-}
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072

export MPICH_GPU_SUPPORT_ENABLED=0  # [2] else MPI wants a library for GPUs; the chapters send by MPI what is on CPUs
export SITE_MPICC="cc -shared" HOROVOD_GPU_OPERATIONS=NCCL  # for make setup

# [2] GPU 3 is nearest to the first cores, GPU 0 to the last. Each rank sees its one GPU before MPI starts [1].
near_gpu='CUDA_VISIBLE_DEVICES=$((3 - PMI_LOCAL_RANK % 4)) exec "$@"'
launch() {
    mpiexec -n "${RANKS:-$((4 * $(sort -u "$PBS_NODEFILE" | wc -l)))}" --ppn 4 --depth=8 --cpu-bind depth \
        bash -c "$near_gpu" near_gpu "$@"
}

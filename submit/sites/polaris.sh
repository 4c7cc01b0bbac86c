# shellcheck shell=bash
# Polaris (ALCF): PBS, 4 A100s per node, Cray PALS, Slingshot 11. Written from its documentation; not tried by us.
# Sources, at docs.alcf.anl.gov/polaris: [1] data-science/frameworks/pytorch  [2] running-jobs/using-gpus
# [3] applications-and-libraries/libraries/nccl  [4] running-jobs  [6] system-updates, as of 19 August 2026;
# and [5] github.com/argonne-lcf/alcf-nccl-tests, as of June 2025
# Queues, with their nodes and hours [4]: debug 1-2, 1 h; debug-scaling 1-10, 1 h, one job per user; capacity 1-4, 168 h, one
# running job per user; preemptable 1-10, 72 h, a job may be killed at any time (qsub -r y restarts it); prod 10-496, 24 h

module use /soft/modulefiles || return 1  # [1] the site's PyTorch, DeepSpeed and mpi4py
module load conda || return 1
conda activate || return 1

export http_proxy=http://proxy.alcf.anl.gov:3128 https_proxy=http://proxy.alcf.anl.gov:3128  # [4] from compute nodes

# Bus bandwidth per node over sockets, 32 MiB on 2 nodes [5]; with the plugin it was 36e9. NVLink of an A100: 300 GB/s
# plan: --gpus-per-node 4 --node-link 3.06e9 --gpu-link 300e9

# NCCL sends through TCP sockets: slower, but runs finish. With NCCL_PLUGIN=1 (qsub -v NCCL_PLUGIN=1) it sends through
# libfabric, with the AWS plugin. For the plugin: ALCF recommends it, except for some applications that hang [3]; the bus
# bandwidth between 2 nodes is 36 GB/s with it, 3 to 9.5 without [5]. Against it: 4 of 9 ResNet-50 runs on 2 nodes hung
# with it [5], one of these on Sirius, ALCF's test machine. These figures are from NCCL 2.18 to 2.21. Since then Polaris got
# NCCL 2.28.3 (conda/2025-09-25, October 2025), driver 580 and Slingshot's host software 14.0.1 (August 2026) [6], and [3]
# still names a plugin from 2024.
# So use TCP for a first run, and the plugin for long runs, after the doctor and a short run have finished with it. The last
# seven variables are from [5], against hangs.
if [ "${NCCL_PLUGIN:-0}" = 1 ]; then
    export NCCL_NET="AWS Libfabric" NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1
    export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib:${LD_LIBRARY_PATH:-}
    export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
    export FI_CXI_DEFAULT_TX_SIZE=131072 FI_CXI_RDZV_PROTO=alt_read FI_CXI_RX_MATCH_MODE=software
    export FI_CXI_REQ_BUF_SIZE=16MB FI_CXI_RDZV_GET_MIN=0 FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD=16000 FI_CXI_RDZV_THRESHOLD=2000
else  # [3] disables the plugin, whatever a module has set
    unset NCCL_NET NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_COLLNET_ENABLE
fi

export MPICH_GPU_SUPPORT_ENABLED=0  # [2] else MPI needs a GPU library; only CPU buffers go through MPI
export SITE_MPICC="cc -shared" HOROVOD_GPU_OPERATIONS=NCCL  # for make setup

# [2] GPU 3 is nearest to the first cores, GPU 0 to the last. Each rank sees only its GPU before MPI starts [1].
near_gpu='CUDA_VISIBLE_DEVICES=$((3 - ${PMI_LOCAL_RANK:?this mpiexec gives no local rank, so no GPU can be chosen: is it PALS?} % 4)) exec "$@"'
launch() {
    mpiexec -n "${RANKS:-$((4 * $(sort -u "$PBS_NODEFILE" | wc -l)))}" --ppn 4 --depth=8 --cpu-bind depth \
        bash -c "$near_gpu" near_gpu "$@"
}

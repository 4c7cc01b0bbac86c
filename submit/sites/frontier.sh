# shellcheck shell=bash
# Frontier (OLCF): Slurm, 4 MI250X per node, each visible as two GPUs, Slingshot 11. PyTorch calls AMD GPUs cuda, too.
# Written from its documentation; not tried by us. Sources: docs.olcf.ornl.gov/systems/frontier_user_guide.html (cores,
# GPUs, srun) and /software/analytics/pytorch_frontier.html (modules, interface, cache; July 2026). With 8 tasks per node:
#     SITE=frontier PYTORCH=/path/of/the/environment sbatch -A PROJECT --ntasks-per-node=8 --gpus-per-node=8 \
#         --cpus-per-task=7 --network=disable_rdzv_get submit.slurm
# Links, from the guide: 4 x 200 Gbit/s per node; 50 to 200 GB/s between two GPUs of a node:
# plan: --gpus-per-node 8 --node-link 100e9 --gpu-link 50e9
# OLCF's page advises against torchrun here: with it, all ranks of a node share one core.

module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 || return 1
module load rccl-net-plugin || return 1  # without it RCCL uses TCP sockets, "which does not scale"
module load craype-accel-amd-gfx90a || return 1
export LD_LIBRARY_PATH=${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}  # cpe/26.03 is not the default
: "${PYTORCH:?the folder of a conda environment with PyTorch for ROCm 7.1 (2.10), created as the second page says}"
conda activate "$PYTORCH" || return 1

# Slingshot's interfaces; hsn0 alone if it hangs. NCCL is RCCL here, and reads NCCL's variables.
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen" MIOPEN_CUSTOM_CACHE_DIR="/tmp/$USER-miopen"  # not in the shared home
export MPICH_GPU_SUPPORT_ENABLED=0  # else Cray's MPI needs a GPU library; only CPU buffers go through MPI
export SITE_MPICC="cc -shared"  # for make setup
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-7}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task

# Each task sees only the GPU nearest to its cores. A task that fails ends the job.
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --kill-on-bad-exit=1 --gpus-per-task=1 --gpu-bind=closest "$@"
}

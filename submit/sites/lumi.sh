# shellcheck shell=bash
# LUMI (CSC): Slurm, 4 MI250X per node, each visible as two GPUs, Slingshot 11; PyTorch is in a container. Not tried by us.
# Source: github.com/Lumi-supercomputer/LUMI-AI-Guide, of May 2026, chapters 2 (container, environment) and 5 (cores, cache).
# Its containers are in /appl/local/laifs/containers; use one called ...-full-..., with PyTorch and DeepSpeed. Once:
#     module use /appl/local/laifs/modules; module load lumi-aif-singularity-bindings
#     singularity exec $CONTAINER python -m venv --system-site-packages .venv     (instead of make setup)
# Then submit with 8 tasks per node:
#     SITE=lumi CONTAINER=/path/of/it.sif sbatch -A PROJECT -p standard-g --ntasks-per-node=8 --gpus-per-node=8 \
#         --cpus-per-task=7 submit.slurm

module use /appl/local/laifs/modules || return 1
module load lumi-aif-singularity-bindings || return 1  # Slingshot and the file systems, in the container
: "${CONTAINER:?the file of a container with PyTorch, from /appl/local/laifs/containers}"

export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen" MIOPEN_CUSTOM_CACHE_DIR="/tmp/$USER-miopen"  # not in the shared home
export FI_MR_CACHE_MONITOR=userfaultfd  # without it RCCL may hang: LUMI-AI-Guide, issue 118
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-7}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task

# Without MPI the ranks use Slurm's variables, as in the guide.
# Every task sees all GPUs of its node, uses that of its local rank, and gets the seven nearest cores.
cores=0x00fe000000000000,0xfe00000000000000,0x0000000000fe0000,0x00000000fe000000
cores+=,0x00000000000000fe,0x000000000000fe00,0x000000fe00000000,0x0000fe0000000000
# shellcheck disable=SC2016 # for the shell in the container
inside='. "$VIRTUAL_ENV/bin/activate"; exec "$@"'
python() { singularity run "$CONTAINER" bash -c "$inside" inside python "$@"; }  # chapter 1 needs no launch
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=none --kill-on-bad-exit=1 --cpu-bind="mask_cpu=$cores" \
        singularity run "$CONTAINER" bash -c "$inside" inside "$@"
}

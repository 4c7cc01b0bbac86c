# shellcheck shell=bash
# Attendees source this file on the login node, in each terminal: . /shared/course.sh
# Once, in their clone: make setup    (it links .venv to $VENV, so that the commands on all pages work as printed)
# The instructor copies it to a shared disk and fills it in: remove what your centre does not need, such as a reservation.
export SITE="/shared/mine.sh"         # or a name in submit/sites
export VENV="/shared/workshop-env"    # shared by all: make setup SITE=... VENV=...
# sbatch reads these, and SBATCH_CONSTRAINT, SBATCH_QOS. Other options go into two_gpus, such as --mem, or --cpus-per-task=4 on nodes
# with few cores. On nodes without GPUs, export SBATCH_GPUS_PER_NODE=0, and write --gpus-per-node=0 in two_gpus.
export SBATCH_ACCOUNT=PROJECT SBATCH_RESERVATION=course SBATCH_PARTITION=gpu
qsub() { command qsub -V -A PROJECT -q course "$@"; }                         # qsub does not read such variables
[ -z "${BASH_VERSION:-}" ] || export -f qsub
two_gpus="--nodes=1 --ntasks-per-node=2 --gpus-per-node=2"  # a small job: sbatch $two_gpus submit.slurm
export two_gpus
. "$VENV/bin/activate"

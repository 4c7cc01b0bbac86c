# shellcheck shell=bash
# What attendees source on the login node: . /shared/course.sh
# The instructor copies this file to a disk that all see, and fills it in. A test runs it through a real Slurm.
export SITE=/shared/mine.sh           # or a name of submit/sites
export VENV=/shared/workshop-env      # the environment of all: make setup SITE=... VENV=...
export SBATCH_ACCOUNT=PROJECT SBATCH_RESERVATION=course SBATCH_PARTITION=gpu  # sbatch reads these
qsub() { command qsub -V -A PROJECT -q course "$@"; }                         # qsub reads no variables
export -f qsub
two_gpus="--nodes=1 --ntasks-per-node=2 --gpus-per-node=2"  # a small job: sbatch $two_gpus submit.slurm
export two_gpus
. "$VENV/bin/activate"

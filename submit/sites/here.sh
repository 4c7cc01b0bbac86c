# shellcheck shell=bash
# This machine, without a scheduler: SITE=here bash submit.slurm runs a submit script as it is, on RANKS ranks (2).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # ranks share the cores
launch() { mpiexec -n "${RANKS:-2}" "$@"; }

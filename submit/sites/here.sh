# shellcheck shell=bash
# This machine, without a scheduler: SITE=here bash submit.slurm runs a submit script as it stands, on RANKS ranks (2).
launch() { mpiexec -n "${RANKS:-2}" "$@"; }

# shellcheck shell=bash
# A Slurm cluster without GPUs, with the workshop's own environment: its MPICH speaks PMI2, so no MPI of the site is needed.
# Tried: submit/lab.sh runs chapter 3 so, on each change. Source: slurm.schedmd.com/mpi_guide.html
# export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn  # where the doctor finds that they take another network
# MPICH 5.0's other network layer, UCX, sends 4096 bytes of the memory behind its address along, in parts of a length that
# Slurm's PMI2 cuts where they hold few zeros: then MPI does not start, or never ends.
export MPIR_CVAR_CH4_NETMOD=ofi
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun of Slurm 22.05 to 23.02 does not take it from the header
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
launch() { srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=pmi2 --kill-on-bad-exit=1 "$@"; }

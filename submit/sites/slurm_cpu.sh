# shellcheck shell=bash
# A Slurm cluster without GPUs, with the workshop's own environment: its MPICH speaks PMI2, so no MPI of the site is needed.
# The submit scripts ask for GPUs: before sbatch, export SBATCH_GPUS_PER_NODE=0.
# Tested: cluster/lab.sh runs chapter 3 with it, on each change. Source: slurm.schedmd.com/mpi_guide.html
# export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn  # if the doctor finds that they use another network
# Not UCX, MPICH 5.0's other network layer: it publishes its address with 4096 stray bytes after it, which Slurm's PMI2
# truncates unless most of them are zeros. Then MPI does not start, or never ends.
export MPIR_CVAR_CH4_NETMOD=ofi
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
launch() { srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=pmi2 --kill-on-bad-exit=1 "$@"; }

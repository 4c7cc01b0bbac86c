# shellcheck shell=bash
# A Slurm cluster with NVIDIA GPUs and PyTorch in a container of Apptainer or Singularity: an example to copy and edit.
# Not tried by us. Sources: apptainer.org/docs/user/main/gpu.html (--nv) and /bind_paths_and_mounts.html;
# slurm.schedmd.com/containers.html. Once, on a node that has the container (instead of make setup):
#     apptainer exec --nv $CONTAINER python -m venv --system-site-packages .venv
#     apptainer exec $CONTAINER .venv/bin/pip install scikit-learn psutil tqdm deepspeed
# Submit with:  SITE=apptainer CONTAINER=/path/of/it.sif sbatch -A PROJECT -p PARTITION submit.slurm

: "${CONTAINER:?the file of a container with PyTorch 2.7 or newer}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # in Slurm 22.05 to 23.02 srun does not inherit --cpus-per-task
export APPTAINER_BINDPATH="${APPTAINER_BINDPATH:+$APPTAINER_BINDPATH,}${workshop:-$PWD}"  # add your data's folder

# Without MPI, because the container's is not the site's. The ranks use Slurm's variables, which a container passes on.
# srun starts a container per rank; each sees all GPUs of its node (--nv) and uses that of its local rank.
# shellcheck disable=SC2016 # for the shell in the container
inside='. "$VIRTUAL_ENV/bin/activate"; exec "$@"'
python() { apptainer exec --nv "$CONTAINER" bash -c "$inside" inside python "$@"; }  # chapter 1 needs no launch
launch() {
    srun ${RANKS:+--ntasks="$RANKS" --nodes="$NODES"} --mpi=none --kill-on-bad-exit=1 \
        apptainer exec --nv "$CONTAINER" bash -c "$inside" inside "$@"
}

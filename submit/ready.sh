#!/usr/bin/env bash
# Is the cluster ready for the course? Submits what the attendees will submit, waits, and says so of each job.
#
#     . /shared/course.sh
#     bash submit/ready.sh                                       # the doctor, chapter 3 on one node and on two
#     bash submit/ready.sh --dataset svhn --data-dir /shared/data    # and chapter 3 with these flags
#
# The jobs run at once. Their output stays in results/ready. The exit code is the number of jobs that are not ready.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
logs=$PWD/results/ready
mkdir -p "$logs"
if ! command -v sbatch >/dev/null && ! command -v qsub >/dev/null; then
    echo "ready.sh: there is neither sbatch nor qsub: run it on the cluster's login node" >&2
    exit 2
fi

submit() {  # name, folder, script, nodes, the line that it ends with, flags: submit a job, wait for it, say how it went
    local log=$logs/$1.txt nodes=$4 started=$SECONDS select
    : >"$log"
    cd "$2" || return
    if command -v sbatch >/dev/null; then
        sbatch --wait --output="$log" --nodes="$nodes" "$3.slurm" "${@:6}" >"$log.submit" 2>&1
    else
        select=$(sed -n "s/^#PBS -l \(select=\)[0-9]*/\1$nodes/p" "$3.pbs")
        FLAGS="${*:6}" qsub -W block=true -j oe -o "$log" -l "$select" "$3.pbs" >"$log.submit" 2>&1
    fi && grep -q "$5" "$log" && {
        echo "$1: ready; $((SECONDS - started)) s from submitting to its end; $(grep -m 1 '^ranks: ' "$log" | cut -d , -f 1,2)"
        return 0
    }
    echo "$1: not ready"
    {
        grep -h -E "^(wrong|doctor.py|main.py|qsub|sbatch: error|[A-Za-z.]*Error): |^srun: error: .*code" "$log.submit" "$log" ||
            tail -n 3 "$log"
    } | sort -u | head -n 4 | sed 's/^/    /'
    echo "    all of it: $log"
    return 1
}

chapter=(03_ddp submit)
trained="^test accuracy"
echo "submitted; waiting for the jobs (squeue or qstat shows them)"
submit "the doctor on two nodes" submit doctor 2 "^nothing wrong was found" & jobs=($!)
submit "chapter 3 on one node" "${chapter[@]}" 1 "$trained" --global-batch-size 64 --epochs 1 & jobs+=($!)
submit "chapter 3 on two nodes" "${chapter[@]}" 2 "$trained" --global-batch-size 64 --epochs 1 & jobs+=($!)
if [ $# -gt 0 ]; then
    submit "chapter 3 with a data set" "${chapter[@]}" 1 "$trained" --epochs 1 --max-steps 5 "$@" & jobs+=($!)
fi
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=$((failed + 1)); done
[ $failed -gt 0 ] || echo "ready"
exit $failed

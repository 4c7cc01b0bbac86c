#!/usr/bin/env bash
# Is the cluster ready for the course? Submits the attendees' jobs, waits, and reports on each.
#
#     . /shared/course.sh
#     bash submit/ready.sh                                       # the doctor, chapter 3 on one and two nodes
#     bash submit/ready.sh --dataset svhn --data-dir /shared/data    # and chapter 3 with these flags
#
# The jobs run at the same time. Their output is in results/ready. The exit code is the number of jobs that are not ready.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
logs=$PWD/results/ready
mkdir -p "$logs"
if ! command -v sbatch >/dev/null && ! command -v qsub >/dev/null; then
    echo "ready.sh: neither sbatch nor qsub found: run it on the cluster's login node" >&2
    exit 2
fi

run_job() {  # SCRIPT NODES LOG FLAGS...: submit a job and wait for its end
    local script=$1 nodes=$2 log=$3 select
    shift 3
    if command -v sbatch >/dev/null; then
        sbatch --wait --output="$log" --nodes="$nodes" "$script.slurm" "$@"
    else
        select=$(sed -n "s/^#PBS -l \(select=\)[0-9]*/\1$nodes/p" "$script.pbs")
        FLAGS="$*" qsub -W block=true -j oe -o "$log" -l "$select" "$script.pbs"
    fi
}

submit() {  # NAME FOLDER SCRIPT NODES PATTERN FLAGS...: run a job, and report if its output matches the pattern
    local name=$1 folder=$2 script=$3 nodes=$4 pattern=$5 started=$SECONDS ranks
    local log=$logs/$name.txt
    shift 5
    : >"$log"
    cd "$folder" || return
    if run_job "$script" "$nodes" "$log" "$@" >"$log.submit" 2>&1 && grep -q "$pattern" "$log"; then
        ranks=$(grep -m 1 '^ranks: ' "$log" | cut -d , -f 1,2)
        echo "$name: ready; $((SECONDS - started)) s from submission to end; $ranks"
        return 0
    fi
    echo "$name: not ready"
    {
        grep -h -E "^(wrong|doctor.py|main.py|qsub|sbatch: error|[A-Za-z.]*Error): |^srun: error: .*code" "$log.submit" "$log" ||
            tail -n 3 "$log"
    } | sort -u | head -n 4 | sed 's/^/    /'
    echo "    full log: $log"
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

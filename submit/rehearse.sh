#!/usr/bin/env bash
# Rehearse a course on the cluster. Submits the attendees' jobs, waits for them, and reports on each.
#
#     . /shared/course.sh
#     bash submit/rehearse.sh                                           # the doctor, and chapter 3 on one node and on two
#     bash submit/rehearse.sh --dataset svhn --data-dir /shared/data    # and chapter 3 with these flags
#
# Under Slurm each job asks for what $two_gpus says, as attendees' jobs do. The jobs run at the same time. Their output is in
# results/rehearsal. The exit code is the number of jobs that are not ready. A job that has not ended after MINUTES (30) is cancelled.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if ! type -P sbatch >/dev/null && ! type -P qsub >/dev/null; then  # files only: course.sh has a function qsub
    echo "rehearse.sh: neither sbatch nor qsub found: run it on the cluster's login node" >&2
    exit 2
fi
exec 3>&2  # the terminal, for functions whose stderr goes to a file
logs=$PWD/results/rehearsal
mkdir -p "$logs"
rm -f "$logs"/*.txt

# shellcheck disable=SC2317 # report() calls one of these two
run_slurm_job() {  # SCRIPT NODES LOG FLAGS...: submit a job, wait for its end, check how many ranks it had
    local job job_info state reason="" last_reason="" tasks report_line started=$SECONDS
    # shellcheck disable=SC2086 # options are words
    job=$(sbatch --parsable --output="$3" ${two_gpus:-} --nodes="$2" "$1.slurm" "${@:4}") || return
    trap 'scancel "$job"; exit 143' TERM
    while true; do
        job_info=$(scontrol --oneliner show job "$job" 2>/dev/null)  # empty while the controller does not answer
        state=$(grep -o "JobState=[A-Z_]*" <<<"$job_info" | cut -d = -f 2)
        [[ ! $state =~ ^(COMPLETED|CANCELLED|FAILED|TIMEOUT|DEADLINE|PREEMPTED|OUT_OF_MEMORY|NODE_FAIL|BOOT_FAIL)$ ]] || break
        reason=$(grep -o " Reason=[^ ]*" <<<"$job_info" | cut -d = -f 2)
        if [[ ! $state =~ ^(RUNNING|COMPLETING)?$ && $reason != "$last_reason" && $((SECONDS - started)) -gt 20 ]]; then
            echo "job $job waits in the queue: $reason" >&3
            last_reason=$reason
        fi
        if ((SECONDS - started > 60 * ${MINUTES:-30})); then
            scancel "$job"
            echo "wrong: not ended after ${MINUTES:-30} minutes, so cancelled: ${state:-no answer} $reason"
            return 1
        fi
        sleep 1
    done
    tasks=$(grep -o "NumTasks=[0-9]*" <<<"$job_info" | cut -d = -f 2)
    report_line=$(grep -m 1 "^ranks: " "$3" | cut -d , -f 1,2)
    if [ -n "$report_line" ] && ! grep -q "^ranks: ${tasks:-[0-9]*}, nodes: $2\b" "$3"; then
        echo "wrong: the job has ${tasks:-?} tasks on $2 nodes, but the program reports $report_line: check launch in the site's file"
        return 1
    fi
}

# shellcheck disable=SC2317
run_pbs_job() {  # SCRIPT NODES LOG FLAGS...: submit a job, wait for its end
    local select
    select=$(sed -n "s/^#PBS -l \(select=\)[0-9]*/\1$2/p" "$1.pbs")
    FLAGS="${*:4}" qsub -W block=true -j oe -o "$3" -l "$select" "$1.pbs"
}

report() {  # NAME FOLDER SCRIPT NODES PATTERN FLAGS...: run a job, and report whether its output matches the pattern
    local name=$1 folder=$2 script=$3 nodes=$4 pattern=$5 started=$SECONDS run_job=run_pbs_job reasons
    local log=$logs/${name// /-}.txt
    shift 5
    : >"$log"
    cd "$folder" || return
    ! type -P sbatch >/dev/null || run_job=run_slurm_job
    if $run_job "$script" "$nodes" "$log" "$@" >"$log.submit" 2>&1 && grep -q "$pattern" "$log"; then
        echo "$name: ready; $((SECONDS - started)) s from submission to end; $(grep -m 1 '^ranks: ' "$log" | cut -d , -f 1,2)"
        grep -m 1 "^note: " "$log"
        return 0
    fi
    cat "$log.submit" >>"$log"
    reasons=$({
        grep -E "^(wrong|doctor|main.py|qsub|[A-Za-z.]*Error): |error: .*(code|fail)" "$log"
        grep -A1 "^Last error:" "$log"  # of NCCL
    } | sort -u | head -n 4)
    printf '%s: not ready\n%s\n    full log: %s\n' "$name" "${reasons:-$(tail -n 3 "$log")}" "$log"
    return 1
}

chapter_3=(03_ddp submit)  # FOLDER SCRIPT
accuracy="^test accuracy"
echo "submitting, then waiting for the jobs (squeue or qstat shows them)"
report "the doctor on two nodes" . cluster/doctor 2 "^no problems found" & jobs=($!)
report "chapter 3 on one node" "${chapter_3[@]}" 1 "$accuracy" --global-batch-size 64 --epochs 1 & jobs+=($!)
report "chapter 3 on two nodes" "${chapter_3[@]}" 2 "$accuracy" --global-batch-size 64 --epochs 1 & jobs+=($!)
if [ $# -gt 0 ]; then
    report "chapter 3 with a data set" "${chapter_3[@]}" 1 "$accuracy" --epochs 1 --max-steps 5 "$@" & jobs+=($!)
fi
trap 'kill "${jobs[@]}"; wait; exit 130' INT TERM
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=$((failed + 1)); done
if [ $failed = 0 ] && grep -q "^note: " "$logs"/*.txt; then
    echo "ready, if the notes above are as you expect"
elif [ $failed = 0 ]; then
    echo "ready"
fi
exit $failed

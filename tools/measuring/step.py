"""Record when each rank computes, waits and all-reduces in a step. Records: step.jsonl.

main.py trains unchanged: some steps to warm up, some that are only timed, then some under
torch.profiler. A profiled step is a list of [name, start, end], in microseconds since 1970. It
waits between the end of backward and the optimizer. Horovod's own threads are not profiled.
"""

import runpy
import sys
import time
from statistics import median

from torch.profiler import ProfilerActivity, profile

from cluster.launch import ROOT, rank_command
from cluster.records import RECORDS, append_records
from cluster.study import run_for_records, run_study
from workshop.report import Report

WARM_UP, TIMED, LAST = 5, 15, 26  # the last step of each part
FLAGS = f"--device cpu --dataset synthetic --model resnet18 --batch-size 64 --max-steps {LAST}"


def split_steps(profiler):
    """Return the profiled steps. A step begins when the optimizer has ended the previous one."""
    offset = profiler.profiler.kineto_results.trace_start_ns() // 1000

    def spans(name):
        return sorted((offset + round(event.time_range.start), offset + round(event.time_range.end))
                      for event in profiler.events() if event.name.startswith(name))

    updates = spans("Optimizer.step")
    updates = [update for update in updates  # Horovod's step() contains PyTorch's
               if not any(update[0] < start < update[1] for start, _ in updates)]
    gradients, sums = spans("autograd::engine::evaluate_function"), spans("gloo:all_reduce")
    steps = []
    for (_, begin), (update, end) in zip(updates, updates[1:]):
        backward = [span for span in gradients if begin <= span[0] < update]
        start, stop = backward[0][0], max(stop for _, stop in backward)
        steps.append([("forward", begin, start), ("backward", start, stop),
                      *(("all-reduce", *span) for span in sums if begin <= span[0] < end),
                      ("waits", stop, update), ("optimizer", update, end)])
    return steps


def train(chapter, results):
    """Run a chapter's main.py as one rank; append the record of its steps to `results`."""
    profiler, end_step, ends = profile(activities=[ProfilerActivity.CPU]), Report.end_step, []

    def end_and_record(report, step):
        end_step(report, step)
        ends.append(time.perf_counter())
        if step == TIMED:
            profiler.start()
        elif step == LAST:
            profiler.stop()
            seconds = [end - start for start, end in zip(ends, ends[1:])]  # from step 2
            append_records(results, {
                "rank": report.rank, "flags": FLAGS, "steps": split_steps(profiler),
                "step_seconds": median(seconds[WARM_UP - 1:TIMED - 1])})

    Report.end_step = end_and_record
    sys.argv = [str(ROOT / chapter / "main.py"), *FLAGS.split()]
    runpy.run_path(sys.argv[0], run_name="__main__")


def measure(chapter, ranks):
    return run_for_records(rank_command("tools.measuring.step", ranks, chapter))


if __name__ == "__main__":
    if sys.argv[1:]:
        chapter, _, results = sys.argv[1:]
        train(chapter, results)
    else:
        chapters = "03_ddp", "02_horovod", "04_deepspeed"
        run_study(RECORDS / "step.jsonl", [{"chapter": chapter, "ranks": ranks}
                                           for chapter in chapters for ranks in (1, 2)], measure)

"""Record for each step when two ranks compute and when they all-reduce gradients.

    python -m tools.measuring.profile_step      # records: assets/records/step.jsonl

main.py runs unchanged, under torch.profiler. Chapter 2's all-reduces are read from Horovod's
timeline, which rank 0 writes. For each step after the warm-up a record has a list of [kind, start,
end], the times in microseconds since 1970. The kind is "forward", "backward", "optimizer" or
"all-reduce" (which includes the wait for the other ranks with DDP, but not with Horovod).
"""

import json
import os
import runpy
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from submit.study import RECORDS, ROOT, append, command, environment, machine, read, run, study

FLAGS = "--device cpu --dataset synthetic --model resnet18 --batch-size 64 --max-steps 16"
WARM_UP_STEPS = 5


def spans(events, name):
    """Return the (start, end), in microseconds, of the events whose name begins with `name`."""
    return sorted((event.time_range.start, event.time_range.end) for event in events
                  if event.name.startswith(name))


def horovod_spans(timeline):
    """Return the (start, end) of Horovod's all-reduces, in microseconds since 1970."""
    events = json.loads("[" + timeline.strip("[],\n ") + "]")
    epoch_offset = events[0]["args"]["start_time_since_epoch_in_micros"]
    all_reduces, phases = [], defaultdict(list)  # phases: those that have begun, per tensor
    for event in events:
        if event["ph"] == "B":
            phases[event["pid"]].append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, start = phases[event["pid"]].pop()
            if name.endswith("_ALLREDUCE") and not name.startswith("NEGOTIATE"):
                all_reduces.append((epoch_offset + start, epoch_offset + event["ts"]))
    merged = []
    for start, end in sorted(all_reduces):
        if merged and start < merged[-1][1]:  # the tensors of one fused all-reduce overlap
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def steps_of(events, all_reduces):
    """Return the steps after the warm-up as lists of (kind, start, end).

    A step begins when the gradients are set to zero; backward ends with the last gradient.
    """
    starts = [start for start, _ in spans(events, "Optimizer.zero_grad")]
    backward = spans(events, "autograd::engine::evaluate_function")
    optimizer = spans(events, "Optimizer.step")
    steps = []
    for begin, end in list(zip(starts, starts[1:]))[WARM_UP_STEPS:]:
        gradients = [span for span in backward if begin <= span[0] < end]
        updates = [span for span in optimizer if begin <= span[0] < end]
        backward_start = gradients[0][0]
        steps.append([
            ("forward", begin, backward_start),
            ("backward", backward_start, max(gradient_end for _, gradient_end in gradients)),
            *(("all-reduce", *span) for span in all_reduces if begin <= span[0] < end),
            ("optimizer", *updates[-1])])  # Horovod's step() contains PyTorch's
    return steps


def profile_rank(chapter, folder):
    """Profile a chapter's main.py as one rank; write the record of its steps into the folder."""
    main = str(ROOT / chapter / "main.py")
    sys.argv = [main, *FLAGS.split(), "--results", f"{folder}/results.jsonl"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler, suppress(SystemExit):
        runpy.run_path(main, run_name="__main__")
    epoch_offset = profiler.profiler.kineto_results.trace_start_ns() / 1e3
    all_reduces = spans(profiler.events(), "gloo:all_reduce")
    rank, timeline = int(os.environ["PMI_RANK"]), Path(folder, "timeline.json")
    if rank == 0 and timeline.exists():
        all_reduces = [(start - epoch_offset, end - epoch_offset)
                       for start, end in horovod_spans(timeline.read_text())]
    steps = [[(kind, round(epoch_offset + start), round(epoch_offset + end))
              for kind, start, end in step]
             for step in steps_of(profiler.events(), all_reduces)]
    append(Path(folder, f"rank{rank}.jsonl"), {"rank": rank, "flags": FLAGS, "steps": steps})


def measure(chapter):
    """Return the records of both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = command(chapter, 2)[:-1]  # without main.py
        variables = {"PYTHONPATH": str(ROOT / chapter),  # main.py imports what is next to it
                     "HOROVOD_TIMELINE": f"{folder}/timeline.json"}  # DDP ignores it
        run([*launcher, "-m", "tools.measuring.profile_step", chapter, folder],
            env=environment() | variables)
        return [record | machine() for rank in (0, 1)
                for record in read(Path(folder, f"rank{rank}.jsonl"))]


if __name__ == "__main__":
    if sys.argv[1:]:
        profile_rank(*sys.argv[1:])
    else:
        study(RECORDS / "step.jsonl",
              [{"chapter": chapter} for chapter in ("03_ddp", "02_horovod/pytorch")], measure)

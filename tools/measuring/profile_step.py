"""Watch the training steps of a chapter's ranks: when each computes, and when the gradients are all-reduced.

    mpiexec -n 2 python -m tools.measuring.profile_step 03_ddp/main.py --results step.jsonl

main.py runs unchanged, under torch.profiler; for chapter 2 the all-reduces come from Horovod's own timeline, which
rank 0 writes. Each rank appends a line: for each step after the warm-up a list of [what, start, end], in microseconds
since 1970; what is "forward", "backward", "all-reduce" (DDP's with the wait for the other ranks, Horovod's without) or
"optimizer".
"""

import argparse
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from launch import ROOT, machine
from records import opens, refusal
from runs import append
from torch.profiler import ProfilerActivity, profile

FLAGS = ["--device", "cpu", "--dataset", "synthetic", "--model", "resnet18", "--batch-size", "64", "--max-steps", "16"]
WARM_UP = 5
RANK = int(os.environ.get("PMI_RANK", 0))


def spans(events, *names):
    """(start, end) in microseconds of the profiler's events with one of these beginnings, in their order."""
    return sorted((event.time_range.start, event.time_range.end) for event in events if event.name.startswith(names))


def timeline(path):
    """(start, end) in microseconds since 1970 of what Horovod sent: the innermost phases that end in ALLREDUCE."""
    events = json.loads("[" + path.read_text().strip().strip("[],\n") + "]")
    zero = events[0]["args"]["start_time_since_epoch_in_micros"]
    found, open_phases = [], {}
    for event in events:
        phases = open_phases.setdefault(event["pid"], [])
        if event["ph"] == "B":
            phases.append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, start = phases.pop()
            if name.endswith("_ALLREDUCE") and not name.startswith("NEGOTIATE"):
                found.append((zero + start, zero + event["ts"]))
    merged = []
    for start, end in sorted(found):  # the tensors of one fused all-reduce have the same times
        if merged and start < merged[-1][1]:
            begun, ended = merged.pop()
            merged.append((begun, max(ended, end)))
        else:
            merged.append((start, end))
    return merged


def steps_of(events, sent):
    """The steps after the warm-up: lists of (what, start, end), in the events' microseconds.

    A step begins when the gradients are set to zero. Backward ends with the last gradient: what follows is waiting.
    """
    begins = [start for start, _ in spans(events, "Optimizer.zero_grad")]
    backward = spans(events, "autograd::engine::evaluate_function")
    optimizer = spans(events, "Optimizer.step")
    steps = []
    for begin, end in list(zip(begins, begins[1:]))[WARM_UP:]:
        gradients = [span for span in backward if begin <= span[0] < end]
        update = [span for span in optimizer if begin <= span[0] < end][-1]  # Horovod's own contains PyTorch's
        steps.append([("forward", begin, gradients[0][0]),
                      ("backward", gradients[0][0], max(last for _, last in gradients)),
                      *(("all-reduce", *span) for span in sent if begin <= span[0] < end), ("optimizer", *update)])
    return steps


def watched(path, folder):
    """Run a main.py and watch it. Returns this rank's record, with times in microseconds since 1970."""
    sys.argv = [str(path), *FLAGS, "--results", str(folder / "record.jsonl")]
    sys.path[0] = str(path.resolve().parent)  # as for python main.py: it imports what lies beside it
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    zero = profiler.profiler.kineto_results.trace_start_ns() / 1e3
    events = profiler.events()
    sent = spans(events, "gloo:all_reduce")
    if (folder / "timeline.json").exists():
        sent = [(start - zero, end - zero) for start, end in timeline(folder / "timeline.json")]
    steps = [[(what, round(zero + start), round(zero + end)) for what, start, end in step]
             for step in steps_of(events, sent)]
    return {"chapter": str(path.parent), "rank": RANK, "flags": " ".join(FLAGS),
            "steps": steps, **machine()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = sys.exit  # run() has rank 0 say it
    parser.add_argument("main", type=Path, help="a chapter's main.py")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    if not os.path.isfile(args.main) or not opens(args.results):
        sys.exit("name a chapter's main.py, and --results FILE in a folder that exists and that you may write to")
    if reason := refusal(args.results):
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOROVOD_TIMELINE"] = f"{folder}/timeline.json"  # Horovod alone looks at it
        record = watched(args.main, Path(folder))
    append(args.results, record)


if __name__ == "__main__":
    sys.path.append(str(ROOT / "01_single_node"))
    from ranks import run
    run(main)

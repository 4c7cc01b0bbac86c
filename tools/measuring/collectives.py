"""Count what the collectives of a step pass in chapter 5, by stage and accumulation. Records: collectives.jsonl.

    python -m tools.measuring.collectives

Each of two ranks runs the chapter's main.py unchanged, under torch.profiler; the fourth step is looked at. The count is
that of Rajbhandari et al. (1910.02054, section 7): elements of the tensors, an all-reduce counts twice.
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

from launch import ROOT, command, machine, run
from records import RECORDS
from runs import study

FLAGS = ("--device", "cpu", "--global-batch-size", 64, "--max-steps", 5, "--width", 256, "--layers", 8)
COUNTED = {  # the profiler's name of an operation: which of its inputs is the whole tensor
    "gloo:all_reduce": 0, "gloo:reduce": 0, "gloo:broadcast": 0, "c10d::_allgather_base_": 0,
    "c10d::_reduce_scatter_base_": 1}


def watch(words: list[str]) -> None:
    """Run the program words[0], its flags behind it, as __main__; rank 0 prints the operations of its fourth step."""
    import torch

    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    source = Path(words[0]).read_text()
    line = next(line for line in source.splitlines() if " logits = " in line)
    space = line[:len(line) - len(line.lstrip())]
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    seen = set()

    def look(step):
        if step == 3 and 3 not in seen:  # accumulation comes here several times in a step
            profiler.start()
        if step == 4 and 4 not in seen:
            profiler.stop()
            if os.environ["RANK"] == "0":
                print("counted:", json.dumps([[event.name, event.input_shapes] for event in profiler.events()]))
        seen.add(step)

    module = types.ModuleType("__main__")
    module.look, module.__file__ = look, words[0]
    sys.modules["__main__"] = module
    exec(compile(source.replace(line, f"{space}look(step)\n{line}"), words[0], "exec"), module.__dict__)


def passed(printed: str, reduce_scatter: bool = True) -> int:
    """The elements that the step passes, of what watch() printed.

    gloo has no reduce-scatter, and takes an all-reduce in its place: counted as what it stands for, or as what it is.
    """
    sums = dict.fromkeys(COUNTED, 0)
    for name, shapes in json.loads(re.search("counted: (.*)", printed)[1]):
        if name in COUNTED:
            sums[name] += math.prod(shapes[COUNTED[name]])
    scattered = sums.pop("c10d::_reduce_scatter_base_")
    return sum(sums.values()) + sums["gloo:all_reduce"] - reduce_scatter * scattered


def count(stage, accumulation):
    with tempfile.TemporaryDirectory() as folder:
        place, results = Path(folder, "05_zero"), Path(folder, "results")
        shutil.copytree(ROOT / "05_zero", place)
        config = json.loads((place / "ds_config.json").read_text())
        config["gradient_accumulation_steps"] = accumulation
        (place / "ds_config.json").write_text(json.dumps(config))
        words = command(str(place), 2, *FLAGS, "--stage", stage, "--results", results)
        main = words.index(str(place / "main.py"))
        printed = run([*words[:main], "-m", "tools.measuring.collectives", *words[main:]], timeout=120)
        record = json.loads(results.read_text())
    return record | {"accumulation": accumulation, "passed": passed(printed),
                     "passed_over_gloo": passed(printed, reduce_scatter=False)} | machine()


if __name__ == "__main__":
    if sys.argv[1:]:
        watch(sys.argv[1:])
    else:
        study(RECORDS / "collectives.jsonl", [{"stage": stage, "accumulation": accumulation}
                                              for stage in range(4) for accumulation in (1, 2, 4)], count)

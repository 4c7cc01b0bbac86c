"""Do what a chapter's main.py does up to its first step, and note on standard error the time after each stage.

    python -X importtime time_to_first_step.py MAIN FLAG...

Started by bench.py. A line a stage: "mark", its name, seconds since 1970; the last has the heavy packages, too.
"""

import importlib.util
import os
import sys
import time

HEAVY = {"matplotlib", "mpi4py", "pandas", "sklearn", "torchvision"}


def mark(stage, *more):
    print("mark", stage, time.time(), *more, file=sys.stderr)


def marked(function, before, after):
    def call(*args):
        if before:
            mark(before)
        result = function(*args)
        mark(after)
        return result
    return call


def stop(*_):
    mark("step", *sorted(HEAVY & sys.modules.keys()))
    os._exit(0)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])  # as for python main.py
    spec = importlib.util.spec_from_file_location("chapter", sys.argv[0])
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    mark("imports")
    import workshop
    workshop.load_tensors = marked(workshop.load_tensors, "ranks", "data")
    chapter.build_model = marked(chapter.build_model, None, "model")
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(stop)
    chapter.main()

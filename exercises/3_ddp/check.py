"""What the grade of exercise 3 looks at."""

import solution  # for its data and its model
from scripts import GRADIENTS, by_torchrun, findings, points_of_data, points_of_training


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    ranks = by_torchrun(file, 2)
    found = findings(ranks)
    yield from points_of_data(ranks, found, solution, "dist.init_process_group",
                              "without num_replicas= and rank= it asks the process group")
    wrong = [name for name in found if name in GRADIENTS | {"weights", "apart"}]
    hint = f"submit/agree.py calls that {wrong}, and says more; DDP alone makes them equal, and averages"
    if found.keys() & {"own gradients", "part"}:
        hint = ("each rank steps by its own gradients, at least in part: nothing averages them but "
                "DistributedDataParallel(model), in backward(), and only what went forward through the wrapper")
    yield "the ranks' gradients are averaged, and their parameters stay equal", not wrong, hint
    yield from points_of_training(ranks, solution, (
        "are model, optimizer, learning rate and momentum what they were? The global batch is the same, and with it "
        "the learning rate"))

"""What the grade of exercise 3 looks at."""

from scripts import by_torchrun, points_of_data, points_of_gradients, points_of_training

OWN = ("each rank steps by its own gradients, at least in part: nothing averages them but "
       "DistributedDataParallel(model), in backward(), and only what went forward through the "
       "wrapper")
OTHER = ("they are not the mean of the ranks'; DDP alone averages them: submit/agree.py says more")


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    ranks = by_torchrun(file, 2)
    yield from points_of_data(ranks, "dist.init_process_group",
                              "without num_replicas= and rank= it asks the process group")
    yield from points_of_gradients(ranks, {"own": OWN, "sum": OTHER, "other": OTHER}, (
        "DDP makes them equal when it wraps the model; equal gradients then keep them equal"))
    yield from points_of_training(ranks, 0.1, 2, (
        "are model, optimizer, learning rate and momentum what they were? The global batch is the "
        "same, and with it the learning rate"))

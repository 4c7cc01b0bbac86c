"""The messages: what each finding means, and what to do."""


def always(reports):
    return True


def does_not_average(reports):
    return not {"DDP", "Horovod"} & set(reports[0]["wrappers"])


def has_ddp(reports):
    return "DDP" in reports[0]["wrappers"]


def steps_within_backward(reports):
    return any(step["within backward"] for step in reports[0]["steps"])


def uses_torchrun(reports):
    return reports[0]["launcher"] == "torchrun"


def uses_horovod(reports):
    return reports[0]["horovod"]


def has_no_loader(reports):
    return not reports[0]["loaders"]


def has_stream(reports):
    return any(loader["stream"] for loader in reports[0]["loaders"])


def has_weighted_sampler(reports):
    return any(loader["sampler"] == "WeightedRandomSampler" for loader in reports[0]["loaders"])


def has_no_wrapper(reports):
    return not reports[0]["wrappers"]


SYMPTOMS = {
    "alone": "each rank trains by itself: there are as many trainings as ranks",
    "weights": "the ranks train different weights from the beginning",
    "apart": "the ranks' weights drift apart",
    "nothing trains": "no weight has changed",
    "own gradients": "each rank uses its own gradients: there are as many trainings as ranks",
    "part": "some parameters' gradients are averaged, others are each rank's own",
    "one rank's": "all ranks use one rank's gradients or weights: the others' samples are lost",
    "sum": "the gradients are summed, not averaged: as many times too large as there are ranks",
    "twice": "the gradients are averaged twice: as many times too small as there are ranks",
    "not finite": "gradients are infinite or not a number",
    "other gradients": "the optimizer's gradients are neither the mean over the ranks nor any "
                       "rank's own",
    "same data": "all ranks train on the same samples",
    "overlap": "ranks train on other ranks' samples, too",
    "sampler": "the sampler's num_replicas differs from the world size",
    "order": "two epochs have the same order",
    "steps": "some ranks have taken fewer optimizer steps than others",
    "one GPU": "several ranks are on one GPU",
    "hang": "the ranks wait for each other forever",
    "sequence": "the ranks call different collectives",
}

# {finding: [(does it apply to these reports?, what to do)]}; the first that applies is shown.
FIXES = {
    "alone": [
        (uses_torchrun, "init_process_group(), and DistributedDataParallel(model)"),
        (always, "if the script sets up DDP for torchrun, start it with torchrun, or begin it with "
                 "`from ranks import find_ranks` and `find_ranks()`; else see YOUR_SCRIPT.md")],
    "weights": [
        (has_ddp, "wrap the model when it is complete, and change no weight after that"),
        (uses_horovod, "hvd.broadcast_parameters(model.state_dict(), 0) before step 1"),
        (always, "broadcast rank 0's parameters before step 1, as DistributedDataParallel does")],
    "apart": [
        (always, "the same optimizer, learning rate and loaded state on all ranks; "
                 "no random change of the weights")],
    "nothing trains": [
        (always, "give the optimizer the parameters of the model that is called, after it was "
                 "wrapped, sharded or moved; make sure the loss depends on them")],
    "own gradients": [
        (steps_within_backward, "call step() after backward(): during backward() the gradients are "
                                "not averaged yet"),
        (has_ddp, "call the wrapped model, not the one inside; exit no_sync() before the last "
                  "backward of a step"),
        (uses_horovod, "call step() of hvd.DistributedOptimizer(optimizer)"),
        (always, "call a model that DistributedDataParallel wraps, or all-reduce the gradients")],
    "part": [
        (has_ddp, "wrap every model that is trained, when it is complete, and call the wrappers: "
                  "ddp(x), not ddp.module(x)"),
        (always, "all-reduce the gradients of all parameters")],
    "one rank's": [(always, "all-reduce the gradients, and divide by the number of ranks")],
    "sum": [(always, "divide by the number of ranks, or use op=AVG")],
    "twice": [
        (does_not_average, "divide the sum by the number of ranks once"),
        (always, "remove the division: the wrapper has averaged")],
    "not finite": [
        (always, "look at these ranks' loss: a division by 0, sqrt or log of 0, an overflow, "
                 "too high a learning rate")],
    "other gradients": [
        (has_no_wrapper, "average first; then clip, unscale or change them, on all ranks alike"),
        (has_ddp, "exit no_sync() before the last backward of a step; clip, unscale or change "
                  "gradients after that, on all ranks alike; GradScaler: one scale for all"),
        (always, "change gradients after the wrapper has averaged them, on all ranks alike")],
    "same data": [
        (has_no_loader, "shard the rows, order[rank::world_size] of one permutation, or draw them "
                        "with a seed that differs by rank, set after the model is wrapped"),
        (has_stream, "shard the stream: split_dataset_by_node(data, rank, world_size) of Hugging "
                     "Face, or islice(stream, rank, None, world_size); then shard it over workers"),
        (has_weighted_sampler, "give the sampler another seed on each rank: "
                               "generator=torch.Generator().manual_seed(seed + rank)"),
        (always, "shard the data: DistributedSampler(data) instead of shuffle=True")],
    "overlap": [
        (always, "DistributedSampler(data) instead of shuffle=True, and set_epoch() on every rank; "
                 "one seed on all ranks for a split of the data")],
    "sampler": [
        (uses_horovod, "DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())"),
        (always, "DistributedSampler(data), created after init_process_group()")],
    "order": [(always, "sampler.set_epoch(epoch) at the start of each epoch")],
    "steps": [(always, "give all ranks the same number of batches")],
    "one GPU": [(always, "torch.cuda.set_device(local_rank) before the model is moved")],
    "hang": [(always, "all ranks must make the same calls in the same order: look at these lines")],
    "sequence": [
        (always, "let all ranks make this call: outside of `if rank == 0`, with the same number of "
                 "batches, and with the same parts of the model (find_unused_parameters=True)")],
}

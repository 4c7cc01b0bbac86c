"""The messages: what each finding means, what may cause it, and what to do."""

CAUSES = {  # {finding: its possible causes}; a finding is hidden if one of its causes was found
    "weights": {"alone"},
    "apart": {"alone", "own gradients", "part", "one rank's", "other gradients", "not finite",
              "sequence"},
    "own gradients": {"alone"},
    "other gradients": {"sequence"},
    "same data": {"alone", "sampler"},
    "overlap": {"alone", "sampler"},
    "same noise": {"alone"},
    "nothing trains": {"not finite"},
    "steps": {"sequence"},
}

SYMPTOMS = {
    "alone": "each rank trains by itself: there are as many trainings as ranks",
    "weights": "the ranks train different weights from the beginning",
    "apart": "the ranks' weights drift apart",
    "nothing trains": "no weight has changed",
    "own gradients": "each rank uses its own gradients: there are as many trainings as ranks",
    "part": "some parameters' gradients are averaged, others are each rank's own",
    "one rank's": "all ranks use one rank's gradients: the others' samples are lost",
    "sum": "the gradients are summed, not averaged: as many times too large as there are ranks",
    "twice": "the gradients are averaged twice: as many times too small as there are ranks",
    "not finite": "gradients are infinite or not a number",
    "other gradients": "the optimizer's gradients are neither the mean over the ranks nor any "
                       "rank's own",
    "same data": "all ranks train on the same samples",
    "overlap": "ranks train on other ranks' samples, too",
    "same noise": "random numbers for different samples are the same on all ranks",
    "sampler": "the ranks' samplers do not divide the data among the ranks",
    "order": "two epochs have the same order",
    "steps": "some ranks have taken fewer optimizer steps than others",
    "hang": "the ranks wait for each other forever",
    "sequence": "the ranks do different things at the same time",
}

# {finding: {trait of the script: what to do}}; the first trait that the script has is shown.
FIXES = {
    "alone": {
        "": "init_process_group() and DistributedDataParallel(model). If the script has both, it "
            "does not know its launcher: start it with torchrun"},
    "weights": {
        "is not trained": "one seed on all ranks until all models are built, files loaded on all; "
                          "or copy a teacher or target network after "
                          "DistributedDataParallel(model)",
        "FSDP2": "one seed on all ranks before the model is built; or fill the shards with rank "
                 "0's weights: set_model_state_dict() with StateDictOptions(full_state_dict=True, "
                 "broadcast_from_rank0=True)",
        "DDP": "wrap the model when it is complete, and change no weight after that",
        "horovod": "hvd.broadcast_parameters(model.state_dict(), 0) before step 1",
        "": "broadcast rank 0's parameters before step 1, as DistributedDataParallel does"},
    "apart": {
        "learning rates": "change them on all ranks alike; if the change depends on a value, such "
                          "as a loss, all-reduce it first",
        "is not trained": "change it on every rank at the same step, not under `if rank == 0`, nor "
                          "by a rank's own random number; if it is computed from the rank's data, "
                          "all_reduce() these first",
        "": "the same optimizer, learning rate and loaded state on all ranks; the wrapped model is "
            "called to the end, and wrapped again if its parameters are replaced; no random change "
            "of the weights; the last micro-batch of each step averages, also at an epoch's end "
            "(--steps 100 measures more)"},
    "nothing trains": {
        "FSDP2": "give the optimizer the parameters of the model after fully_shard(), and after a "
                 "load that assigns new ones; "
                 "set_requires_gradient_sync(True) before the last backward of a step",
        "": "give the optimizer the parameters of the model that is called, after it was wrapped, "
            "sharded or moved; make sure the loss depends on them"},
    "own gradients": {
        "accelerate": "call the model and the optimizer that accelerator.prepare() returned, and "
                      "accelerator.backward(loss)",
        "DDP": "call the wrapped model, not the one inside; wrap it after its weights are loaded, "
               "and again if its parameters are replaced; exit no_sync() before the last backward "
               "of a step; call step() after backward(), not within it",
        "horovod": "call step() of hvd.DistributedOptimizer(optimizer)",
        "": "call a model that DistributedDataParallel wraps, or all-reduce the gradients"},
    "part": {
        "accelerate": "accelerator.prepare() every model that is trained, and call what it returns",
        "FSDP2": "fully_shard() the parts and then the model itself, without ignored_params: "
                 "FSDP averages only the gradients of what it shards",
        "DDP": "wrap every model that is trained, when it is complete, and call the wrapper, "
               "ddp(x), not ddp.module(x); exit no_sync() before the last backward of a step; a "
               "tensor in no module: after backward() all_reduce(tensor.grad, op=AVG)",
        "": "all-reduce the gradients of all parameters"},
    "one rank's": {"": "all-reduce the gradients, and divide by the number of ranks"},
    "sum": {"": "divide by the number of ranks, or use op=AVG"},
    "twice": {"": "divide once: DDP and Horovod have averaged already"},
    "not finite": {
        "": "look at these ranks' loss: a division by 0, sqrt or log of 0, an overflow, too high a "
            "learning rate; an optimizer's weights in fp16 (give it fp32, and use autocast)"},
    "other gradients": {
        "FSDP2": "change gradients on all ranks alike: clip_grad_norm_(model.parameters(), "
                 "max_norm) takes the norm of all shards; that of to_local() differs by rank",
        "": "average first (exit no_sync() before the last backward of a step); then clip, unscale "
            "or change gradients, on all ranks alike; GradScaler: one scale for all"},
    "same data": {
        "samplers have one rank": "DistributedSampler(data) takes the rank of the process group: "
                                  "leave out rank=, or pass torch.distributed.get_rank()",
        "no loader": "shard the rows, order[rank::world_size] of one permutation, or draw them, "
                     "and seed environments, by a seed that differs by rank, set after the model "
                     "is wrapped",
        "accelerate": "draw from the loader that accelerator.prepare(loader) returns; other random "
                      "numbers: set_seed(seed, device_specific=True) after prepare()",
        "batch sampler": "draw the batches with one seed, and give each rank its part of each: "
                         "batch[rank::world_size]",
        "stream": "shard the stream: split_dataset_by_node(data, rank, world_size) of Hugging "
                  "Face, or islice(stream, rank, None, world_size); then shard it over workers",
        "models' inputs": "give each rank its own random numbers, such as noise: "
                          "torch.manual_seed(seed + rank) after the model is wrapped; or shard "
                          "the data",
        "DistributedSampler": "if the sampler is given rank=, it must differ by rank; give each "
                              "rank its own random numbers, for data sets that draw: "
                              "torch.manual_seed(seed + rank) after the model is wrapped",
        "": "shard the data: DistributedSampler(data) instead of shuffle=True"},
    "overlap": {
        "in other steps": "a seed that no other rank has in any step: step * world_size + rank; or "
                          "one draw on all ranks, and its rows [rank::world_size]",
        "data sets differ": "one seed on all ranks for what shuffles or splits the data: "
                            "torch.Generator().manual_seed(0)",
        "accelerate": "accelerator.prepare(loader); one seed on all ranks for a split of the data",
        "": "DistributedSampler(data) instead of shuffle=True, and set_epoch() on every rank; one "
            "seed on all ranks for a split of the data"},
    "same noise": {
        "accelerate": "set_seed(seed, device_specific=True) after accelerator.prepare()",
        "": "torch.manual_seed(seed + rank) after the model is wrapped; also random.seed() and "
            "numpy.random.seed(), if these draw"},
    "sampler": {
        "horovod": "DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())",
        "": "DistributedSampler(data), created after init_process_group(), with one seed and "
            "set_epoch(epoch) on all ranks"},
    "order": {"": "sampler.set_epoch(epoch) at the start of each epoch"},
    "steps": {"": "give all ranks the same number of batches: drop_last=True, or a fixed number "
                  "of steps per epoch for a stream"},
    "hang": {"": "all ranks must make the same calls in the same order: look at these lines"},
    "sequence": {
        "after step": "let all ranks decide together whether to skip a batch, a backward pass or a "
                      "step: all-reduce what the condition depends on",
        "": "let all ranks make this call: under no `if rank == 0`; under no condition on a rank's "
            "own value, such as a loss or its number of batches: all-reduce it, so that all decide "
            "alike; with the same parts of the model (find_unused_parameters=True)"},
}


def find_fix(finding: str, report: dict | None, details: str) -> str:
    """Return what to do about a finding, given its details and a rank's report, if there is one."""
    traits = {trait for trait in FIXES[finding] if trait in details}
    if report:
        loaders = report["loaders"]
        traits |= {*report["wrappers"], *(loader["sampler"] for loader in loaders)}
        traits |= {name for name in ("horovod", "accelerate") if report[name]}
        traits |= {"stream"} if any(loader["stream"] for loader in loaders) else set()
        traits |= set() if loaders else {"no loader"}
        traits |= {"batch sampler"} if any(loader["batch_sampler"] for loader in loaders) else set()
    return next(text for trait, text in FIXES[finding].items() if trait in traits)

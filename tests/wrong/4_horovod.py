"""Wrong solutions of exercise 4: {name: (changes to the solution, what the hint says)}."""

SAMPLER = "DistributedSampler(train, hvd.size(), hvd.rank(), "
PARAMETERS = "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
STATE = "    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"
WRAP = "    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n"
WRONG = {
    "a sampler that does not know the ranks": (
        [(SAMPLER, "DistributedSampler(train, ")],
        "on rank"),
    "parameters are not broadcast": (
        [(PARAMETERS, "")],
        "the ranks start with their own random weights"),
    "the state is not broadcast": ([(STATE, "")], "what else does SGD's step depend on"),
    "wrapped when its state is loaded": ([(WRAP, ""), (PARAMETERS, WRAP + PARAMETERS)],
        "but not its state"),
    "no DistributedOptimizer": ([(WRAP, "")], "optimizer that steps?"),
    "a sum": ([("named_parameters())", "named_parameters(), op=hvd.Sum)")], "averaged, not summed"),
}

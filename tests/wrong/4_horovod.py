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
        "the others start with weights of their own"),
    "the state is not broadcast": ([(STATE, "")], "what else does SGD's step depend on"),
    "wrapped when its state is loaded": ([(WRAP, ""), (PARAMETERS, WRAP + PARAMETERS)],
        "out of the one that it is given"),
    "no DistributedOptimizer": ([(WRAP, "")], "averages gradients, if it steps"),
    "a sum": ([("named_parameters())", "named_parameters(), op=hvd.Sum)")], "averaged, not summed"),
}

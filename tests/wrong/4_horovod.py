"""Wrong solutions of exercise 4: {name: (changes to the solution, what the hint says)}."""

SAMPLER = "DistributedSampler(train, hvd.size(), hvd.rank(), "
PARAMETERS = "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
STATE = "    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"
WRAP = "    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())\n"
SAVE = '        torch.save(model.state_dict(), "digits.pt")\n'
LOAD = '    if os.path.exists("start.pt")'
WRONG = {
    "no init": ([("    hvd.init()\n", ""), (SAMPLER, "DistributedSampler(train, 1, 0, "), ("hvd.size()", "1"),
                 (PARAMETERS, ""),
                 (STATE, ""), (WRAP, ""), ("hvd.allreduce", ""), ("hvd.rank()", "0"), ("hvd.rank()", "0")],
                "believes that it is alone"),
    "init after the sampler": ([("    hvd.init()\n", ""), ("    model = build", "    hvd.init()\n    model = build")],
                               "Horovod has not been initialized"),
    "no sampler": ([("sampler=sampler", "shuffle=True")], "the loader of each rank goes through all images"),
    "a sampler that does not know the ranks": ([(SAMPLER, "DistributedSampler(train, ")], "on rank"),
    "a sampler for one rank": ([(SAMPLER, "DistributedSampler(train, 1, 0, ")], "and 2 train"),
    "the batch is not divided": ([("BATCH // hvd.size()", "BATCH")], "64 + 64 = 128"),
    "parameters are not broadcast": ([(PARAMETERS, "")], "the others start with weights of their own"),
    "broadcast before they are loaded": ([(PARAMETERS, ""), (LOAD, PARAMETERS + LOAD)],
        "the others start with weights"),
    "broadcast from rank 1": ([("state_dict(), root_rank=0", "state_dict(), root_rank=1")],
        "rank 0 does not start with"),
    "the state is not broadcast": ([(STATE, "")], "what else does SGD's step depend on"),
    "wrapped when its state is loaded": ([(WRAP, ""), (PARAMETERS, WRAP + PARAMETERS)],
        "out of the one that it is given"),
    "no DistributedOptimizer": ([(WRAP, "")], "each rank steps by its own gradients"),
    "another optimizer steps": ([(WRAP, WRAP.replace("    optimizer =", "    averaging ="))], "on rank"),
    "a sum": ([("named_parameters())", "named_parameters(), op=hvd.Sum)")], "they are summed"),
    "no set_epoch": ([("        sampler.set_epoch(epoch)\n", "")], "was not told it"),
    "a larger learning rate": ([(PARAMETERS, '    optimizer.param_groups[0]["lr"] *= hvd.size()\n' + PARAMETERS)],
                               "the learning rate is 2 times"),
    "every rank saves": ([(SAVE, SAVE[4:])], "ranks 0 and 1 all save"),
    "every rank prints": ([("        if hvd.rank() == 0:\n            print", "        if True:\n            print")],
                          "ranks print 3 and 2 lines"),
    "its own share is tested": ([("= test.tensors", "= test[hvd.rank()::hvd.size()]")], "all 360 together have"),
}

"""Wrong solutions of exercise 3: {name: (changes to the solution, what the hint says)}."""

INIT = '    dist.init_process_group("gloo")\n    rank, ranks = dist.get_rank(), dist.get_world_size()\n'
WRAP = "ddp = DistributedDataParallel(model)"
SAMPLER = "sampler=sampler, drop_last"
SAVE = '        torch.save(model.state_dict(), "digits.pt")\n'
BACKWARD = "            loss.backward()\n"
EVALUATE = "images, labels = test.tensors"
WRONG = {
    "they never meet": ([(INIT, "    rank, ranks = 0, 2\n"),
                         ("DistributedSampler(train, ", "DistributedSampler(train, 2, 0, "),
                         (WRAP, "ddp = model"), ("        dist.all_reduce(mean)\n", ""),
                         ("    dist.destroy_process_group()\n", "")], "believes that it is alone"),
    "no sampler": ([("sampler=sampler", "shuffle=True")], "the loader of each rank goes through all images"),
    "a sampler for one rank": ([("DistributedSampler(train, ", "DistributedSampler(train, 1, 0, ")],
        "and 2 train"),
    "a sampler and shuffle": ([("sampler=sampler", "sampler=sampler, shuffle=True")], "mutually exclusive"),
    "the batch is not divided": ([("BATCH // ranks", "BATCH")], "64 + 64 = 128"),
    "no wrapper": ([(WRAP, "ddp = model")], "nothing averages them"),
    "the wrapper is by-passed": ([("ddp(images)", "model(images)")], "forward through the wrapper"),
    "the wrapper's module": ([("ddp(images)", "ddp.module(images)")], "forward through the wrapper"),
    "averaged twice": ([(BACKWARD, BACKWARD + "            for parameter in model.parameters():\n"
                                              "                parameter.grad /= ranks\n")], "divided twice"),
    "no set_epoch": ([("        sampler.set_epoch(epoch)\n", "")], "was not told it"),
    "always the same epoch": ([("set_epoch(epoch)", "set_epoch(1)")], "was not told it"),
    "a larger learning rate": ([("RATE, MOMENTUM)", "RATE * ranks, MOMENTUM)")], "the learning rate is 2 times"),
    "an epoch for each rank": ([("range(EPOCHS)", "range(EPOCHS // ranks)")],
        "22 steps on rank 0, and one rank makes 44"),
    "every rank saves": ([(SAVE, SAVE[4:])], "ranks 0 and 1 all save"),
    "saved each epoch": ([("        if rank == 0:\n", "        if rank == 0:\n    " + SAVE)], "saves 3 times"),
    "the wrapper is saved": ([("model.state_dict()", "ddp.state_dict()")], 'begins with "module."'),
    "every rank prints": ([("        if rank == 0:\n            print", "        if True:\n            print")],
                          "ranks print 3 and 2 lines"),
    "its own share is tested": ([(EVALUATE, "images, labels = test[rank::ranks]")], "all 360 together have"),
    "rank 0 alone reduces": ([("        dist.all_reduce(mean)\n        if rank == 0:\n",
                               "        if rank == 0:\n            dist.all_reduce(mean)\n")],
                                   "the ranks call different collectives"),
    "no default group": ([(INIT, "    rank, ranks = 0, 2\n")], "Default process group has not been initialized"),
}

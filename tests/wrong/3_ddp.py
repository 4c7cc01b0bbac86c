"""Wrong solutions of exercise 3: {name: (changes to the solution, what the hint says)}."""

WRAP = "ddp = DistributedDataParallel(model)"
SAVE = '        torch.save(model.state_dict(), "digits.pt")\n'
EVALUATE = "images, labels = test.tensors"
WRONG = {
    "no sampler": (
        [("sampler=sampler", "shuffle=True")],
        "each rank's loader goes through all images"),
    "the batch is not divided": ([("BATCH // world_size", "BATCH")], "64 + 64 = 128"),
    "no wrapper": ([(WRAP, "ddp = model")], "DistributedDataParallel(model) averages them"),
    "the wrapper is by-passed": ([("ddp(images)", "model(images)")],
        "forward pass through the wrapper"),
    "no set_epoch": ([("        sampler.set_epoch(epoch)\n", "")], "call sampler.set_epoch(epoch)"),
    "a larger learning rate": ([("LR, MOMENTUM)", "LR * world_size, MOMENTUM)")],
        "keep epochs, optimizer, learning rate and momentum unchanged"),
    "every rank saves": ([(SAVE, SAVE[4:])], "2 files, from ranks [0, 1]"),
    "the wrapper is saved": ([("model.state_dict()", "ddp.state_dict()")],
        'every name begins with "module."'),
    "every rank prints": (
        [("        if rank == 0:\n            print", "        if True:\n            print")],
        "ranks print 3 and 2 lines"),
    "its own share is tested": (
        [(EVALUATE, "images, labels = test[rank::world_size]")],
        "the accuracy over all 360 images is"),
}

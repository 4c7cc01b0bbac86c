"""Typical wrong answers: {(exercise, name): (changes to the solution, words of the hint)}."""

MEAN_OF_EACH = "            parameter.grad /= dist.get_world_size()\n"
SEND, WAIT = "    request = dist.isend(chunk, right)\n", "    request.wait()\n"
ADD = "        sum_chunk += buffer\n"
DDP_SAVE = '        torch.save(model.state_dict(), "digits.pt")\n'
NO_SYNC = "nullcontext() if number == last else ddp.no_sync()"
WEIGHT = " * len(images) / rank_images"
SCATTER = "dist.reduce_scatter(shard, list(gradients.chunk(dist.get_world_size())))\n"
WARM_UP = "min(stages - stage - 1, micro_batches)"
LAST = "range(micro_batches - warm_up, micro_batches)"
MEAN = (
    "        dist.all_reduce(loss)  # all ranks must compare the same value\n"
    "        loss /= world_size\n")

WRONG = {
    (1, "nothing is sent at the start"): (
        [("dist.broadcast(parameter.data, 0)", "pass")], "draws its own weights"),
    (1, "two ranks assumed"): (
        [(MEAN_OF_EACH, "            parameter.grad /= 2\n")], "divide once by the number"),
    (1, "the hook waits"): ([(", async_op=True)\n", ")\n"), ("            work.wait()\n", "")],
                            "waits 8 times during backward"),
    (1, "divides before the wait"): (
        [("        self.started.append((parameter, work))\n",
          "        parameter.grad /= dist.get_world_size()\n"
          "        self.started.append((parameter, work))\n"),
         ("            work.wait()\n            parameter.grad /= dist.get_world_size()\n",
          "            work.wait()\n")], "changed between its all_reduce and"),
    (1, "not reset"): (
        [("        self.missing = [len(bucket) for bucket in self.buckets]\n", "")],
        "have to reset for the next one?"),
    (1, "from the first parameter"): (
        [("reversed(list(model.parameters()))", "model.parameters()")],
        "it sends [232, 440, 280] bytes"),
    (2, "no ring"): (
        [("right = (rank + 1) % world_size", "right = rank + 1")], "rank 4 does not exist"),
    (2, "all send first"): (
        [(SEND, "    dist.send(chunk, right)\n"), (WAIT, "")],
        "send returns only when the other rank"),
    (2, "a step too few"): (
        [("range(world_size - 1)", "range(world_size - 2)")], "expected 3 messages"),
    (2, "added to a copy"): (
        [(ADD, "        sum_chunk = sum_chunk + buffer\n")],
        "= instead of += or copy_ makes a new tensor"),
    (3, "no sampler"): (
        [("sampler=sampler", "shuffle=True")], "each rank's loader goes through all images"),
    (3, "the batch is not divided"): ([("BATCH // world_size", "BATCH")], "64 + 64 = 128"),
    (3, "no set_epoch"): (
        [("        sampler.set_epoch(epoch)\n", "")], "call sampler.set_epoch(epoch)"),
    (3, "every rank saves"): ([(DDP_SAVE, DDP_SAVE[4:])], "2 files, from ranks [0, 1]"),
    (3, "its own share is tested"): (
        [("images, labels = test.tensors", "images, labels = test[rank::world_size]")],
        "the accuracy over all 360 images is"),
    (4, "no momentum"): (
        [('        optimizer.load_state_dict(saved["optimizer"])\n', "")],
        "ranks [0, 1, 2] have other ones: every rank has to load the optimizer's state_dict"),
    (4, "each rank decides"): (
        [("            dist.all_reduce(is_last)  # has any rank got the signal?\n", "")],
        "rank 1 has finished, rank 2 is at line"),
    (4, "a half-written file"): (
        [("{CHECKPOINT}.tmp", "{CHECKPOINT}"), ("{CHECKPOINT}.tmp", "{CHECKPOINT}")],
        "Write another file, then rename it"),
    (5, "a step after each"): (
        [("    optimizer.step()\n", "        optimizer.step()\n")],
        "add up the gradients of all micro-batches, then make one step"),
    (5, "no_sync around all"): (
        [(NO_SYNC, "ddp.no_sync()")], "last micro-batch outside no_sync()"),
    (5, "no division"): ([(WEIGHT, "")], "so divide by their number"),
    (5, "no no_sync"): ([(NO_SYNC, "nullcontext()")], "sent 3 times: under ddp.no_sync()"),
    (6, "rounded down"): (
        [("-(-total // world_size)  # rounded up", "total // world_size")],
        "rounded up, so that no parameter is left out"),
    (6, "a sum"): (
        [("return shard / dist.get_world_size()", "return shard")],
        "a plain sum would be 3 times"),
    (6, "all-reduced"): (
        [(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients[self.begin:self.end]\n")],
        "it calls all_reduce; one reduce_scatter is enough"),
    (7, "the last backwards forgotten"): (
        [(LAST, "range(0)")], "('F', 7), ('B', 4)], but must run F and B"),
    (7, "GPipe"): (
        [(WARM_UP, "micro_batches")],
        "store up to [8, 8, 8, 8] micro-batches' activations, but [4, 3, 2, 1] are enough"),
    (8, "a barrier before it"): ([(MEAN, "        dist.barrier()\n")], "waiting for each other"),
    (8, "the collective is removed"): (
        [(MEAN, ""), ("    dist.all_gather(tensors, correct)\n", ""),
         ("torch.cat(tensors)", "correct")],
        "the mean over all of them is"),
    (9, "the rank that waits longest"): (
        [("node of rank 2", "node of rank 3")], "a rank that waits long is healthy"),
    (9, "the all-reduce blamed"): (
        [('"no overlap"', '"slow link"')], "compare when the all-reduce begins"),
    (9, "a name of its own"): (
        [('"bf16"', '"BF16"')], "'BF16' is not a name in README.md's tables"),
    (9, "a"): ([('"a": "sum"', '"a": "twice"')], "1 on one rank and 3 on the other"),
    (10, "forward only"): (
        [("6 * (blocks / stages", "2 * (blocks / stages")], "your value is 0.45"),
    (10, "FSDP, though the state fits"): (
        [("(128, 1, 1, 1, 1, False, ddp)", "(128, 128, 1, 1, 1, False, ddp)")],
        "another layout is over a fifth faster. This one is limited by link"),
    (10, "DDP, though it does not"): (
        [("(32, 32, 1, 1, 4, False, fsdp)", "(32, 1, 1, 1, 4, False, fsdp)")],
        "memory: 244 GiB of state"),
    (10, "more copies than sequences"): (
        [("(8, 8, 8, 8, 1, False, pipeline)", "(512, 512, 1, 1, 1, False, pipeline)")],
        "it has to divide the 128 sequences"),
    (10, "without the pipeline's idle time"): (
        [("(128 / 8 + 8 - 1)", "(128 / 8)")], "0.707 times the computed one"),
    (5, "one backward of the sum"): (
        [("            loss.backward()\n", "            total = loss + (number and total)\n"),
         ("    optimizer.step()\n", "    total.backward()\n    optimizer.step()\n")],
        "for each loss, not for their sum"),
    (11, "waits at once"): (
        [("        if not prefetch:\n            block", "        block"),
         ("        if prefetch and number + 1 < len(blocks):\n            blocks[number + 1].f",
          "        if False:\n            blocks[number + 1].f"),
         ("    if prefetch:\n        blocks[0]", "    if False:\n        blocks[0]")],
        "after the next block of backward"),
    (11, "a view"): ([("[dist.get_rank()].clone()", "[dist.get_rank()]")], "until you clone() it"),
    (11, "two ranks assumed"): (
        [("        self.shard.grad /= dist.get_world_size()\n", "        self.shard.grad /= 2\n")],
        "divided once by their number"),
    (11, "forward does not drop"): (
        [("            tensor = block.module(tensor)\n        block.drop()\n",
          "            tensor = block.module(tensor)\n")],
        "drop() a block as soon as it has computed"),
    (11, "no prefetch in backward"): (
        [("        if prefetch and number > 0:\n", "        if False:\n")],
        "all-gathers have been issued; expected [2, 3, 3, 5, 6, 6]"),
}

"""Wrong solutions of exercise 8: {name: (changes to the solution, what the hint says)}."""

MEAN = "        dist.all_reduce(loss)  # so that all ranks decide by one value\n        loss /= dist.get_world_size()\n"
IF = "        if loss < self.loss:\n"
GATHER = "    dist.all_gather(tensors, right)\n"
INIT = 'dist.init_process_group("gloo"'
SAVE = "            self.save(epoch, logits.argmax(1) == self.labels)\n"
MEASURE = "        share_of_all(logits.argmax(1) == self.labels)\n"
SECOND = ', timeout=__import__("datetime").timedelta(seconds=1)'
ACCURACY = "        accuracy = share_of_all(right)\n"
WRONG = {
    "as it was": ([(MEAN, "")], "ranks that wait for each other: rank 0 at line "),
    "a longer time-out": ([(MEAN, ""), (INIT, INIT + ', timeout=__import__("datetime").timedelta(hours=2)')],
                          "ranks that wait for each other"),
    "a barrier before it": ([(MEAN, "        dist.barrier()\n")], "ranks that wait for each other"),
    "a barrier for the others": ([(MEAN, ""), (SAVE, SAVE + "        else:\n            dist.barrier()\n")], "rank"),
    "the collective is removed": ([(MEAN, ""), (GATHER, ""), ("torch.cat(tensors)", "right")], "over its own half"),
    "the mean, without the collective": ([(GATHER, ""), ("torch.cat(tensors)", "right")], "was there for a reason"),
    "all ranks measure, each decides": ([(MEAN, ""), (IF, MEASURE + IF), (
        ACCURACY, "        accuracy = 0.0\n")], "over its own half"),
    "rank 0 decides for all": ([(MEAN, "        dist.broadcast(loss, 0)\n")], "nobody has asked"),
    "nobody decides": ([(MEAN, ""), (IF, "        if True:\n")], "over its own half"),
    "nobody decides, by the mean": ([(IF, "        if epoch < 4:\n")], "what is saved when"),
    "a sum": ([("        loss /= dist.get_world_size()\n", "")], "2 times as much"),
    "the worst of them": ([("all_reduce(loss)", "all_reduce(loss, dist.ReduceOp.MAX)"),
                           ("        loss /= dist.get_world_size()\n", "")], "over its own half"),
    "nobody looks": ([("        best.look(epoch)\n", "")], "it does not lie there"),
    "a shorter training": ([(MEAN, ""), ("range(EPOCHS)", "range(3)")], "66 and 66 steps"),
    "the exception is swallowed": ([(MEAN, ""), (INIT, INIT + SECOND), (
        ACCURACY, "        try:\n            accuracy = share_of_all(right)\n        except RuntimeError:\n"
                  "            accuracy = 0.0\n")], "rank"),
}

"""Wrong solutions of exercise 8: {name: (changes to the solution, what the hint says)}."""

MEAN = (
    "        dist.all_reduce(loss)  # all ranks must compare the same value\n"
    "        loss /= world_size\n")
GATHER = "    dist.all_gather(tensors, correct)\n"
WRONG = {
    "a barrier before it": ([(MEAN, "        dist.barrier()\n")], "ranks waiting for each other"),
    "the collective is removed": (
        [(MEAN, ""), (GATHER, ""), ("torch.cat(tensors)", "correct")],
        "over each rank's own half"),
    "a sum": ([("        loss /= world_size\n", "")], "the mean over all of them is"),
}

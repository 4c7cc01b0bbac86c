"""Wrong solutions of exercise 8: {name: (changes to the solution, what the hint says)}."""

MEAN = (
    "        dist.all_reduce(loss)  # so that all ranks decide by one value\n"
    "        loss /= ranks\n")
GATHER = "    dist.all_gather(tensors, right)\n"
WRONG = {
    "a barrier before it": ([(MEAN, "        dist.barrier()\n")], "ranks that wait for each other"),
    "the collective is removed": (
        [(MEAN, ""), (GATHER, ""), ("torch.cat(tensors)", "right")],
        "over its own half"),
    "a sum": ([("        loss /= ranks\n", "")], ", a mean; rank by rank"),
}

"""Wrong solutions of exercise 1: {name: (changes to the solution, what the hint says)}."""

AVERAGE = "            parameter.grad /= dist.get_world_size()\n"
REDUCE = "dist.all_reduce(parameter.grad)\n"
WRONG = {
    "nothing is sent at the start": (
        [("dist.broadcast(parameter.data, 0)", "pass")], "draws its own weights"),
    "a sum": ([(AVERAGE, "")], "3 times the mean"),
    "a broadcast": ([(REDUCE, "dist.broadcast(parameter.grad, 0)\n"), (AVERAGE, "")],
                    "broadcast, for example, keeps one rank's"),
    "a copy": ([(REDUCE, "dist.all_reduce(parameter.grad.clone())\n")], "changes only the copy"),
    "no check of None": ([("if parameter.grad is not None", "if True")], "line 14, on rank"),
}

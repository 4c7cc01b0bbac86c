"""Wrong solutions of exercise 1: {name: (changes to the solution, what the hint says)}."""

AVERAGE = "            parameter.grad /= dist.get_world_size()\n"
REDUCE = "dist.all_reduce(parameter.grad)\n"
WRONG = {
    "nothing is sent at the start": ([("dist.broadcast(parameter.data, 0)", "pass")], "what they were"),
    "a mean of weights": ([("dist.broadcast(parameter.data, 0)", "dist.all_reduce(parameter.data)\n"
                            "        parameter.data /= dist.get_world_size()")], "no longer what rank 0 has drawn"),
    "a sum": ([(AVERAGE, "")], "their sum, 3 times the mean"),
    "divided twice": ([(REDUCE, "parameter.grad /= dist.get_world_size()\n            " + REDUCE)], "divided twice"),
    "a broadcast": ([(REDUCE, "dist.broadcast(parameter.grad, 0)\n"), (AVERAGE, "")], "one rank's gradients"),
    "a copy is averaged": ([(REDUCE, "dist.all_reduce(parameter.grad.clone())\n"), (AVERAGE, "")],
                           "nothing was sent, or it went"),
    "reduced to one rank": ([(REDUCE, "dist.reduce(parameter.grad, 0)\n")], "only rank 0 has it"),
    "half": ([("/= dist.get_world_size()", "/= 2")], "1.5 times their mean"),
    "it ends at a parameter that is not used": (
        [("        if parameter.grad is not None:\n", "        if parameter.grad is None:\n            return\n"
          "        if True:\n")], "is every parameter's reached"),
    "weights are averaged": ([(REDUCE, "dist.all_reduce(parameter.data)\n"), (AVERAGE, "")], "it went elsewhere"),
    "no check of None": ([("if parameter.grad is not None", "if True")], "line 14, on rank"),
    "an extra broadcast": ([(AVERAGE, AVERAGE + "            dist.broadcast(parameter.grad, 0)\n")],
                           "all_reduce alone"),
    "parameters, too": ([(AVERAGE, AVERAGE + "            parameter.data *= 0.5\n")], "not parameter.data"),
    "weights alone": ([("if parameter.grad is not None", "if parameter.grad is not None and parameter.dim() > 1")],
                      "is every parameter's reached"),
}

"""Wrong solutions of exercise 5: {name: (changes to the solution, what the hint says)}."""

ZERO, STEP = "    optimizer.zero_grad()\n", "    optimizer.step()\n"
WEIGHT = " * len(images) / total"
CONTEXT = "nullcontext() if number == last else ddp.no_sync()"
BACKWARD = "            loss.backward()\n"
LOSS = "            loss = cross_entropy(ddp(images), labels) * len(images) / total\n"
INSIDE = f"        with {CONTEXT}:\n{LOSS}{BACKWARD}"
WRONG = {
    "the bare model": ([("ddp(images)", "ddp.module(images)")], "called without its wrapper"),
    "a step after each": ([(STEP, "        optimizer.step()\n")], "3 steps: gradients are added up"),
    "no_sync around all": ([(CONTEXT, "ddp.no_sync()")], "the last one, too"),
    "no division": ([(WEIGHT, "")], "3 times the right one: each loss is a mean"),
    "divided by the ranks": ([(WEIGHT, " / 2")], "1.5 times the right one: divided by the number of ranks?"),
    "zero_grad in the loop": ([(ZERO, ""), ("        with", "        optimizer.zero_grad()\n        with")],
                              "the last micro-batch's alone"),
    "no zero_grad": ([(ZERO, "")], "begin each step with zero_grad"),
    "no no_sync": ([(CONTEXT, "nullcontext()")], "sent 3 times: under ddp.no_sync()"),
    "forward outside of no_sync": ([(INSIDE, f"{LOSS[4:]}        with {CONTEXT}:\n{BACKWARD}")],
                                   "sent 3 times, though backward is within no_sync: 3 forwards are outside"),
    "each micro-batch counts the same": ([(WEIGHT, " / len(micro_batches)")], "counts twice as much as another"),
}

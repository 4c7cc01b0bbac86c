"""Wrong solutions of exercise 5: {name: (changes to the solution, what the hint says)}."""

ZERO, STEP = "    optimizer.zero_grad()\n", "    optimizer.step()\n"
WEIGHT = " * len(images) / total"
CONTEXT = "nullcontext() if number == last else ddp.no_sync()"
BACKWARD = "            loss.backward()\n"
LOSS = "            loss = cross_entropy(ddp(images), labels) * len(images) / total\n"
INSIDE = f"        with {CONTEXT}:\n{LOSS}{BACKWARD}"
WRONG = {
    "the bare model": ([("ddp(images)", "ddp.module(images)")], "called without its wrapper"),
    "all at once": ([("for number", "micro_batches = [tuple(map(__import__('torch').cat, zip(*micro_batches)))]\n"
                                    "    last = 0\n    for number")], "ddp was called with 12 images"),
    "one backward at the end": ([("    for number", "    losses = 0\n    for number"),
                                 (BACKWARD, "            losses = losses + loss\n"),
                                 (STEP, "    losses.backward()\n" + STEP)],
                                "the activations of all micro-batches"),
    "a step after each": ([(STEP, "        optimizer.step()\n")], "3 steps: gradients are added up"),
    "no step": ([(STEP, "")], "0 steps"),
    "no_sync around all": ([(CONTEXT, "ddp.no_sync()")], "the last one, too"),
    "the last forward within": ([(INSIDE, f"        with ddp.no_sync():\n{LOSS}        with {CONTEXT}:\n{BACKWARD}")],
                                "its forward within; DDP decides in the forward"),
    "the first one sends": ([("number == last", "number == 0")], "micro-batch 1 was sent, and later ones"),
    "no division": ([(WEIGHT, "")], "3 times the right one: each loss is a mean"),
    "divided by the ranks": ([(WEIGHT, " / 2")], "1.5 times the right one: divided by the number of ranks?"),
    "divided by both": ([(WEIGHT, WEIGHT + " / 2")], "0.5 times the right one: DDP has divided"),
    "divided twice": ([(WEIGHT, WEIGHT + " / 3")], "divided by the number of micro-batches twice"),
    "another factor": ([(WEIGHT, " / total")], "0.25 times the right one"),
    "zero_grad in the loop": ([(ZERO, ""), ("        with", "        optimizer.zero_grad()\n        with")],
                              "the last micro-batch's alone"),
    "no zero_grad": ([(ZERO, "")], "begin each step with zero_grad"),
    "no no_sync": ([(CONTEXT, "nullcontext()")], "sent 3 times: under ddp.no_sync()"),
    "forward outside of no_sync": ([(INSIDE, f"{LOSS[4:]}        with {CONTEXT}:\n{BACKWARD}")],
                                   "sent 3 times, though backward is within no_sync: 3 forwards are outside"),
    "averaged again": ([(STEP, "    import torch.distributed as dist\n    for parameter in ddp.parameters():\n"
                               "        dist.all_reduce(parameter.grad)\n        parameter.grad /= 2\n" + STEP)],
                       "DDP averages the gradients for you"),
    "decayed afterwards": ([(STEP, STEP + "    for parameter in ddp.parameters():\n        parameter.data *= 0.9\n")],
                           "something else has changed the parameters"),
    "each micro-batch counts the same": ([(WEIGHT, " / len(micro_batches)")], "counts twice as much as another"),
}

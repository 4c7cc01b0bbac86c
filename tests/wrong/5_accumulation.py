"""Wrong solutions of exercise 5: {name: (changes to the solution, what the hint says)}."""

ZERO, STEP = "    optimizer.zero_grad()\n", "    optimizer.step()\n"
WEIGHT = " * len(images) / rank_images"
CONTEXT = "nullcontext() if number == last else ddp.no_sync()"
WRONG = {
    "the bare model": (
        [("ddp(images)", "ddp.module(images)")],
        "so does calling model instead of ddp"),
    "a step after each": ([(STEP, "        optimizer.step()\n")],
        "add up the gradients of all micro-batches, then make one step"),
    "no_sync around all": (
        [(CONTEXT, "ddp.no_sync()")],
        "last micro-batch outside no_sync()"),
    "no division": ([(WEIGHT, "")], "3 times the correct one: each loss is a mean"),
    "zero_grad in the loop": (
        [(ZERO, ""), ("        with", "        optimizer.zero_grad()\n        with")],
        "zero_grad between micro-batches"),
    "no zero_grad": ([(ZERO, "")], "begin each step with zero_grad"),
    "no no_sync": ([(CONTEXT, "nullcontext()")], "sent 3 times: under ddp.no_sync()"),
    "each micro-batch counts the same": (
        [(WEIGHT, " / len(micro_batches)")],
        "each image of the last one counts twice"),
}

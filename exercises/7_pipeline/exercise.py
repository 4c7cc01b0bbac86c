"""Order the passes of a pipeline.

A network is cut into stages, one after the other, each on a rank of its own, and a batch into
micro-batches. The schedule 1F1B, one forward, one backward, says in which order a stage works.
"""


def schedule(stage, stages, micro_batches):
    """Return the order in which a stage works: a list of ("F", i) and ("B", i).

    ("F", i) is the forward pass of micro-batch i, of 0 .. micro_batches-1, ("B", i) its backward.
    A forward needs the one of the stage before, a backward the one of the stage after; the last
    stage's backward needs its own forward alone. Each pass takes one time slot.

    The forwards come in the order of the micro-batches, and so do the backwards. First the stage
    warms up, with a forward for each stage after it. Then forwards and backwards alternate, a
    forward first, so that it never holds the activations of more than stages - stage micro-batches.
    In the end only backwards are left.
    """
    # Your line: warm_up = number of forwards before forwards and backwards alternate.
    raise NotImplementedError
    order = [("F", number) for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        raise NotImplementedError  # your lines: a forward, and the oldest backward
    raise NotImplementedError  # your lines: the backwards that are left
    return order

"""Order the passes of a pipeline.

A network is split into consecutive stages, one per rank, and a batch into micro-batches. In the
schedule 1F1B (one forward, one backward) forward and backward passes alternate.
"""


def schedule(stage, stages, micro_batches):
    """Return a stage's passes in order: a list of ("F", i) and ("B", i).

    ("F", i) is the forward pass of micro-batch i, 0 .. micro_batches-1, and ("B", i) its backward.
    A forward needs the previous stage's forward, a backward the next stage's backward; the last
    stage's backward needs only its own forward. Each pass takes one time slot.

    Forwards run in the order of the micro-batches, and so do backwards. First the stage warms up
    with one forward for each stage after it. Then forwards and backwards alternate, forward first.
    So the stage never stores the activations of more than `stages - stage` micro-batches. It ends
    with the remaining backwards.
    """
    # Your line: warm_up = number of forwards before forwards and backwards alternate.
    raise NotImplementedError
    order = [("F", number) for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        raise NotImplementedError  # your lines: a forward, and the oldest backward
    raise NotImplementedError  # your lines: the remaining backwards
    return order

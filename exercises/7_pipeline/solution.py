"""Order the passes of a pipeline: a solution."""


def schedule(stage, stages, micro_batches):
    warm_up = min(stages - stage - 1, micro_batches)
    order = [("F", number) for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        order.append(("F", number))
        order.append(("B", number - warm_up))
    for number in range(micro_batches - warm_up, micro_batches):
        order.append(("B", number))
    return order

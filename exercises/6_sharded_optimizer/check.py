"""What the grade of exercise 6 looks at."""

import torch
from runner import NotRun, in_stages
from torch import nn

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL = 23  # parameters of the model, which 3 does not divide
SHARD = 8


def watch(file):
    """What the parts of the optimizer do, until one does not run."""
    return in_stages(file, {"__init__": made, "average": averaged, "gather": gathered, "step": stepped}, RANKS)


def optimized(exercise):
    """A model, the same on all ranks, and the learner's optimizer of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, exercise.ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def made(rank, exercise, calls):
    model, optimizer = optimized(exercise)
    return {"begin": int(optimizer.begin), "end": int(optimizer.end), "held": held(optimizer, model)}


def averaged(rank, exercise, calls):
    _, optimizer = optimized(exercise)
    row = numbers(RANKS * SHARD, rank)
    calls.clear()
    return {"own": row.clone(), "got": optimizer.average(row), "calls": list(calls)}


def gathered(rank, exercise, calls):
    _, optimizer = optimized(exercise)
    own = torch.arange(SHARD, dtype=torch.float64) + 100 * rank
    calls.clear()
    return {"got": optimizer.gather(own), "calls": list(calls)}


def stepped(rank, exercise, calls):
    """Some steps, each from gradients of its own, beside those of an optimizer with the whole state."""
    model, optimizer = optimized(exercise)
    expected, velocity = flat(model.parameters()), torch.zeros(TOTAL, dtype=torch.float64)
    steps = []
    for step in range(STEPS):
        gradients = [numbers(TOTAL, RANKS * step + other) for other in range(RANKS)]
        before = flat(model.parameters())
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), gradients[rank].split(sizes)):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        velocity = MOMENTUM * velocity + sum(gradients) / RANKS
        expected = expected - LR * velocity
        steps.append({"before": before, "after": flat(model.parameters()), "expected": expected,
                      "gradient": sum(gradients) / RANKS, "held": held(optimizer, model)})
    return steps


def numbers(length, seed):
    return torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def held(optimizer, model):
    """What the optimizer holds beside parameters and gradients: {attribute: bytes}, each memory once."""
    seen = {one.untyped_storage().data_ptr() for parameter in model.parameters() for one in (parameter, parameter.grad)
            if one is not None}
    found = {}
    for name, value in vars(optimizer).items():
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] = found.get(name, 0) + storage.nbytes()
    return found


def tensors_in(value):
    """All tensors in a value, however they are packed."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__"):
        value = list(vars(value).values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple | set) else []


def same(one, other):
    alike = torch.is_tensor(one) and (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    looking_at = {"__init__": points_of_shards, "average": points_of_average, "gather": points_of_gather,
                  "step": points_of_steps}
    for name, ranks in facts.items():
        if isinstance(ranks, NotRun):
            yield f"{name}: it runs to its end", False, str(ranks)
        yield from looking_at[name](ranks)


def points_of_shards(ranks):
    limits = [(fact["begin"], fact["end"]) for fact in ranks]
    lengths = {end - begin for begin, end in limits}
    told = ", ".join(f"rank {rank}: {begin} to {end}" for rank, (begin, end) in enumerate(limits))
    hint = f"{TOTAL} parameters, {RANKS} ranks, {told}"
    if len(set(limits)) == 1:
        hint = f"{hint}: all ranks have the same shard, nobody steps the others"
    elif lengths == {TOTAL // RANKS}:
        hint = f"{hint}: the last {TOTAL % RANKS} parameters are in no shard; round up, and zeros fill the last one"
    elif len(lengths) > 1:
        hint = f"{hint}: not equally long; round up, and zeros fill the last one"
    yield f"the shards of {RANKS} ranks are all {TOTAL} parameters", (
        limits == [(rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)]), hint
    yield from points_of_state(ranks)


def points_of_state(ranks, when="at the start"):
    held_by = max((fact["held"] for fact in ranks), key=lambda held: sum(held.values()))
    size, allowed = sum(held_by.values()), 8 * SHARD
    name = max(held_by, key=held_by.get, default="")
    hint = f"self.{name} holds {held_by.get(name)} bytes, a shard of {SHARD} numbers has {allowed}"
    if held_by.get(name, 0) >= 8 * TOTAL:
        hint = f"{hint}: that is the state of all parameters (a view keeps all that it was cut from)"
    elif len(held_by) > 1:
        hint = f"{size} bytes in {', '.join(f'self.{one}' for one in held_by)}: momentum has one number a parameter"
    yield f"each rank's state is one shard, {allowed} bytes, {when}", size <= allowed, hint


def points_of_average(ranks):
    mean = sum(fact["own"] for fact in ranks) / RANKS
    shards, got = mean.split(SHARD), ranks[0]["got"]
    hint = "neither the mean nor the sum of rank 0's shard of all ranks' gradients"
    if got is None:
        hint = "average returns nothing"
    elif not torch.is_tensor(got) or got.dtype != mean.dtype:
        hint = f"average returns {getattr(got, 'dtype', type(got).__name__)}, the gradients are of {mean.dtype}"
    elif got.shape != shards[0].shape:
        hint = f"average returns {got.numel()} numbers, a shard has {SHARD}"
    elif same(got, shards[0] * RANKS):
        hint = f"that is the sum, {RANKS} times the mean: each rank's loss is a mean over its own images"
    elif same(got, shards[0] / RANKS):
        hint = f"{RANKS} times too small: divided twice"
    elif same(got, ranks[0]["own"][:SHARD]) or same(got, ranks[0]["own"][:SHARD] / RANKS):
        hint = "rank 0 has its own gradients still: the other ranks' are not in it"
    elif same(got, shards[0]):
        hint = "right on rank 0, not on the others: does each take the shard of its own rank?"
    yield "average: each rank gets its shard of the mean gradient", all(
        same(fact["got"], shard) for fact, shard in zip(ranks, shards)), hint
    sent, allowed = volume(ranks[0]["calls"]), (RANKS - 1) * SHARD
    names = ", ".join(sorted({name for name, *_ in ranks[0]["calls"]}))
    yield "average: it sends no more than a reduce-scatter", sent <= allowed, (
        f"{names}: {sent:.4g} numbers from a rank, where {allowed} are enough: each needs the sums of its shard alone")


def points_of_gather(ranks):
    row = torch.cat([torch.arange(SHARD, dtype=torch.float64) + 100 * rank for rank in range(RANKS)])
    got = ranks[0]["got"]
    hint = "not the shards of ranks 0, 1 and 2, one after the other"
    if got is None:
        hint = "gather returns nothing"
    elif not torch.is_tensor(got) or got.dtype != row.dtype:
        hint = f"gather returns {getattr(got, 'dtype', type(got).__name__)}, the shards are of {row.dtype}"
    elif got.shape != row.shape:
        hint = f"gather returns {got.numel()} numbers, the row has {RANKS * SHARD}"
    elif same(got, torch.cat([row[:SHARD]] * RANKS)):
        hint = f"rank 0's shard stands there {RANKS} times: the others' have not come"
    elif same(got, sum(row.split(SHARD)).repeat(RANKS)):
        hint = "the shards are added up: they belong one after the other"
    yield "gather: every rank gets all shards, in order", all(same(fact["got"], row) for fact in ranks), hint
    sent, allowed = volume(ranks[0]["calls"]), (RANKS - 1) * SHARD
    names = ", ".join(sorted({name for name, *_ in ranks[0]["calls"]}))
    yield "gather: it sends no more than an all-gather", sent <= allowed, (
        f"{names}: {sent:.4g} numbers from a rank, where {allowed} are enough: its shard to each of the others")


def volume(calls):
    """Numbers that a rank sends on the average, were each operation a ring; gloo does it in its own ways."""
    factors = {"all_reduce": 2 * (RANKS - 1) / RANKS, "reduce_scatter": RANKS - 1, "all_gather": RANKS - 1,
               "all_gather_into_tensor": RANKS - 1, "all_gather_single": RANKS - 1, "send": 1, "isend": 1, "recv": 0,
               "irecv": 0}
    return sum(factors.get(name, (RANKS - 1) / RANKS) * elements for name, elements, *_ in calls)


def points_of_steps(ranks):
    steps = list(zip(*ranks))
    first = steps[0][0]
    moved, right = first["after"] - first["before"], first["expected"] - first["before"]
    factor = (moved @ right / (right @ right)).item()
    hint = "the parameters are not those of PyTorch's SGD"
    if not moved.any():
        hint = "the parameters are what they were: update changes own in place (own -= ...)"
    elif same(first["after"], first["gradient"]):
        hint = "the parameters are the gradients now: gather the stepped parameters"
    elif same(moved, factor * right):
        hint = f"the step is {factor:.4g} times as long as it should be"
        if factor < 0:
            hint = f"{hint}: against the gradient, not along it"
    yield "the first step is that of the optimizer with the whole state", all(
        same(fact["after"], fact["expected"]) for fact in steps[0]), hint
    second = steps[1][0]
    hint = "right in the first step, wrong in the second"
    if same(second["after"], second["before"] - LR * second["gradient"]):
        hint = "the second step knows nothing of the first: velocity has to be kept in self"
    yield "and so are the next ones", all(
        same(fact["after"], fact["expected"]) for step in steps[1:] for fact in step), hint
    yield from points_of_state(steps[-1], "at the end")

"""What the grade of exercise 5 looks at."""

import copy

import torch
import torch._dynamo  # optimizers import it at their first step: here it is imported once for all ranks
from runner import counted, learner, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 2
EQUAL, UNEQUAL = (4, 4, 4), (4, 4, 2)  # images of each micro-batch of a rank
MICRO_BATCHES = len(EQUAL)


def watch(file):
    """Per rank and sizes of micro-batches: what each call of train_step does."""
    def on_rank(rank):
        calls = counted()
        exercise = learner(file)
        return {sizes: list(steps(exercise, calls, rank, sizes)) for sizes in (EQUAL, UNEQUAL)}
    return on_ranks(file, on_rank, RANKS)


def steps(exercise, calls, rank, sizes):
    """The facts of each call of train_step, beside those of a single model that takes the global batch at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    single = copy.deepcopy(model)
    events = []
    ddp = observed(model, events, calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: events.append(("step", flat_gradient(model))))
    single_optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        batches = [micro_batches(100 * step + other, sizes) for other in range(RANKS)]
        of_all = [batch for one in batches for batch in one]
        now = copy.deepcopy(model)
        events.clear()
        calls.clear()
        exercise.train_step(ddp, optimizer, batches[rank])
        fact = {"events": list(events), "calls": list(calls), "gradient": flat_gradient(model)}
        fact["own"] = gradient(now, batches[rank])
        fact["expected"] = gradient(now, of_all)
        fact["last"] = gradient(now, [batch[-1] for batch in batches])
        fact["equal weights"] = sum(gradient(now, list(parts)) for parts in zip(*batches)) / MICRO_BATCHES
        fact["parameters"] = flat(model.parameters())
        gradient(single, of_all)
        single_optimizer.step()
        fact["single"] = flat(single.parameters())
        yield fact


def observed(model, events, calls):
    """The model in DDP, which notes what happens: forward, backward, bytes sent."""
    def forward_begins(_, images):
        events.append(("forward", len(images[0]), ddp.require_backward_grad_sync))

    def backward_begins(_):
        events.append(("backward", ddp.require_backward_grad_sync))

    def average(state, bucket):
        events.append(("sent", bucket.buffer().nbytes))
        averaged = allreduce_hook(state, bucket)
        calls.pop()  # its own
        return averaged
    model[-1].bias.register_hook(backward_begins)
    model.register_forward_pre_hook(lambda _, images: events.append(("network", len(images[0]))))
    ddp = DistributedDataParallel(model)
    ddp.register_forward_pre_hook(forward_begins)
    ddp.register_comm_hook(None, average)
    return ddp


def micro_batches(seed, sizes):
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, dtype=torch.float64, generator=random), torch.randint(4, (size,), generator=random))
            for size in sizes]


def gradient(model, batches):
    """The gradient of the mean loss over all images of these batches, which stays in the model, too."""
    images, labels = (torch.cat(parts) for parts in zip(*batches))
    model.zero_grad()
    cross_entropy(model(images), labels).backward()
    return flat_gradient(model)


def flat_gradient(model):
    return flat(torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters())


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


def same(one, other):
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def of_kind(fact, kind):
    """What was noted with each event of a kind."""
    return [event[1:] for event in fact["events"] if event[0] == kind]


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    first, second = ([rank[EQUAL][step] for rank in facts] for step in range(STEPS))
    yield from points_of_order(first[0])
    yield from points_of_gradient(first)

    hint = "right in the first step, wrong in the second"
    if same(at_step(second[0]), at_step(first[0]) + second[0]["expected"]):
        hint = "the first step's gradient is in it still: backward() adds to .grad, begin each step with zero_grad"
    yield "and in the next step", same(at_step(second[0]), second[0]["expected"]), hint

    yield from points_of_sending(first[0])
    yield "after two steps the parameters are those of one model with the whole batch", all(
        same(fact["parameters"], fact["single"]) for fact in second), (
        "the gradients were right, but something else has changed the parameters, or the gradients of one of the steps")

    fact = facts[0][UNEQUAL][0]
    hint = "not the gradient of the mean over all images: how much does an image of the last micro-batch count?"
    if same(at_step(fact), fact["equal weights"]):
        hint = (f"with micro-batches of {UNEQUAL[0]}, {UNEQUAL[1]} and {UNEQUAL[2]} images each counts a third: an "
                "image of the last one counts twice as much as another")
    yield "the same with a smaller last micro-batch", all(
        same(at_step(one), one["expected"]) for rank in facts for one in rank[UNEQUAL]), hint


def at_step(fact):
    """The gradient that the optimizer got."""
    return (of_kind(fact, "step") or [(fact["gradient"],)])[0][0]


def points_of_order(fact):
    """Forwards, backwards and steps of a call."""
    forwards, networks = of_kind(fact, "forward"), of_kind(fact, "network")
    sizes = [images for images, *_ in forwards]
    hint = f"ddp was called with {', '.join(f'{size} images' for size in sizes)}" if sizes else "ddp was not called"
    if len(networks) > len(forwards):
        hint = "the model was called without its wrapper, and DDP knows nothing of it: call ddp(images)"
    yield f"each of the {MICRO_BATCHES} micro-batches goes through ddp once", (
        sizes == list(EQUAL) and len(networks) == len(forwards)), hint
    names = [event[0] for event in fact["events"] if event[0] in ("forward", "backward")]
    hint = f"{names.count('backward')} backward passes for {MICRO_BATCHES} micro-batches"
    if names.count("backward") == 1 and names[-1] == "backward":
        hint = "one backward pass at the end: until then the activations of all micro-batches fill the memory"
    yield "each forward is followed by its backward", names == ["forward", "backward"] * MICRO_BATCHES, hint
    taken = len(of_kind(fact, "step"))
    hint = f"{taken} steps: gradients are added up over all micro-batches, and then comes one step"
    if taken == 1:
        hint = "the step comes before the last backward"
    yield "the optimizer makes one step", taken == 1 and fact["events"][-1][0] == "step", hint


def points_of_gradient(ranks):
    fact = ranks[0]
    got, expected = at_step(fact), fact["expected"]
    forwards, backwards = of_kind(fact, "forward"), of_kind(fact, "backward")
    names = [event[0] for event in fact["events"]]
    hint = "each rank has added something of its own after the last communication"
    if "sent" not in names:
        hint = "nothing was sent: all micro-batches were within no_sync, the last one, too"
        if backwards[-1][0] and not forwards[-1][1]:
            hint = ("nothing was sent: the last backward is outside of no_sync, but its forward within; DDP decides "
                    "in the forward")
    elif names.index("sent") < len(names) - 1 - names[::-1].index("backward"):
        number = names[:names.index("sent")].count("forward")
        hint = (f"micro-batch {number} was sent, and later ones stayed on their rank: the last one sends, and with it "
                "all that has been added up")
    yield "all ranks step with the same gradient", all(same(at_step(one), got) for one in ranks), hint

    hint = "neither the mean nor a multiple of it"
    factor = (got @ expected / (expected @ expected)).item()
    if same(got, fact["last"]) or same(got, fact["last"] / MICRO_BATCHES):
        hint = "that is the last micro-batch's alone: those before were lost, by zero_grad after them"
    elif same(got, factor * expected):
        hint = told(factor)
    yield "it is the gradient of the whole global batch", same(got, expected), hint


def told(factor):
    """Where a gradient that is some times as large as it should be comes from."""
    known = {
        MICRO_BATCHES: "each loss is a mean over one micro-batch, and their gradients are added up, not averaged",
        MICRO_BATCHES / RANKS: "divided by the number of ranks? DDP does that; of micro-batches it does not know",
        1 / RANKS: "DDP has divided by the number of ranks already",
        1 / MICRO_BATCHES: "divided by the number of micro-batches twice",
    }
    reason = next((text for value, text in known.items() if abs(factor - value) < 1e-6), None)
    return f"it is {factor:.4g} times the right one" + (f": {reason}" if reason else "")


def points_of_sending(fact):
    gradient_bytes = fact["expected"].nbytes
    times = sum(size for size, in of_kind(fact, "sent")) / gradient_bytes
    outside = sum(sends for _, sends in of_kind(fact, "forward"))
    hint = f"they were sent {times:.3g} times: under ddp.no_sync() a micro-batch adds to .grad and sends nothing"
    if times > 1 and not all(sends for sends, in of_kind(fact, "backward")):
        hint = (f"they were sent {times:.3g} times, though backward is within no_sync: {outside} forwards are outside, "
                "and DDP decides in the forward")
    yield "the gradients are sent once", times == 1, hint
    called = [name for name, *_ in fact["calls"]]
    yield "by DDP alone", not called, f"beside it there is {', '.join(called[:1])}: DDP averages the gradients for you"

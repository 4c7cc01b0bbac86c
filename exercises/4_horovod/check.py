"""What the grade of exercise 4 looks at."""

import torch
from runner import NotRun
from scripts import (
    MOMENTUM,
    build_model,
    points_of_data,
    points_of_training,
    run_script,
    same_tensors,
)

RANKS, RATE, EPOCHS = 2, 0.05, 2


def horovodruns_variables():
    """Return what horovodrun --gloo sets for each rank, and start the server where they meet."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
    slots = get_host_assignments(parse_hosts(f"localhost:{RANKS}"), RANKS)
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
    common = {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    names = "hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"
    return [common | {f"HOROVOD_{name.upper()}": getattr(slot, name) for name in names}
            for slot in slots]


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    try:
        import horovod.torch  # noqa: F401
    except ImportError:
        raise NotRun("Horovod is not installed: .venv/without-horovod says why; "
                     "the others need none") from None
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for parameter in model.parameters():  # as an earlier training would leave them
        optimizer.state[parameter]["momentum_buffer"] = 0.1 * torch.randn(parameter.shape)
    start = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ranks = run_script(file, horovodruns_variables(), start)
    yield from points_of_data(ranks)
    yield "all ranks start with the parameters that rank 0 has loaded", all(
        same_tensors(rank["start"], start["model"]) for rank in ranks), (
        "the others start with weights of their own, or rank 0, too, without those of start.pt: "
        "broadcast rank 0's after it has loaded them")
    yield from points_of_training(
        ranks, RATE, EPOCHS, "equal at first, they drift apart: hvd.DistributedOptimizer averages "
        "gradients, if it steps; and what else does SGD's step depend on, that rank 0 has loaded "
        "and the others have not?",
        "are the gradients averaged, not summed? Are epochs, learning rate and "
        "momentum what they were? hvd.DistributedOptimizer makes a new optimizer out of the one "
        "that it is given, and takes its parameters and rates, not its state", start["optimizer"])

"""Checks for exercise 4: the same script with Horovod."""

import torch
from runner import NotRun
from scripts import MOMENTUM, build_model, check_data, check_training, run_script, same_tensors

RANKS, RATE, EPOCHS = 2, 0.05, 2


def horovodrun_variables():
    """Start a rendezvous server; return the variables that horovodrun --gloo sets for each rank."""
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


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    try:
        import horovod.torch  # noqa: F401
    except ImportError:
        raise NotRun("Horovod is not installed: .venv/without-horovod says why; "
                     "the other exercises do not need it") from None
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for parameter in model.parameters():  # as after an earlier run
        optimizer.state[parameter]["momentum_buffer"] = 0.1 * torch.randn(parameter.shape)
    start = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ranks = run_script(file, horovodrun_variables(), start)
    yield from check_data(ranks)
    yield "all ranks start with the parameters that rank 0 has loaded", all(
        same_tensors(rank["start"], start["model"]) for rank in ranks), (
        "the ranks start with their own random weights: broadcast rank 0's after it has loaded "
        "start.pt")
    yield from check_training(
        ranks, RATE, EPOCHS, "the ranks start equal and drift apart: is hvd.DistributedOptimizer "
        "the optimizer that steps? And what else does SGD's step depend on, that only rank 0 has "
        "loaded?",
        "are the gradients averaged, not summed? Keep epochs, learning rate and momentum "
        "unchanged. hvd.DistributedOptimizer returns a new optimizer with the parameters and rates "
        "of the old one, but not its state", start["optimizer"])

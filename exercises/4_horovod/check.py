"""What the grade of exercise 4 looks at."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import torch
from runner import NotRun
from scripts import GRADIENTS, findings, points_of_data, points_of_training, run_script, same_parameters

RANKS = 2
HINTS = {
    "own gradients": "each rank steps by its own gradients: hvd.DistributedOptimizer averages them, if it steps",
    "sum": "they are summed: Horovod's default, op=hvd.Average, is the mean"}


@contextlib.contextmanager
def horovodruns_variables():
    """What horovodrun --gloo sets for each rank.

    The server at which they meet is a process: it has threads, and who has threads had better not fork.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
    plan = get_host_assignments(parse_hosts(f"localhost:{RANKS}"), RANKS)
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        meeting = RendezvousServer()
        port = meeting.start()
        meeting.init(plan)
        os.write(writing, f"{port}\n".encode())
        signal.pause()
    try:
        with os.fdopen(reading) as answer:
            port = int(answer.readline())
        common = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
                  "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
        names = "hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"
        yield [common | {f"HOROVOD_{name.upper()}": getattr(slot, name) for name in names} for slot in plan]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    try:
        import solution  # for its data and its model
    except ImportError:
        raise NotRun("Horovod is not installed: .venv/without-horovod says why; the others need none") from None
    model = solution.build_model()
    optimizer = torch.optim.SGD(model.parameters(), solution.RATE, solution.MOMENTUM)
    for parameter in model.parameters():  # as an earlier training would leave them
        optimizer.state[parameter]["momentum_buffer"] = 0.1 * torch.randn(parameter.shape)
    with tempfile.TemporaryDirectory() as disks, horovodruns_variables() as variables:
        folders = [Path(disks, str(rank)) for rank in range(RANKS)]
        for folder in folders:
            folder.mkdir()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folders[0] / "start.pt")
        ranks = run_script(file, variables, folders)
    found = findings(ranks)
    yield from points_of_data(ranks, found, solution, "hvd.init()", "it is told hvd.size() and hvd.rank()")
    yield "all ranks start with the parameters that rank 0 has loaded", all(
        same_parameters(rank["start"], model.state_dict()) for rank in ranks), (
        "the others start with weights of their own, or rank 0, too, without those of start.pt: broadcast rank 0's "
        "after it has loaded them")
    wrong = [name for name in found if name in GRADIENTS]
    yield "the ranks' gradients are averaged", not wrong, next(
        (HINTS[name] for name in wrong if name in HINTS),
        f"submit/agree.py calls that {wrong}; hvd.DistributedOptimizer alone averages all of model.named_parameters()")
    yield "their parameters stay equal", "apart" not in found, (
        "equal parameters and equal gradients, and they drift apart: what else does SGD's step depend on, that rank 0 "
        "has loaded and the others have not?")
    yield from points_of_training(ranks, solution, (
        "are learning rate and momentum what they were? hvd.DistributedOptimizer makes a new optimizer out of the one "
        "that it is given, and takes its parameters and rates, not its state"), optimizer.state_dict())

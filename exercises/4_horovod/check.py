"""What the grade of exercise 4 looks at."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import sklearn.datasets  # noqa: F401  once, before the ranks are forked
import torch
from grade import load
from runner import NotRun
from scripts import checkpoint, contents, findings, global_batch, lines, order, run_script, same, training

RANKS = 2
try:
    REFERENCE = load(Path(__file__).with_name("solution.py"), "reference")  # for its data and its model
except ImportError:
    REFERENCE = None
GRADIENTS = {  # what agree.py finds: the hint
    "own gradients": "each rank steps by its own gradients: hvd.DistributedOptimizer averages them, if it is "
                     "what steps",
    "sum": "they are summed: Horovod's default, op=hvd.Average, is the mean",
    "twice": "they are divided twice by the number of ranks: hvd.DistributedOptimizer alone makes them the mean",
    "one rank's": "all ranks take those of one rank: broadcasts are for the start, gradients are averaged",
    "part": "some are averaged, and some are each rank's own: DistributedOptimizer needs all of "
            "model.named_parameters()",
    "scaled": "the mean, times a factor: what else multiplies the loss or the gradients?",
    "other gradients": "what the optimizer takes is neither their mean nor any rank's own"}


def watch(file):
    """Per rank what the script did, what agree.py finds in it, and what was saved."""
    if not REFERENCE:
        raise NotRun("Horovod is not installed: `make setup` says why, and the other exercises go without it")
    with tempfile.TemporaryDirectory() as folder, horovodruns_variables(RANKS) as places:
        folders = [Path(folder, str(rank)) for rank in range(RANKS)]  # disks that are each rank's own
        for own in folders:
            own.mkdir()
        start, state = save_start(folders[0] / "start.pt")
        facts = run_script(file, places, folders, world)
        saved = contents(facts)
    return {"ranks": facts, "found": findings(facts), "contents": saved, "start": start, "state": state}


@contextlib.contextmanager
def horovodruns_variables(ranks):
    """What horovodrun --gloo sets for each rank.

    The server at which they meet is a process: it has threads, and who has threads had better not fork.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer
    plan = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        meeting = RendezvousServer()
        port = meeting.start()
        meeting.init(plan)
        os.write(writing, f"{port}\n".encode())
        signal.pause()
    with os.fdopen(reading) as answer:
        port = int(answer.readline())
    common = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
              "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    names = "hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"
    try:
        yield [common | {f"HOROVOD_{name.upper()}": getattr(slot, name) for name in names} for slot in plan]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def world():
    import horovod.torch as hvd
    return hvd.size() if hvd.is_initialized() else 1


def save_start(path):
    """A checkpoint of an earlier training: parameters, and a momentum that matters. Returns both."""
    random = torch.Generator().manual_seed(0)
    model = REFERENCE.build_model()
    optimizer = torch.optim.SGD(model.parameters(), REFERENCE.RATE, REFERENCE.MOMENTUM)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=random)
        optimizer.state[parameter]["momentum_buffer"] = 0.1 * torch.randn(parameter.shape, generator=random)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model.state_dict(), optimizer.state_dict()["state"]


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    ranks, found = facts["ranks"], facts["found"]
    batches = [rank["batches"] for rank in ranks]
    yield f"the {RANKS} ranks have met before they train", all(rank["world"] == RANKS for rank in ranks), (
        "each rank believes that it is alone, and trains alone: all have to call hvd.init() first")

    hint = ("the loader of each rank goes through all images: a DistributedSampler deals them out, in place of "
            "shuffle=True")
    if "sampler" in found:
        hint = f"the sampler deals {found['sampler']}: num_replicas and rank are Horovod's, hvd.size() and hvd.rank()"
    yield "each rank trains on images of its own", not found.keys() & {"same data", "overlap", "sampler"}, hint

    yield global_batch(batches, REFERENCE)

    apart = [number for number, rank in enumerate(ranks) if not same(rank["start"], facts["start"])]
    hint = "the others start with weights of their own: rank 0 has loaded start.pt, and nobody gave them what it says"
    if 0 in apart:
        hint = ("rank 0 does not start with the parameters of start.pt: broadcast after they are loaded, from "
                "root_rank=0")
    yield "all ranks start with the parameters that rank 0 has loaded", not apart, hint

    yield "the ranks' gradients are averaged", not found.keys() & set(GRADIENTS), next(
        (hint for key, hint in GRADIENTS.items() if key in found), "")

    yield "their parameters stay equal", "apart" not in found, (
        f"equal parameters and equal gradients, and they drift apart {found.get('apart')}: what else does SGD's "
        "step depend on, that rank 0 has loaded and the others have not?")

    yield order(batches, found, REFERENCE)
    yield training(ranks, REFERENCE, facts["state"])
    yield from checkpoint(ranks, facts["contents"])
    yield from lines(ranks, REFERENCE)

"""Ranks without a launcher: forked from a process that has imported the frameworks, so that a run costs what it does.

Each rank runs a chapter's file as __main__, with the variables that torchrun sets, or horovodrun --gloo. For tests in
which the launcher is not what is tested.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

PROGRAMS = Path(__file__).with_name("programs")
TORCH = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.nn", "torch._dynamo",
         "torchvision", "tqdm", "sklearn.datasets", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
TENSORFLOW = "tensorflow", "keras", "tqdm", "psutil", "cloudpickle"
BEFORE_IMPORT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}  # as the lessons


def free_port():
    """A port that no system gives to a program which asks for any, so that tests beside this one do not take it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", random.randrange(20000, 32000))) as server:
            return server.getsockname()[1]


@functools.cache
def server(*modules):
    """A fork server that has imported these modules, the same for all tests of this process."""
    process = subprocess.Popen([sys.executable, PROGRAMS / "fork_server.py", *modules], text=True, cwd="/",
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | BEFORE_IMPORT)
    atexit.register(process.kill)
    return process


def horovods_variables(ranks):
    """What horovodrun --gloo sets for each rank, and the server at which they meet, which has to be stopped."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    meeting = RendezvousServer()
    port = meeting.start()
    plan = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    meeting.init(plan)
    common = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
              "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    names = "hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"
    return [common | {f"HOROVOD_{name.upper()}": getattr(slot, name) for name in names} for slot in plan], meeting


def torchruns_variables(ranks):
    """What torchrun sets for each rank."""
    port = free_port()
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forked"}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]


def run(words, ranks, env, timeout=300, cwd=None):
    """Run `python WORDS` on so many ranks; a single one has no launcher's variables.

    Returns the worst code, and what they printed; a hang is an error.
    """
    words = [str(word) for word in words]
    text = "".join(Path(word).read_text() for word in words if word.endswith(".py") and Path(word).parent != PROGRAMS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        places = [{}]
        if ranks > 1 and "import horovod" in text:
            places, meeting = horovods_variables(ranks)
            stack.callback(meeting.stop)
        elif ranks > 1:
            places = torchruns_variables(ranks)
        ranks = [(env | {name: str(value) for name, value in place.items()},
                  (f"{folder}/{rank}.out", f"{folder}/{rank}.err")) for rank, place in enumerate(places)]
        job = {"words": words, "cwd": str(cwd or Path.cwd()), "ranks": ranks, "timeout": timeout}
        process = server(*(TENSORFLOW if "import tensorflow" in text else TORCH))
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        codes, in_time = json.loads(process.stdout.readline())
        out, err = ("".join(Path(path).read_text() for path in paths)
                    for paths in zip(*(printed for _, printed in ranks)))
    assert in_time, f"no end after {timeout} s: {err}"
    return SimpleNamespace(code=max(codes, key=abs), out=out, err=err)

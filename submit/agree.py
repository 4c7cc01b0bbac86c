"""Do the ranks of your own script train one model?

Start it as you always do, with this file before it:

    mpiexec -n 4 python submit/agree.py my_train.py --its flags      # or srun, torchrun, horovodrun, deepspeed

The script, a PyTorch program, runs unmodified until one of its optimizers has made five steps. Then one table says
what was seen on all ranks, and a verdict. The exit code is 0 where nothing wrong was found, 1 where something was,
2 where nothing could be seen. `--explain` says what a finding means. The page is AGREE.md.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing.util
import os
import re
import runpy
import socket
import sys
import threading
import time
import traceback
import urllib.request
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import agree_verdicts as verdicts

RIGHT, WRONG, UNSEEN = 0, 1, 2
RANK_VARIABLES = "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "SLURM_PROCID"
TORCHRUN = "TORCHELASTIC_ERROR_FILE"  # torchrun reads there why a rank has failed
PATIENCE = 10  # times the time-out, where a rank does what may take long: set-up, a download, a compiler


# Where do the ranks meet? In a store of their own, beside that of the script.

def load_ranks():
    """ranks.py of the chapters, under a name that no script of others has."""
    path = Path(__file__).resolve().parent.parent / "03_ddp" / "ranks.py"
    spec = importlib.util.spec_from_file_location("agree_ranks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def meet(seconds):
    """Rank, number of ranks and their store. The script's environment is afterwards what it was."""
    ranks_py, before, hook = load_ranks(), dict(os.environ), sys.excepthook
    launcher, rank, ranks = ranks_py.launched()
    if ranks < 2:
        return rank, ranks, None
    import torch.distributed as dist
    if launcher == "horovodrun":
        return rank, ranks, meet_by_horovodrun(rank, ranks, seconds)
    if launcher in ranks_py.MPIEXECS:
        with suppress(ImportError, RuntimeError):  # find_ranks() says so
            from mpi4py import MPI  # noqa: F401  the script may use MPI, which find_ranks() would end
    rank, ranks, _ = ranks_py.find_ranks()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's store is open already
    os.environ.clear()
    os.environ.update(before)
    sys.excepthook = hook
    if not agents:  # the script may open the port itself
        port = 20000 + (port + 4999) % 10000
    store = dist.TCPStore(host, port, ranks, rank == 0 and not agents, timedelta(seconds=seconds), False)
    return rank, ranks, dist.PrefixStore("agree", store)


def meet_by_horovodrun(rank, ranks, seconds):
    """horovodrun's driver keeps keys and values for all, and rank 0 tells there where its store is."""
    import torch.distributed as dist
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # a node's proxy leads elsewhere
    place = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/agree/store".format_map(os.environ)
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, ranks, True, timedelta(seconds=seconds), False)
        told = f"{socket.gethostname()}:{store.port}".encode()
        ask(urllib.request.Request(place, told, method="PUT")).close()
        return store
    end = time.monotonic() + seconds
    while True:
        try:
            host, port = ask(place).read().decode().split(":")
            return dist.TCPStore(host, int(port), ranks, False, timedelta(seconds=seconds), False)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


# What do they tell each other? Signs of life, and in the end what they have seen.

class Session:
    """One rank's part in it. Rank 0 judges; a thread on each rank goes on when the script waits for ever."""

    def __init__(self, script, rank, ranks, store, seconds):
        self.script, self.rank, self.ranks, self.store, self.seconds = script, rank, ranks, store, seconds
        self.watch = None
        self.code = None
        self.judged = threading.Event()

    def hand_in(self, end="steps", problem=""):
        """The main thread's end: report, wait for the verdict, leave with its code."""
        self.report(end, problem)
        self.judged.wait()
        leave(self.store, self.rank, self.ranks, self.code, "MPI")

    def report(self, end, problem=""):
        """What was seen, and why no more: its steps are made, its script has ended or died, or it waits for another."""
        self.publish(f"report {self.rank}", self.watch.record | {"end": end, "problem": problem})

    def publish(self, name, value):
        self.store.set(name, json.dumps(value))

    def read(self, name):
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def look_after(self):
        """The thread: say where this rank is; on rank 0 judge when all have reported, died, or wait for ever."""
        last, since = None, time.monotonic()
        told = None
        while self.code is None:
            time.sleep(0.05)
            with suppress(RuntimeError):  # the store's, when rank 0 has left
                here = self.watch.whereabouts(str(self.script))
                if here != told:
                    self.publish(f"alive {self.rank}", here)
                    told = here
                if self.read("stop") and not self.read(f"report {self.rank}"):
                    self.report("waits")
                if self.rank == 0:
                    now = [(self.read(f"report {rank}"), self.read(f"alive {rank}")) for rank in range(self.ranks)]
                    if now != last:
                        last, since = now, time.monotonic()
                    self.judge(now, time.monotonic() - since)
                self.code = self.read("code")
        self.judged.set()
        time.sleep(1)  # the main thread leaves, unless the script holds it
        leave(self.store, self.rank, self.ranks, self.code)

    def judge(self, now, silence):
        """Print the verdict and tell all its code, once there is one."""
        reports = [report for report, _ in now]
        there = [report for report in reports if report]
        died = [rank for rank, report in enumerate(reports) if report and report["end"] == "died"]
        missing = len(there) < self.ranks
        waits = [report is not None or bool(alive and alive["waits"]) for report, alive in now]
        patience = self.seconds if all(waits) else PATIENCE * self.seconds
        if died:
            patience = min(2, patience)
        if missing and silence < patience:
            return
        if missing and there and all(report["end"] == "steps" for report in there):
            self.publish("stop", True)  # they wait for ranks that this program holds: it judges the steps that all have
            return
        lines, found, problem = [], {}, ""
        if died:
            problem = f"rank {died[0]} ended with {reports[died[0]]['problem']}"
        elif missing:
            lines, found = verdicts.judge_hang(now, silence)
        elif not all(report["steps"] and "before" in report for report in reports):
            problem = f"{self.script.name} {verdicts.why_not(reports)}"
        else:
            lines, found = verdicts.judge(reports)
        if problem:
            print(f"agree.py: {problem}", file=sys.stderr)
            code = UNSEEN
        else:
            verdicts.show(self.script.name, reports, lines, found)
            code = WRONG if found.keys() - verdicts.NOTES else RIGHT
        if code:
            tell_torchrun(problem or verdicts.verdict(found))
        self.publish("code", code)


def leave(store, rank, ranks, code, finalize=""):
    """At once: what the script still waits for would let this process hang. Rank 0, which is the store, last."""
    for child in multiprocessing.active_children():  # a DataLoader's workers
        child.terminate()
    multiprocessing.util._exit_function()  # what Python does at its end, which os._exit leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(Exception):
        store.set(f"left {rank}", "")
        if rank == 0:
            store.wait([f"left {rank}" for rank in range(ranks)], timedelta(seconds=5))
    if finalize and "horovod" not in sys.modules:  # which has threads that call MPI
        with suppress(Exception):
            from mpi4py import MPI
            if MPI.Is_initialized() and not MPI.Is_finalized():
                MPI.Finalize()  # or the launcher calls this a crash
    os._exit(0 if rank and TORCHRUN in os.environ else code)  # it reports each failed rank; one is enough


def tell_torchrun(words):
    """Let torchrun end its report of the exit code, in which it supposes a crash, with these words."""
    if TORCHRUN in os.environ:
        failure = {"message": f"none: no crash. agree.py says: {words}", "timestamp": int(time.time())}
        Path(os.environ[TORCHRUN]).write_text(json.dumps(failure))


# The script, as `python script arguments` would run it.

def run(session, arguments):
    sys.argv = [str(session.script), *arguments]
    sys.path[0] = str(session.script.parent)
    how, problem = "ended", ""
    try:
        runpy.run_path(str(session.script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            how = "died"
            problem = f"exit code {end.code}" if isinstance(end.code, int) else str(end.code)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        trace = fault.__traceback__
        while trace.tb_next and trace.tb_frame.f_code.co_filename != str(session.script):  # this program's, and runpy's
            trace = trace.tb_next
        traceback.print_exception(type(fault), fault, trace)
        how = "died"
        lines = str(fault).splitlines()
        problem = f"{type(fault).__name__}: {lines[0] if lines else ''}"
    session.hand_in(how, problem)


def refusal(script):
    """Why a file cannot be looked at, or None."""
    if script.suffix == ".ipynb":
        return f"{script} is a notebook: make a script of it, jupyter nbconvert --to script {script}"
    try:
        imports = re.findall(rb"^\s*(?:import|from) .*", script.read_bytes(), re.M)
    except OSError as problem:
        return f"{script} cannot be read: {problem}"
    names = set(re.findall(rb"\w+", b" ".join(imports)))
    if b"torch" not in names and (others := sorted(names & {b"tensorflow", b"keras", b"jax"})):
        return f"{script} trains with {others[0].decode()}; only PyTorch's training can be looked at"
    return None


def one_speaks():
    """Whether this process is rank 0, or no rank."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


def fail(line):
    """Say it, from one rank; the exit code of what could not look."""
    if one_speaks():
        print(f"agree.py: {line}", file=sys.stderr)
        tell_torchrun(line)
    else:
        time.sleep(2)  # or the launcher ends rank 0 before it has spoken
    return UNSEEN


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(fail(message))
    parser.add_argument("--steps", type=int, default=5, help="until an optimizer has made so many steps (5)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds of waiting that are called a hang (30)")
    parser.add_argument("--explain", choices=verdicts.FINDINGS, metavar="NAME",
                        help="say what a finding means, and stop")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher says it to what it starts
    parser.add_argument("script", nargs="?", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
    args = parser.parse_args()
    if args.explain:
        if one_speaks():
            print(verdicts.explain(args.explain))
        return RIGHT
    if args.steps < 1 or not args.timeout > 0 or math.isinf(args.timeout):
        return fail("--steps and --timeout have to be more than 0")
    if not args.script or not os.path.isfile(args.script):  # pathlib's raises at a name that is too long
        return fail(f"no file {args.script}: name your script" if args.script else "name your script")
    problem = refusal(args.script)
    if problem:
        return fail(problem)
    rank, ranks, store = meet(args.timeout)
    if ranks < 2:
        return fail("one process has nobody to agree with: start two or more, with mpiexec -n 2, srun or torchrun")
    from agree_watch import Watch
    session = Session(args.script.resolve(), rank, ranks, store, args.timeout)
    session.watch = Watch(args.steps, session.hand_in)
    session.watch.install()
    session.watch.record["met"] = b"mpi4py" in args.script.read_bytes()  # whose calls are not seen
    threading.Thread(target=session.look_after, daemon=True).start()
    run(session, [f"--local_rank={args.local_rank}"] * (args.local_rank is not None) + args.arguments)
    return None


if __name__ == "__main__":
    sys.exit(main())

"""Do the ranks of your own script train one model? Start it as you always do, with this file before it:

    mpiexec -n 4 python submit/agree.py my_train.py --its flags      # or srun, torchrun, horovodrun, deepspeed

The script, a PyTorch program, runs unmodified until some optimizer steps are made. Then stand here what was seen of all
ranks, and a verdict. The exit code is 0 where nothing wrong was found, 1 where something was, 2 where nothing could be seen.
"""

import argparse
import json
import os
import runpy
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


def load_ranks():
    """ranks.py of the chapters, under a name that no script of others has."""
    import importlib.util
    path = Path(__file__).resolve().parent.parent / "03_ddp" / "ranks.py"
    spec = importlib.util.spec_from_file_location("agree_ranks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def meet(seconds):
    """Rank, number of ranks and a store of their own. The script's environment is afterwards what it was."""
    import torch.distributed as dist
    ranks_py, before = load_ranks(), dict(os.environ)
    launcher, rank, ranks = ranks_py.launched()
    if ranks < 2:
        return rank, ranks, None
    if launcher == "horovodrun":  # its driver keeps keys and values for all
        return rank, ranks, meet_by_horovodrun(rank, ranks, seconds)
    hook = sys.excepthook
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
    import socket

    import torch.distributed as dist
    where = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/agree/store".format_map(os.environ)
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, ranks, True, timedelta(seconds=seconds), False)
        told = f"{socket.gethostname()}:{store.port}".encode()
        urllib.request.urlopen(urllib.request.Request(where, told, method="PUT")).close()
        return store
    end = time.monotonic() + seconds
    while True:
        try:
            host, port = urllib.request.urlopen(where).read().decode().split(":")
            return dist.TCPStore(host, int(port), ranks, False, timedelta(seconds=seconds), False)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def leave(code):
    """At once: what the script still waits for would let this process hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(Exception):
        from mpi4py import MPI
        if MPI.Is_initialized() and not MPI.Is_finalized() and code == RIGHT and "horovod" not in sys.modules:
            MPI.Finalize()
    os._exit(code)


class Session:
    """What the ranks hand each other: reports at the end, and signs of life until then."""

    def __init__(self, script, rank, ranks, store, steps, seconds):
        self.script, self.rank, self.ranks, self.store, self.seconds = script, rank, ranks, store, seconds
        self.steps, self.ended = steps, threading.Lock()
        self.watch = None

    def key(self, name, rank):
        return f"{name} {rank}"

    def hand_in(self, how="seen", problem=""):
        """Give the report to rank 0, which judges those of all; then all leave with its verdict's code."""
        if not self.ended.acquire(blocking=False):
            time.sleep(3600)  # the watchdog is about to end this process
        record = self.watch.record | {"end": how, "problem": problem, "steps": self.watch.record["steps"]}
        self.store.set(self.key("report", self.rank), json.dumps(record))
        if self.rank == 0:
            self.judge()
        self.store.wait(["code"], timedelta(seconds=3 * self.seconds))
        code = int(self.store.get("code"))
        self.store.set(self.key("left", self.rank), "")
        if self.rank == 0:  # whose process is the store
            with suppress(Exception):
                self.store.wait([self.key("left", rank) for rank in range(self.ranks)], timedelta(seconds=5))
        leave(code)

    def judge(self):
        names = [self.key("report", rank) for rank in range(self.ranks)]
        end = time.monotonic() + self.seconds
        while not self.store.check(names) and time.monotonic() < end:
            time.sleep(0.02)
        there = [name for name in names if self.store.check([name])]
        reports = [json.loads(self.store.get(name)) for name in there]
        missing = [rank for rank, name in enumerate(names) if name not in there]
        found, lines = {}, []
        died = [rank for rank, report in enumerate(reports) if report["end"] == "died"]
        if missing and not died:
            places = [f"rank {rank} at {self.alive(rank)[1]}" for rank in range(self.ranks)]
            found["hang"] = f"{verdicts.ranks_text(missing, self.ranks)} never came: {', '.join(places)}"
        seen = [report for report in reports if report["steps"] and "before" in report]
        code = WRONG
        if died:
            print(f"agree.py: rank {died[0]} ended with {reports[died[0]]['problem']}", file=sys.stderr)
            code = UNSEEN
        elif not missing and not seen:
            print(f"agree.py: {self.script.name} {verdicts.why_not(reports)}", file=sys.stderr)
            code = UNSEEN
        if seen and len(seen) == len(reports) and not missing:
            lines, more = verdicts.judge(seen)
            found |= more
        if code != UNSEEN:
            verdicts.show(self.script.name, self.ranks, seen, lines, found)
            code = WRONG if found.keys() - verdicts.NOTES else RIGHT
        self.store.set("code", str(code))

    def alive(self, rank):
        """(how much a rank has done, where it is), by its last sign of life."""
        name = self.key("alive", rank)
        return json.loads(self.store.get(name)) if self.store.check([name]) else (0, "its start")

    def look_after(self):
        """A thread: tell where this rank is; rank 0 ends all when no rank has done anything for `seconds`."""
        from agree_watch import main_frame, place_of
        last, since = None, time.monotonic()
        while not self.ended.locked():
            time.sleep(0.25)
            with suppress(Exception):
                place = place_of(main_frame(), str(self.script))
                self.store.set(self.key("alive", self.rank), json.dumps([self.watch.happened, place]))
                if self.rank:
                    if self.store.check(["hang"]):
                        self.store.wait(["code"], timedelta(seconds=5))
                        leave(WRONG)
                    continue
                now = [self.alive(rank) for rank in range(self.ranks)]
                if now != last:
                    last, since = now, time.monotonic()
                if time.monotonic() - since > self.seconds and self.ended.acquire(blocking=False):
                    self.store.set("hang", "")
                    said = ", ".join(f"rank {rank} at {place}" for rank, (_, place) in enumerate(now))
                    verdicts.show(self.script.name, self.ranks, [], [], {"hang": f"for {self.seconds:g} s: {said}"})
                    self.store.set("code", str(WRONG))
                    time.sleep(1)
                    leave(WRONG)


def run(session, arguments):
    """The script, as `python script arguments` would run it."""
    sys.argv = [str(session.script), *arguments]
    sys.path[0] = str(session.script.parent)
    how, problem = "seen", ""
    try:
        runpy.run_path(str(session.script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            how, problem = "died", f"exit code {end.code}" if isinstance(end.code, int) else f": {end.code}"
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        traceback.print_exc()
        how, problem = "died", f"{type(fault).__name__}: {fault}"
    session.hand_in(how, problem)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to watch (5)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds without any sign until it is a hang (30)")
    parser.add_argument("--explain", choices=verdicts.FINDINGS, help="say what a finding means, and stop")
    parser.add_argument("script", nargs="?", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
    args = parser.parse_args()
    if args.explain:
        print(verdicts.explain(args.explain))
        return
    if not args.script or not args.script.is_file():
        sys.exit(fail(f"no file {args.script}: name your script" if args.script else "name your script"))
    try:
        compile(args.script.read_text(), args.script, "exec")
    except (SyntaxError, UnicodeDecodeError) as problem:
        sys.exit(fail(f"{args.script} does not parse: {problem}"))
    rank, ranks, store = meet(args.timeout)
    if ranks < 2:
        sys.exit(fail("one process has nobody to agree with: start with mpiexec -n 2, srun, torchrun"))
    from agree_watch import Watch
    session = Session(args.script.resolve(), rank, ranks, store, args.steps, args.timeout)
    session.watch = Watch(args.steps, session.hand_in)
    session.watch.install()
    threading.Thread(target=session.look_after, daemon=True).start()
    run(session, args.arguments)


def fail(line):
    """Say it, from one rank; the exit code of what could not look."""
    rank = next((os.environ[name] for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "SLURM_PROCID")
                 if name in os.environ), "0")
    if rank == "0":
        print(f"agree.py: {line}", file=sys.stderr)
    return UNSEEN


if __name__ == "__main__":
    main()

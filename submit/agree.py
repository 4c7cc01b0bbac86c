"""Do the ranks of your own script train one model?

Start it as you always do, with this file before it:

    mpiexec -n 4 python submit/agree.py my_train.py --its flags   # or srun, torchrun, horovodrun,
                                                                  # deepspeed

The script, a PyTorch program, runs unmodified until one of its optimizers has taken five steps.
Then agree.py prints a table of what it saw on all ranks, and a verdict. The exit code is 0 if
nothing wrong was found, 1 if something was, 2 if nothing could be seen. The page is AGREE.md.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing.util
import os
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import partial

from agreement import verdicts

from ranks import MPIEXECS, find_launcher, find_ranks, own_rank

RIGHT, WRONG, UNSEEN = 0, 1, 2
exit_now = os._exit  # the script gets end_by_os_exit() instead
say = partial(print, file=sys.__stderr__, flush=True)  # even if the script redirects sys.stderr
FIRST_MESSAGE_AFTER = 15  # seconds until rank 0 says what it waits for
SLOW_CALL_FACTOR = 10  # times --timeout, if a rank may be downloading or compiling


def connect(seconds):
    """Return launcher, rank, world size, and a TCPStore other than the script's own.

    The script's environment variables do not change.
    """
    launcher, rank, world_size = find_launcher()
    if world_size == 1:
        return launcher, rank, world_size, None
    import torch.distributed as dist
    before = dict(os.environ)
    if launcher == "horovodrun":  # its ranks know only the driver's address and port
        host = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    else:
        if launcher in MPIEXECS:
            with suppress(ImportError, RuntimeError):  # find_ranks() reports it
                from mpi4py import MPI  # noqa: F401  initializes MPI, which the script may use
        rank, world_size, _ = find_ranks()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torchruns_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun opened it
    os.environ.clear()
    os.environ.update(before)
    if not torchruns_store:  # the script may open the port itself
        port = 20000 + (port + 4999) % 10000
    is_server = rank == 0 and not torchruns_store
    store = dist.TCPStore(host, port, world_size, is_server, timedelta(seconds=seconds), False)
    return launcher, rank, world_size, dist.PrefixStore("agree", store)


# Ranks publish their status, their collectives, and at the end a report.

class Session:
    """This rank's side of the check: publishes what it sees; rank 0 also decides.

    monitor() runs in a thread, because the script may wait forever.
    """

    def __init__(self, name, launcher, rank, world_size, store, limits):
        self.name, self.launcher = name, launcher
        self.rank, self.world_size, self.store = rank, world_size, store
        self.seconds, self.patience = limits  # of silence that are a hang; until the first step
        self.watch = self.calls = None  # agreement's Watch and Calls: main() sets them
        self.code = None
        self.started = time.monotonic()
        self.waiting_shown = False
        self.judged = threading.Event()

    def finish(self, end="steps", problem=""):
        """End the main thread: report, wait for the verdict, leave with its code."""
        self.report(end, problem)
        self.judged.wait()
        leave(self.store, self.rank, self.world_size, self.code, finalize=True)

    def report(self, end, problem=""):
        """Publish what was seen, and how the script ended: "steps", "ended", "died" or "waits"."""
        record = self.watch.report() | {
            "end": end, "problem": problem, "launcher": self.launcher,
            "calls": sorted(self.calls.names)}
        self.publish(f"report {self.rank}", record)

    def publish(self, name, value):
        self.store.set(name, json.dumps(value))

    def read(self, name):
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def join(self, number, call, place):
        """Wait until all ranks are at collective number `number`; if they differ, do not return."""
        self.publish(f"call {number} of {self.rank}", [call, place])
        keys = [f"call {number} of {rank}" for rank in range(self.world_size)]
        until = time.monotonic() + 2 * self.seconds  # after that, let the script call it
        pause = 0.0002
        while not self.store.check(keys):
            if time.monotonic() > until:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        calls = [self.read(key) for key in keys]
        if len({call for call, _ in calls}) > 1:
            self.publish("calls", calls)
            self.judged.wait()

    def refuse_spawn(self, place):
        self.finish("died", f"{self.name} starts its ranks itself, at {place}: let the launcher "
                            "start them, and the script train one, see find_ranks() in ranks.py")

    def monitor(self):
        """Publish where this rank is; rank 0 judges when all ranks have reported, died or hang."""
        last, since = None, time.monotonic()
        published = None
        while self.code is None:
            time.sleep(0.05)
            with suppress(RuntimeError):  # the store is gone once rank 0 has left
                here = self.watch.whereabouts() | {"call": self.calls.current}
                here["waits"] = here["waits"] or bool(here["call"])
                if here != published:
                    self.publish(f"alive {self.rank}", here)
                    published = here
                if self.read("stop") and not self.read(f"report {self.rank}"):
                    self.report("waits")
                if self.rank == 0:
                    states = [(self.read(f"report {rank}"), self.read(f"alive {rank}"))
                              for rank in range(self.world_size)]
                    if states != last:
                        last, since = states, time.monotonic()
                    self.report_progress()
                    self.judge(states, time.monotonic() - since)
                self.code = self.read("code")
        self.judged.set()
        time.sleep(1)  # for the main thread to leave, unless it is blocked in the script
        leave(self.store, self.rank, self.world_size, self.code)

    def report_progress(self):
        """Print once what agree.py waits for; stop a script that takes no step in time."""
        seconds = time.monotonic() - self.started
        if self.watch.record["steps"] or seconds < FIRST_MESSAGE_AFTER:
            return
        if not self.waiting_shown:
            self.waiting_shown = True
            started = ""
            if self.calls.spawn_location:
                started = f"; it has started a process at {self.calls.spawn_location}"
            say(f"agree.py: waiting for the first step of a PyTorch optimizer, up to "
                f"{self.patience:.0f} s (--first-step); {self.watch.backwards} backward passes "
                f"so far{started}")
        if seconds > self.patience:
            self.publish("stop", True)

    def judge(self, states, silence):
        """Print the verdict and publish the exit code, once there is one."""
        reports = [report for report, _ in states]
        complete = all(reports)
        calls = self.read("calls")
        died = [report for report in reports if report and report["end"] == "died"]
        silence_limit = SLOW_CALL_FACTOR * self.seconds
        if all(report or (alive and alive["waits"]) for report, alive in states):
            silence_limit = self.seconds
        if died:
            silence_limit = min(2, silence_limit)
        if not complete and not calls and silence < silence_limit:
            return
        ends = {report["end"] for report in reports if report}
        if not complete and ends == {"steps"}:
            self.publish("stop", True)  # judge the steps that all ranks have taken
            return

        if calls:
            self.show(reports, *verdicts.judge_calls(calls))
        elif died:
            self.refuse(died[0]["problem"])
        elif not complete:
            self.show(reports, *verdicts.judge_hang(states, silence))
        elif not verdicts.paired(reports):
            how = "ended before"
            if "waits" in ends:
                how = "has not reached"
            self.refuse(f"{self.name} {how} the first step of a PyTorch optimizer on all ranks: "
                        f"nothing to compare ({verdicts.without_steps(reports)})")
        else:
            self.show(reports, *verdicts.judge(reports))

    def refuse(self, problem):
        say(f"agree.py: {problem}")
        self.publish("code", UNSEEN)

    def show(self, reports, lines, findings):
        wrong = findings.keys() - {"note"}
        verdicts.show(self.name, reports, lines, findings)
        self.publish("code", WRONG if wrong else RIGHT)


class Stopwatch:
    """Times the steps of one rank: with --results, in place of a Session."""

    rank = 0

    def __init__(self, name, steps, results):
        from agreement.measure import Measure
        self.name, self.results = name, results
        self.measure = Measure(steps, self.finish)

    def finish(self, end="steps", problem=""):
        """Print and append the step time, and leave."""
        record = self.measure.record()
        if not record:
            say(f"agree.py: {problem or 'too few steps of a PyTorch optimizer to time them'}")
            leave(None, 0, 1, UNSEEN)
        say(f"{self.name}: {record['steps']} steps on one rank, {record['device']}: "
            f"{record['step_seconds']:.4f} s per step (median), {record['batch_size']:,} samples, "
            f"{record['gradient_bytes']:,} bytes of gradients")
        with open(self.results, "a") as file:
            file.write(json.dumps({"chapter": self.name} | record) + "\n")
        leave(None, 0, 1, RIGHT, finalize=True)


def leave(store, rank, world_size, code, finalize=False):
    """Exit at once, because a pending collective would block a normal exit.

    Rank 0 hosts the store, so it leaves last.
    """
    for child in multiprocessing.active_children():  # DataLoader workers
        child.terminate()
    multiprocessing.util._exit_function()  # a part of Python's exit that os._exit skips
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(Exception):  # rank 0 has left; or a single rank, without a store
        store.set(f"left {rank}", "")
        if rank == 0:
            store.wait([f"left {rank}" for rank in range(world_size)], timedelta(seconds=5))
    if finalize and "horovod" not in sys.modules:  # Horovod's threads call MPI
        with suppress(Exception):
            from mpi4py import MPI
            if MPI.Is_initialized() and not MPI.Is_finalized():
                MPI.Finalize()  # or the launcher reports a crash
    exit_now(code)


def run_script(session, script, module, arguments):
    """Run the script as `python script arguments` or `python -m module arguments` does."""
    del sys.modules["ranks"]  # the script may have a module of the same name
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else os.path.dirname(script)
    end = "ended"
    problem = ""
    os._exit = partial(end_by_os_exit, session, os.getpid())
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            end = "died"
            problem = f"exit code {exit.code}" if isinstance(exit.code, int) else str(exit.code)
    except KeyboardInterrupt:
        say("agree.py: interrupted; so far:")
    except Exception as fault:
        traceback.print_exc()
        end = "died"
        problem = f"{type(fault).__name__}: {''.join(str(fault).splitlines()[:1])}"
    if problem:
        problem = f"rank {session.rank} ended with {problem}"
    session.finish(end, problem)


def end_by_os_exit(session, script_pid, code):
    """os._exit while the script runs (ranks.run() calls it): print the verdict, then exit."""
    if os.getpid() != script_pid or threading.current_thread() is not threading.main_thread():
        exit_now(code)  # a forked worker or another thread
    if code:
        session.finish("died", f"rank {session.rank} ended with exit code {code}")
    session.finish("ended")


def fail(line):
    """Print a line on one rank, and return the exit code."""
    if own_rank() == 0:
        say(f"agree.py: {line}")
    else:
        time.sleep(2)  # or the launcher ends rank 0 before it has printed
    return UNSEEN


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(fail(message))
    parser.add_argument("--steps", type=int,
                        help="optimizer steps to watch (5; with --results 30)")
    parser.add_argument("--timeout", type=float, default=30,
                        help="seconds of waiting that count as a hang (30)")
    parser.add_argument("--first-step", type=float, default=600, metavar="SECONDS",
                        help="time limit for the first step (600)")
    parser.add_argument("--results", metavar="FILE",
                        help="on one rank: append the step time to FILE, for predict.py")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher passes it
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="run a module by its name, as python -m does")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser.parse_args()


def find_script(args):
    """Return the script's path, or None if there is none."""
    if args.is_module:
        sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(args.script)
        return spec.origin if spec else None
    return os.path.abspath(args.script) if os.path.isfile(args.script) else None


def main():
    args = parse_args()
    if args.steps is None:
        args.steps = 30 if args.results else 5
    for name in "steps", "timeout", "first_step":
        value = getattr(args, name)
        if not value > 0 or math.isinf(value):
            return fail(f"--{name.replace('_', '-')} must be more than 0")
    script = find_script(args)
    if not script:
        return fail(f"no {'module' if args.is_module else 'file'} {args.script}: name your script")
    if script.endswith(".ipynb"):
        return fail(f"{args.script} is a notebook: convert it with jupyter nbconvert --to script")

    try:
        launcher, rank, world_size, store = connect(args.timeout)
    except SystemExit as end:  # raised by find_ranks()
        return fail(end.code)
    name = args.script if args.is_module else os.path.basename(script)
    if args.results:
        if world_size > 1:
            return fail("--results: the step time without communication is measured on one rank: "
                        "python submit/agree.py --results FILE my_train.py")
        try:
            open(args.results, "a").close()
        except OSError as problem:
            return fail(f"--results: cannot write {args.results}: {problem.strerror}")
        stopwatch = Stopwatch(name, args.steps, os.path.abspath(args.results))
        stopwatch.measure.install()
        run_script(stopwatch, script, args.script if args.is_module else None, args.arguments)
    if world_size < 2:
        return fail("agree.py needs at least 2 ranks, but the world size is 1: start it with "
                    "mpiexec -n 2, srun or torchrun. A script that spawns its own ranks (mp.spawn) "
                    "must leave that to the launcher")
    from agreement.calls import Calls  # after find_ranks(): torch takes seconds to import
    from agreement.watch import Watch
    limits = args.timeout, args.first_step
    session = Session(name, launcher, rank, world_size, store, limits)
    session.watch = Watch(script, args.steps, session.finish)
    session.calls = Calls(script, world_size, session.join, session.refuse_spawn)
    session.watch.install()
    session.calls.install()
    threading.Thread(target=session.monitor, daemon=True).start()
    local_rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    arguments = local_rank + args.arguments
    run_script(session, script, args.script if args.is_module else None, arguments)
    return None


if __name__ == "__main__":
    sys.exit(main())

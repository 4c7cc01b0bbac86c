"""Do the ranks of your own script train one model?

Start it as you always do, with this file before it:

    mpiexec -n 4 python submit/agree.py my_train.py FLAGS         # or srun, torchrun, horovodrun,
                                                                  # deepspeed

The script, a PyTorch program, runs unmodified until one of its optimizers has taken five steps.
Then agree.py prints a table of what it saw on all ranks, and a verdict. The exit code is 0 if
nothing wrong was found, 1 if something was, 2 if agree.py could not check. See AGREE.md.
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

from workshop.ranks import MPIEXECS, find_launcher, find_ranks, own_rank

EXIT_NOTHING_WRONG, EXIT_WRONG, EXIT_NOT_CHECKED = 0, 1, 2
exit_now = os._exit  # the script gets end_by_os_exit() instead
say = partial(print, file=sys.__stderr__, flush=True)  # even if the script redirects sys.stderr
FIRST_MESSAGE_AFTER = 15  # seconds until rank 0 says what it is waiting for
SLOW_CALL_FACTOR = 10  # multiplies --timeout while a rank may be downloading or compiling


def connect(seconds):
    """Return launcher, rank, world size, and a store whose keys the script does not use.

    The environment variables stay as the script expects them.
    """
    launcher, rank, world_size = find_launcher()
    if world_size == 1:
        return launcher, rank, world_size, None
    import torch.distributed as dist
    variables = dict(os.environ)
    if launcher == "horovodrun":  # its ranks know only the driver's address and port
        host = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    else:
        if launcher in MPIEXECS:
            with suppress(ImportError, RuntimeError):  # find_ranks() reports these errors
                from mpi4py import MPI  # noqa: F401  initializes MPI, which the script may use
        rank, world_size, _ = find_ranks()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun may already host a store, on this port
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    os.environ.clear()
    os.environ.update(variables)
    if not has_store:  # the script may open the port itself
        port = 20000 + (port + 4999) % 10000
    is_server = rank == 0 and not has_store
    store = dist.TCPStore(host, port, world_size, is_server, timedelta(seconds=seconds), False)
    return launcher, rank, world_size, dist.PrefixStore("agree", store)


class Session:
    """Publishes a rank's status and collectives, and finally a report; rank 0 judges the reports.

    monitor() runs in a thread, because the script may wait forever.
    """

    def __init__(self, script, name, args, launcher, rank, world_size, store):
        from agreement.calls import Calls  # after find_ranks(): torch takes seconds to import
        from agreement.observer import Observer
        self.name, self.launcher = name, launcher
        self.rank, self.world_size, self.store = rank, world_size, store
        self.hang_seconds, self.first_step_seconds = args.timeout, args.first_step
        self.observer = Observer(script, args.steps, self.finish)
        self.calls = Calls(script, world_size, self.compare_call, self.refuse_spawn)
        self.exit_code = None
        self.start_time = time.monotonic()
        self.waiting_message_shown = False
        self.exit_code_known = threading.Event()

    def finish(self, end="steps", problem=""):
        """End the main thread: report, wait for rank 0's verdict, exit with its exit code."""
        self.report(end, problem)
        self.exit_code_known.wait()
        leave(self.store, self.rank, self.world_size, self.exit_code, finalize=True)

    def report(self, end, problem=""):
        """Publish the record and why: all "steps" taken, or the script "ended", "died", "waits"."""
        record = self.observer.report() | {
            "end": end, "problem": problem, "launcher": self.launcher,
            "calls": sorted(self.calls.names)}
        self.publish(f"report {self.rank}", record)

    def publish(self, name, value):
        self.store.set(name, json.dumps(value))

    def read(self, name):
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def compare_call(self, number, call, place):
        """Wait until all ranks are at collective `number`; do not return if their calls differ."""
        self.publish(f"call {number} of {self.rank}", [call, place])
        keys = [f"call {number} of {rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + 2 * self.hang_seconds  # after it the call goes ahead
        pause = 0.0002
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        calls = [self.read(key) for key in keys]
        if len({call for call, _ in calls}) > 1:
            self.publish("calls", calls)
            self.exit_code_known.wait()

    def refuse_spawn(self, place):
        self.finish("died", f"{self.name} starts its ranks itself, at {place}: let the launcher "
                            "start them, one process per rank; see find_ranks() in ranks.py")

    def monitor(self):
        """Publish this rank's status; rank 0 judges when all ranks have reported, died or hang."""
        last_states, last_change = None, time.monotonic()
        last_status = None
        while self.exit_code is None:
            time.sleep(0.05)
            with suppress(RuntimeError):  # the store is gone once rank 0 has left
                status = self.observer.status() | {"call": self.calls.current}
                status["waits"] = status["waits"] or bool(status["call"])
                if status != last_status:
                    self.publish(f"status {self.rank}", status)
                    last_status = status
                if self.read("stop") and not self.read(f"report {self.rank}"):
                    self.report("waits")
                if self.rank == 0:
                    states = [(self.read(f"report {rank}"), self.read(f"status {rank}"))
                              for rank in range(self.world_size)]
                    if states != last_states:
                        last_states, last_change = states, time.monotonic()
                    self.check_first_step()
                    self.judge(states, time.monotonic() - last_change)
                self.exit_code = self.read("exit code")
        self.exit_code_known.set()
        time.sleep(1)  # for the main thread to exit, unless it is blocked in the script
        leave(self.store, self.rank, self.world_size, self.exit_code)

    def check_first_step(self):
        """Print once what agree.py is waiting for; stop a script whose first step is late."""
        seconds = time.monotonic() - self.start_time
        if self.observer.record["steps"] or seconds < FIRST_MESSAGE_AFTER:
            return
        if not self.waiting_message_shown:
            self.waiting_message_shown = True
            spawn = ""
            if self.calls.spawn_location:
                spawn = f"; it has started a process at {self.calls.spawn_location}"
            say(f"agree.py: waiting for the first step of a PyTorch optimizer, up to "
                f"{self.first_step_seconds:.0f} s (--first-step); {self.observer.backwards} "
                f"backward passes so far{spawn}")
        if seconds > self.first_step_seconds:
            self.publish("stop", True)

    def judge(self, states, silent_seconds):
        """Print the verdict and publish the exit code, if there is enough to judge."""
        reports = [report for report, _ in states]
        complete = all(reports)
        calls = self.read("calls")
        problems = [report["problem"] for report in reports if report and report["end"] == "died"]
        limit = SLOW_CALL_FACTOR * self.hang_seconds
        if all(report or (status and status["waits"]) for report, status in states):
            limit = self.hang_seconds
        if problems:
            limit = min(2, limit)
        if not complete and not calls and silent_seconds < limit:
            return
        ends = {report["end"] for report in reports if report}
        if not complete and ends == {"steps"}:
            self.publish("stop", True)  # judge the steps that all ranks have taken
            return

        if calls:
            self.show(reports, *verdicts.judge_calls(calls))
        elif problems:
            self.refuse(problems[0])
        elif not complete:
            self.show(reports, *verdicts.judge_hang(states, silent_seconds))
        elif not verdicts.pair_steps(reports):
            verb = "has not reached" if "waits" in ends else "ended before"
            self.refuse(f"{self.name} {verb} the first step of a PyTorch optimizer on all ranks: "
                        f"nothing to compare ({verdicts.describe_without_steps(reports)})")
        else:
            self.show(reports, *verdicts.judge(reports))

    def refuse(self, problem):
        say(f"agree.py: {problem}")
        self.publish("exit code", EXIT_NOT_CHECKED)

    def show(self, reports, lines, findings):
        mistakes = findings.keys() - {"note"}
        verdicts.show(self.name, reports, lines, findings)
        self.publish("exit code", EXIT_WRONG if mistakes else EXIT_NOTHING_WRONG)


class Stopwatch:
    """Times the steps of one rank: replaces a Session if --results is given."""

    rank = 0

    def __init__(self, name, steps, results):
        from agreement.measure import StepTimer
        self.name, self.results = name, results
        self.timer = StepTimer(steps, self.finish)

    def finish(self, end="steps", problem=""):
        """Print the step time, append it to the file of --results, and exit."""
        record = self.timer.record()
        if not record:
            say(f"agree.py: {problem or 'too few steps of a PyTorch optimizer to time them'}")
            leave(None, 0, 1, EXIT_NOT_CHECKED)
        say(f"{self.name}: {record['steps']} steps on one rank, {record['device']}: "
            f"{record['step_seconds']:.4f} s per step (median), {record['batch_size']:,} samples, "
            f"{record['gradient_bytes']:,} bytes of gradients")
        with open(self.results, "a") as file:
            file.write(json.dumps({"chapter": self.name} | record) + "\n")
        leave(None, 0, 1, EXIT_NOTHING_WRONG, finalize=True)


def leave(store, rank, world_size, exit_code, finalize=False):
    """Exit with os._exit, because a pending collective would block a normal exit.

    Rank 0 hosts the store, so it exits last.
    """
    for child in multiprocessing.active_children():  # DataLoader workers
        child.terminate()
    multiprocessing.util._exit_function()  # a part of Python's exit that os._exit skips
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(Exception):  # rank 0 has exited, or there is no store for a single rank
        store.set(f"left {rank}", "")
        if rank == 0:
            store.wait([f"left {rank}" for rank in range(world_size)], timedelta(seconds=5))
    mpi = sys.modules.get("mpi4py.MPI")  # an import would initialize MPI
    if finalize and mpi and "horovod" not in sys.modules:  # Horovod's threads call MPI
        with suppress(Exception):
            if mpi.Is_initialized() and not mpi.Is_finalized():
                mpi.Finalize()  # or the launcher reports a crash
    exit_now(exit_code)


def run_script(session, script, module, arguments):
    """Run the script as `python script arguments` or `python -m module arguments` does."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "workshop"]:
        del sys.modules[name]  # the script may have a module of the same name
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else os.path.dirname(script)
    end = "ended"
    problem = ""
    os.environ.pop("MPI_LOCALRANKID", None)  # else ranks.run() ends the job before the verdict
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
        say("agree.py: interrupted; the steps so far:")
    except Exception as fault:
        traceback.print_exc()
        end = "died"
        problem = f"{type(fault).__name__}: {''.join(str(fault).splitlines()[:1])}"
    if problem:
        problem = f"rank {session.rank} ended with {problem}"
    if "expected, but not set" in problem:  # init_process_group() without torchrun's variables
        problem += "; start it with torchrun, or begin it with find_ranks() (YOUR_SCRIPT.md)"
    session.finish(end, problem)


def end_by_os_exit(session, script_pid, code):
    """Replace os._exit for the script and ranks.run(): print the verdict, then exit."""
    if os.getpid() != script_pid or threading.current_thread() is not threading.main_thread():
        exit_now(code)  # a forked worker or another thread
    if code:
        session.finish("died", f"rank {session.rank} ended with exit code {code}")
    session.finish("ended")


def fail(line):
    """Print a line on one rank only, and return the exit code."""
    if own_rank() == 0:
        say(f"agree.py: {line}")
    else:
        time.sleep(2)  # or the launcher ends rank 0 before it has printed
    return EXIT_NOT_CHECKED


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(fail(message))
    parser.add_argument("--steps", type=int,
                        help="optimizer steps to watch (5; with --results 30)")
    parser.add_argument("--timeout", type=float, default=30,
                        help="seconds without progress that count as a hang (30)")
    parser.add_argument("--first-step", type=float, default=600, metavar="SECONDS",
                        help="time limit for the first optimizer step (600)")
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
    except SystemExit as exit:  # raised by find_ranks()
        return fail(exit.code)
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
        stopwatch.timer.install()
        run_script(stopwatch, script, args.script if args.is_module else None, args.arguments)
    if world_size < 2:
        return fail("agree.py needs at least 2 ranks, but the world size is 1: start it with "
                    "mpiexec -n 2, srun or torchrun. A script that spawns its own ranks (mp.spawn) "
                    "must leave that to the launcher")
    session = Session(script, name, args, launcher, rank, world_size, store)
    session.observer.install()
    session.calls.install()
    threading.Thread(target=session.monitor, daemon=True).start()
    local_rank = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    arguments = local_rank + args.arguments
    run_script(session, script, args.script if args.is_module else None, arguments)
    return None


if __name__ == "__main__":
    sys.exit(main())

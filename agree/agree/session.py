"""Collects what all ranks report in a store, lets rank 0 judge it, and ends the ranks."""

import json
import multiprocessing.util
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

from . import verdicts
from .calls import Calls
from .observer import Observer

EXIT_NOTHING_WRONG, EXIT_WRONG, EXIT_NOT_CHECKED = 0, 1, 2
EXIT_CODES = {verdicts.NOTHING_WRONG: EXIT_NOTHING_WRONG, verdicts.NOT_CHECKED: EXIT_NOT_CHECKED}
exit_now = os._exit  # the script gets __main__.end_by_os_exit() instead
say = partial(print, file=sys.__stderr__, flush=True)  # even if the script redirects sys.stderr
FIRST_MESSAGE_AFTER = 15  # seconds until rank 0 says what it is waiting for
SLOW_CALL_FACTOR = 10  # multiplies --timeout while a rank may be downloading or compiling


class Session:
    """Publishes a rank's status and collectives, and finally a report; rank 0 judges the reports.

    monitor() runs in a thread, because the script may wait forever.
    """

    def __init__(self, script, name, args, rank, world_size, store):
        self.name = name
        self.rank, self.world_size, self.store = rank, world_size, store
        self.hang_seconds, self.first_step_seconds = args.timeout, args.first_step
        self.observer = Observer(script, args.steps, self.finish)
        self.calls = Calls(script, world_size, self.compare_call, self.refuse_spawn)
        self.exit_code = None
        self.start_time = time.monotonic()
        self.waiting_message_shown = False
        self.exit_code_known = threading.Event()

    def install(self):
        self.observer.install()
        self.calls.install()
        threading.Thread(target=self.monitor, daemon=True).start()

    def finish(self, end="steps", problem=""):
        """End the main thread: report, wait for rank 0's verdict, exit with its exit code."""
        self.report(end, problem)
        self.exit_code_known.wait()
        leave(self.store, self.rank, self.world_size, self.exit_code, finalize=True)

    def report(self, end, problem=""):
        """Publish the record and why: all "steps" taken, or the script "ended", "died", "waits"."""
        record = self.observer.report() | {
            "end": end, "problem": problem, "calls": sorted(self.calls.names)}
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
        """Print once what agree is waiting for; stop a script whose first step is late."""
        seconds = time.monotonic() - self.start_time
        if self.observer.record["steps"] or seconds < FIRST_MESSAGE_AFTER:
            return
        if not self.waiting_message_shown:
            self.waiting_message_shown = True
            say(f"agree: waiting for the first step of a PyTorch optimizer, up to "
                f"{self.first_step_seconds:.0f} s (--first-step); {self.observer.backwards} "
                f"backward passes so far")
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
        say(f"agree: {problem}")
        self.publish("exit code", EXIT_NOT_CHECKED)

    def show(self, reports, lines, findings):
        verdict = verdicts.show(self.name, reports, lines, findings)
        self.publish("exit code", EXIT_CODES.get(verdict, EXIT_WRONG))


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

"""Collects what all ranks report in a store, lets rank 0 judge it, and ends the ranks."""

import json
import math
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta

from . import verdicts
from .collectives import Collectives
from .hooks import say
from .observer import Observer
from .sequence import judge_calls, judge_hang

exit_now = os._exit  # the script gets __main__.end_by_os_exit() instead
LONGEST_WAIT = 20  # seconds for the next step, after --seconds
SLOW_CALL_FACTOR = 10  # multiplies --timeout while a rank may be downloading or compiling


class Session:
    """Publishes a rank's status and collectives, and finally a report; rank 0 judges the reports.

    monitor() runs in a thread, because the script may wait forever.
    """

    def __init__(self, script, name, args, rank, world_size):
        self.name = name
        self.rank, self.world_size = rank, world_size
        self.hang_seconds = args.timeout
        self.collectives = Collectives(
            script, world_size, 2 * self.hang_seconds, self.compare_call, self.refuse_spawn)
        self.observer = Observer(script, args.steps, self.before_step, self.collectives)
        self.seconds_to_go_on, self.deadline = args.seconds, None
        self.exit_code = None
        self.exit_code_known = threading.Event()
        self.hang = None  # lines and findings, once the ranks hang
        self.observer.install()
        self.collectives.install()

    def start(self, store):
        self.store = store
        threading.Thread(target=self.monitor, daemon=True).start()

    def finish(self, end="steps", problem=""):
        """End the main thread: report, wait for rank 0's verdict, exit with its exit code."""
        self.report(end, problem)
        self.exit_code_known.wait()
        self.leave(finalize=True)

    def before_step(self, number):
        """Go on with the script for a while after the measured steps; then finish on all ranks."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.seconds_to_go_on
        if self.rank == 0 and time.monotonic() > self.deadline and not self.read("last step"):
            self.publish("last step", number + 2)
        if not self.seconds_to_go_on or number >= (self.read("last step") or math.inf):
            self.finish()

    def report(self, end, problem=""):
        """Publish the record and why: all "steps" taken, or the script "ended", "died", "waits"."""
        record = self.observer.report(at_a_step=end in ("steps", "ended"))
        self.publish(f"report {self.rank}", record | {
            "end": end, "problem": problem, "calls": sorted(self.collectives.names)})

    def publish(self, name, value):
        self.store.set(name, json.dumps(value))

    def read(self, name):
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def compare_call(self, number, call, place, seconds):
        """Wait until all ranks are at collective `number`; do not return if their calls differ.

        Return False if they were not there within `seconds`.
        """
        alone = self.observer.steps_alone()
        self.publish(f"call {number} of {self.rank}", [call, place, alone])
        keys = [f"call {number} of {rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + seconds
        pause = 0.0002
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                self.observer.end_alone([alone])
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        calls = [self.read(key) for key in keys]
        if len({call for call, *_ in calls}) > 1:
            self.publish("calls", calls)
            self.exit_code_known.wait()
        self.observer.end_alone([alone for *_, alone in calls])
        if self.observer.is_measuring:  # another optimizer
            self.deadline = None
        return True

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
                status = self.observer.status()
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
                    if self.is_late() and not all_wait(states):
                        self.publish("stop", True)
                    try:
                        self.judge(states, time.monotonic() - last_change)
                    except Exception as problem:  # else the ranks would wait forever
                        traceback.print_exc()
                        self.refuse(f"could not judge: {type(problem).__name__}: {problem}")
                self.exit_code = self.read("exit code")
        self.exit_code_known.set()
        time.sleep(1)  # for the main thread to exit, unless it is blocked in the script
        self.leave()

    def is_late(self):
        """Return True if the next step is far, as in a long evaluation after the time to go on."""
        return (self.seconds_to_go_on and self.deadline
                and time.monotonic() > self.deadline + LONGEST_WAIT)

    def judge(self, states, silent_seconds):
        """Print the verdict and publish the exit code, if there is enough to judge."""
        reports = [report for report, _ in states]
        complete = all(reports)
        calls = self.read("calls")
        problems = [report["problem"] for report in reports if report and report["end"] == "died"]
        limit = SLOW_CALL_FACTOR * self.hang_seconds
        if all_wait(states):
            limit = self.hang_seconds
        if problems or self.hang:
            limit = min(2 if problems else 10, limit)
        if not complete and not calls and silent_seconds < limit:
            return
        ends = {report["end"] for report in reports if report}
        if not complete and ends == {"steps"}:
            self.publish("stop", True)  # judge the steps that all ranks have taken
            return
        if calls:
            lines, findings = [], judge_calls(calls)
        elif problems:
            self.refuse(problems[0])
            return
        elif not complete and not self.hang:
            self.hang = judge_hang(states, silent_seconds)
            if not (self.observer.is_on_gpu() and self.observer.is_measuring):
                self.publish("stop", True)  # their records may tell why
                return
            lines, findings = self.hang  # weights cannot be read behind a collective that hangs
        elif self.hang and (not complete or not verdicts.pair_steps(reports)):
            lines, findings = self.hang
        elif not verdicts.pair_steps(reports):
            backwards = max(report["backwards"] for report in reports)
            self.refuse(f"{self.name}: not all ranks have taken a step of a PyTorch optimizer: "
                        f"nothing to compare (backward passes: {backwards})")
            return
        else:
            lines, findings = verdicts.judge(reports, self.hang)
        self.publish("exit code", verdicts.show(self.name, reports, lines, findings))

    def refuse(self, problem):
        say(f"agree: {problem}")
        self.publish("exit code", 2)

    def leave(self, finalize=False):
        """Exit with os._exit, because a pending collective would block a normal exit.

        Rank 0 hosts the store, so it exits last.
        """
        for child in multiprocessing.active_children():  # DataLoader workers
            child.terminate()
        multiprocessing.util._exit_function()  # a part of Python's exit that os._exit skips
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(Exception):  # rank 0 has exited
            self.store.set(f"left {self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"left {rank}" for rank in range(self.world_size)],
                                timedelta(seconds=5))
        mpi = sys.modules.get("mpi4py.MPI")  # an import would initialize MPI
        if finalize and mpi and "horovod" not in sys.modules:  # Horovod's threads call MPI
            with suppress(Exception):
                if mpi.Is_initialized() and not mpi.Is_finalized():
                    mpi.Finalize()  # or the launcher reports a crash
        exit_now(self.exit_code)


def all_wait(states) -> bool:
    """Return True if each rank has reported or waits for others: they may hang."""
    return all(report or (status and status["call"]) for report, status in states)

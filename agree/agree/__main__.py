"""Do the ranks of your own script train one model?

Start it as you always do, with agree before it:

    mpiexec -n 4 agree my_train.py FLAGS                    # or srun, horovodrun
    torchrun --nproc-per-node 4 -m agree my_train.py FLAGS

The script, a PyTorch program, runs unmodified until one of its optimizers has taken five steps.
Then agree prints a table of what it saw on all ranks, and a verdict. The exit code is 0 if nothing
wrong was found, 1 if something was, 2 if agree could not check. See README.md.
"""

import argparse
import importlib.util
import os
import runpy
import sys
import threading
import time
import traceback
from functools import partial

from agree.launcher import connect, find_launcher, own_rank


def run_script(session, script, module, arguments):
    """Run the script, by its full path, as `python script arguments` or `python -m` does."""
    from agree.session import exit_now
    sys.argv = [script, *arguments]
    sys.path[0] = os.getcwd() if module else os.path.dirname(script)
    end = "ended"
    problem = ""
    os._exit = partial(end_by_os_exit, session, os.getpid(), exit_now)
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            end = "died"
            problem = f"exit code {exit.code}" if isinstance(exit.code, int) else str(exit.code)
    except Exception as fault:
        traceback.print_exc()
        end = "died"
        problem = f"{type(fault).__name__}: {''.join(str(fault).splitlines()[:1])}"
    if problem:
        problem = f"rank {session.rank} ended with {problem}"
    session.finish(end, problem)


def end_by_os_exit(session, script_pid, exit_now, code):
    """Replace os._exit for the script: print the verdict, then exit."""
    if os.getpid() != script_pid or threading.current_thread() is not threading.main_thread():
        exit_now(code)  # a forked worker or another thread
    if code:
        session.finish("died", f"rank {session.rank} ended with exit code {code}")
    session.finish("ended")


def fail(line):
    """Print a line on one rank only, and return exit code 2: not checked."""
    if own_rank() == 0:
        print(f"agree: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # or the launcher ends rank 0 before it has printed
    return 2


def parse_args():
    parser = argparse.ArgumentParser(
        prog="agree", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(fail(message))
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to watch (5)")
    parser.add_argument("--seconds", type=float, default=30,
                        help="how long to go on after these steps, for what comes later (30)")
    parser.add_argument("--timeout", type=float, default=30,
                        help="seconds without progress that count as a hang (30)")
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="run a module by its name, as python -m does")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args()
    if args.steps < 1 or not 0 < args.timeout < 1e6 or not args.seconds >= 0:
        parser.error("--steps and --timeout must be more than 0, --seconds at least 0")
    return args


def find_script(args):
    """Return the script's path, or None if there is none."""
    if args.is_module:
        sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(args.script)
        return spec.origin if spec else None
    return os.path.abspath(args.script) if os.path.isfile(args.script) else None


def make_session(args, script, name):
    """Return a Session of all ranks; exit with a message if the script cannot be checked here."""
    launcher, rank, world_size = find_launcher()
    if world_size < 2:
        raise SystemExit("needs at least 2 ranks, but the world size is 1: start it with mpiexec "
                         "-n 2 (PALS: --pmi=cray), srun or torchrun. A script that spawns its own "
                         "ranks (mp.spawn) must leave that to the launcher")
    from agree import internals  # imports torch, which takes seconds
    try:
        internals.check()
    except RuntimeError as problem:
        raise SystemExit(f"could not check: {problem}") from None
    from agree.session import Session  # imports what has been checked
    session = Session(script, name, args, rank, world_size)
    try:
        session.start(connect(launcher, rank, world_size, args.timeout))
    except RuntimeError as problem:
        raise SystemExit(f"the ranks do not reach each other: {problem}") from None
    return session


def main():
    args = parse_args()
    script = find_script(args)
    if not script:
        return fail(f"no {'module' if args.is_module else 'file'} {args.script}: name your script")
    try:
        session = make_session(
            args, script, args.script if args.is_module else os.path.basename(script))
    except SystemExit as exit:
        return fail(exit.code)
    run_script(session, script, args.script if args.is_module else None, args.arguments)
    return None


if __name__ == "__main__":
    sys.exit(main())

"""How a program ends: if one rank fails, it says why, and all ranks end.

    run(main)
"""

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

from workshop.ranks import find_launcher


def run(main) -> None:
    """Call main(); if it fails on a rank, print why on the rank that failed first, and end the job.

    sys.exit("message") prints the message and exits with code 2; an exception prints its traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from each rank
    if "torch" in sys.modules:  # DDP would import it later, and it would keep the process group
        import torch.distributed.nn  # noqa: F401
    code, message = 0, ""
    try:
        main()
    except SystemExit as end:
        code, message = end.code or 0, "" if end.code in (0, 2, None) else f"exit code {end.code}"
        if not isinstance(code, int):
            code, message = 2, str(end.code)
    except Exception as problem:
        code, message = 1, traceback.format_exc()
        dist = sys.modules.get("torch.distributed")
        if dist and isinstance(problem, dist.DistError) and not dist.is_initialized():
            code, message = 2, f"the ranks did not connect: {str(problem).splitlines()[0]}"
    if code:
        end_job(code, message)
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may abort if they outlive Python
        time.sleep(0.2)


def end_job(code, message):
    """Print the message on the rank that failed first; exit, so that the launcher ends the job."""
    launcher, rank, _ = find_launcher()
    prefix = f"rank {rank}: " if rank > 0 else ""
    line = f"{os.path.basename(sys.argv[0])}: {prefix}{message}" if message else ""
    # The store never answers if rank 0, which hosts it, is suspended: then rank 1 ends the job.
    threading.Timer(10 if rank < 2 else 15, leave, (code, line, launcher)).start()
    leave(code, line if message and is_first_failure(rank) else "", launcher)


def leave(code, line, launcher):
    if line:
        print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    time.sleep(2 if launcher else 0)  # rank 0's store has to answer the others first
    if "MPI_LOCALRANKID" in os.environ:  # mpiexec of MPICH may not notice that a rank has exited
        with suppress(KeyError, ValueError, OSError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
    os._exit(code)  # a pending collective would block a normal exit


def is_first_failure(rank):
    """Return True on the rank that failed first: others fail by the same mistake, or through it."""
    time.sleep(min(rank, 1))  # rank 0 reports what fails on all ranks
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        with suppress(RuntimeError):  # rank 0, which hosts the store, has ended
            return dist.distributed_c10d._get_default_store().add("failed ranks", 1) == 1
    time.sleep(5 if rank > 0 else 0)  # if rank 0 has failed, the launcher ends this rank meanwhile
    return True

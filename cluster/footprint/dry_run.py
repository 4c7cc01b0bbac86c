"""Lets a script run without effect: nothing is written, removed, downloaded or started."""

import builtins
import functools
import io
import multiprocessing.process
import os
import socket
import subprocess
import sys
from contextlib import suppress

import torch
import torch.distributed.checkpoint as checkpoint
from torch.utils import data

folders, remove_folder = [], os.rmdir


def run_without_effect():
    """Replace what writes files, opens connections or starts processes, for this process."""
    discard_files()
    torch.save = checkpoint.save = checkpoint.async_save = lambda *_, **__: None
    socket.socket.connect = refuse_connection
    multiprocessing.process.BaseProcess.start = refuse_process
    subprocess.Popen.__init__ = refuse_program
    os.system = lambda _: 127 << 8  # as if the shell had not found the program
    read_in_this_process()


def discard_files():
    """Let files that are opened for writing be /dev/null; keep what exists."""
    open_file, make_folder = builtins.open, os.mkdir

    def open_harmlessly(file, mode="r", *args, **kwargs):
        if not isinstance(file, int) and set("wax") & set(mode):
            file, mode = os.devnull, mode.replace("x", "w")
        return open_file(file, mode, *args, **kwargs)

    def make_temporary_folder(path, *args, **kwargs):
        make_folder(path, *args, **kwargs)
        folders.append(os.path.abspath(path))

    builtins.open = io.open = open_harmlessly
    os.mkdir = make_temporary_folder
    for name in "remove", "unlink", "rename", "replace", "rmdir", "truncate", "symlink", "link":
        setattr(os, name, lambda *_, **__: None)


def remove_folders():
    """Remove the folders that the script has made; they are empty."""
    while folders:
        with suppress(OSError):
            remove_folder(folders.pop())


def refuse_connection(_, address):
    raise OSError(f"footprint opens no connection (to {address}): stage the files before")


def refuse_program(_, command, *args, **kwargs):
    launchers = {"torchrun", "mpiexec", "mpirun", "srun", "accelerate", "deepspeed"}
    words = command.split() if isinstance(command, str) else map(str, command)
    if launchers & {word.rpartition("/")[2] for word in words}:
        refuse_process(None)
    raise FileNotFoundError(f"footprint starts no programs ({command})")


def refuse_process(_):
    sys.exit("the script starts processes of its own: give footprint what one rank runs, with "
             "the rank from RANK and WORLD_SIZE, as torchrun sets them")


def read_in_this_process():
    """Let DataLoaders read without workers, which would need seconds and memory to start."""
    initialize = data.DataLoader.__init__

    @functools.wraps(initialize)
    def without_workers(loader, *args, **kwargs):
        for name in ("num_workers", "multiprocessing_context", "persistent_workers",
                     "prefetch_factor", "worker_init_fn", "timeout"):
            kwargs.pop(name, None)
        initialize(loader, *args[:5], **kwargs)

    data.DataLoader.__init__ = without_workers

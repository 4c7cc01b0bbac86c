"""Lets a script run without effect: nothing is written, removed, downloaded or started."""

import builtins
import functools
import inspect
import io
import multiprocessing.process
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress

import torch
import torch.distributed.checkpoint as checkpoint
from torch.utils import data

folders, remove_folder = [], os.rmdir


def run_without_effect():
    """Replace what writes files, opens connections or starts processes, for this process."""
    discard_files()
    torch.save = checkpoint.save = checkpoint.async_save = lambda *_, **__: None
    socket.socket.connect = socket.getaddrinfo = refuse_connection
    multiprocessing.process.BaseProcess.start = refuse_process
    subprocess.Popen.__init__ = refuse_program
    os.system = lambda _: 127 << 8  # as if there were no such program
    read_in_this_process()


def discard_files():
    """Let files that are opened for writing be temporary ones; keep what exists."""
    open_file, make_folder, remove_file = builtins.open, os.mkdir, os.remove
    own_files = []  # not empty while a temporary file is made
    sys.dont_write_bytecode = True

    def open_harmlessly(file, mode="r", *args, **kwargs):
        if isinstance(file, int) or file == os.devnull or not set("wax+") & set(mode):
            return open_file(file, mode, *args, **kwargs)
        if "r" in mode:
            raise PermissionError(f"footprint changes no files ({file})")
        own_files.append(True)
        number, name = tempfile.mkstemp()
        remove_file(name)
        own_files.clear()
        return open_file(number, mode.replace("x", "w"), *args, **kwargs)

    def refuse_writing(event, arguments):
        """An audit hook: os.open() and what has kept the old open()."""
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            file = os.fsdecode(arguments[0])
            harmless = own_files or file.startswith(("/dev/", "/proc/")) or file.endswith(".lock")
            if arguments[2] & writes and not harmless:
                raise PermissionError(f"footprint writes no files ({file})")

    def make_temporary_folder(path, *args, **kwargs):
        make_folder(path, *args, **kwargs)
        folders.append(os.path.abspath(path))

    builtins.open = io.open = open_harmlessly
    os.mkdir = make_temporary_folder
    for name in "remove", "unlink", "rename", "replace", "rmdir", "truncate", "symlink", "link":
        setattr(os, name, lambda *_, **__: None)
    sys.addaudithook(refuse_writing)


def remove_folders():
    """Remove the folders that the script has made; they are empty."""
    while folders:
        with suppress(OSError):
            remove_folder(folders.pop())


def refuse_connection(*address, **_):
    raise OSError(f"footprint opens no connection ({address}): stage the files before")


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
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def without_workers(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        for name in ("num_workers", "multiprocessing_context", "persistent_workers",
                     "prefetch_factor", "worker_init_fn", "timeout"):
            arguments.pop(name, None)
        initialize(arguments.pop("self"), **arguments)

    data.DataLoader.__init__ = without_workers

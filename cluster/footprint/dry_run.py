"""Lets a script run without effect: Python writes, removes, downloads and starts nothing."""

import builtins
import io
import multiprocessing.process
import os
import sys

import torch
import torch.distributed.checkpoint as checkpoint
from torch.utils import data


def run_without_effect():
    """Replace what writes files, opens connections or starts processes, for this process."""
    sys.dont_write_bytecode = True
    open_file, iterate = builtins.open, data.DataLoader.__iter__

    def open_harmlessly(file, mode="r", *args, **kwargs):
        if not isinstance(file, int) and set("wax") & set(mode):
            kwargs.pop("opener", None)
            file, mode = os.devnull, mode.replace("x", "w")
        return open_file(file, mode, *args, **kwargs)

    def read_in_this_process(loader):  # workers would need seconds and memory to start
        loader.num_workers = loader.timeout = 0
        return iterate(loader)

    def do_nothing(*_, **__):
        pass

    builtins.open = io.open = open_harmlessly
    torch.save = checkpoint.save = checkpoint.async_save = do_nothing
    for name in ("mkdir", "remove", "unlink", "rename", "replace", "rmdir", "truncate", "symlink",
                 "link"):
        setattr(os, name, do_nothing)
    os.system = lambda _: 127 << 8  # as if there were no such program
    multiprocessing.process.BaseProcess.start = refuse_processes
    data.DataLoader.__iter__ = read_in_this_process
    sys.addaudithook(refuse_effects)


def refuse_effects(event, arguments):
    """An audit hook, for what has kept the old functions, and for connections and programs."""
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        file = os.fsdecode(arguments[0])
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and not file.startswith(("/dev/", "/proc/")) and not file.endswith(".lock"):
            raise PermissionError(f"footprint writes no files ({file})")
    elif event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"footprint opens no connection ({arguments}): stage the files before")
    elif event == "subprocess.Popen":
        raise FileNotFoundError(f"footprint starts no programs ({arguments[0]})")


def refuse_processes(*_):
    sys.exit("the script starts processes of its own: give footprint what one rank runs, with "
             "the rank from RANK and WORLD_SIZE, as torchrun sets them")

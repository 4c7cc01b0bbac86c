"""The doctor, where rank 1 has another all-reduce: `python broken_doctor.py hangs|wrong DOCTOR FLAG...`."""

import os
import runpy
import sys
import time

import torch.distributed as dist


def hangs(_):
    time.sleep(50)


def wrong(tensor, original=dist.all_reduce):
    original(tensor)
    tensor[-1].add_(1)


if os.environ["PMI_RANK"] == "1":
    dist.all_reduce = {"hangs": hangs, "wrong": wrong}[sys.argv[1]]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")

"""Run a main.py as on a node with GPUs: `python gpus.py COUNT same|without MAIN FLAG...`.

All ranks see the same COUNT GPUs. If there are several, each rank prints which one it selects, and
exits. without: Horovod has no GPU support. (fake_cuda.py is a rank that sees its own GPU only.)
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

_, count, mode, *sys.argv = sys.argv
count, source = int(count), Path(sys.argv[0]).read_text()
rank = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", os.environ.get("PMI_RANK")))


def select_gpu(device):
    """Select a GPU; if every rank has its own, exit, because training would need a real one."""
    if device.index >= count:
        raise RuntimeError(f"invalid device ordinal {device.index} of {count}")
    if count > 1:
        os.write(1, f"rank {rank} takes GPU {device.index} of {count}\n".encode())
        os._exit(3)


def fake_gpus():
    """Make PyTorch report `count` GPUs, and use gloo, which needs none."""
    import torch
    import torch.distributed as dist

    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = lambda: count
    torch.accelerator.set_device_index = select_gpu
    stream = SimpleNamespace(is_capturing=lambda: False)  # Adam calls it
    torch.accelerator.current_stream = lambda: stream
    torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(uuid=str(gpu.index))
    real_init = dist.init_process_group
    dist.init_process_group = lambda backend, **options: real_init("gloo", **options)


if "import horovod" in source and mode != "without":
    import horovod.torch

    horovod.torch.cuda_built = lambda: True
fake_gpus()
runpy.run_path(sys.argv[0], run_name="__main__")

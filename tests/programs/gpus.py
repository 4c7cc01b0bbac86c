"""Run a main.py as on a node with GPUs: `python gpus.py COUNT same|own|without MAIN FLAG...`.

Each rank sees COUNT GPUs, the same or its own, prints the GPU it selects, and exits.
`without`: Horovod is built without GPU support, as it is here.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

_, count, identity, *sys.argv = sys.argv
count, text = int(count), Path(sys.argv[0]).read_text()
rank = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", os.environ.get("PMI_RANK")))


def take(index):
    os.write(1, f"rank {rank} takes GPU {index} of {count}\n".encode())
    os._exit(3)


def pretend_to_torch():
    import torch
    import torch.distributed as dist

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch.accelerator.device_count = lambda: count
    torch.accelerator.set_device_index = take
    stream = SimpleNamespace(is_capturing=lambda: False)  # Adam asks
    torch.accelerator.current_stream = lambda: stream
    owner = rank if identity == "own" else "node"
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=f"{owner} {index}")
    meet = dist.init_process_group
    dist.init_process_group = lambda backend, **options: meet("gloo", **options)


if "import horovod" in text and identity != "without":
    import horovod.torch

    horovod.torch.cuda_built = lambda: True
pretend_to_torch()
runpy.run_path(sys.argv[0], run_name="__main__")

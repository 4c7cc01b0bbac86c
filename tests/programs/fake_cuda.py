"""Run a main.py on a fake GPU: `python fake_cuda.py MAIN FLAG...`.

Tensors are PyTorch's FakeTensors, with shapes and devices but no numbers, and collectives send
nothing. This detects first weights that a GPU draws, operations that mix CPU and GPU tensors,
waits for the GPU within a step (.item(), a blocking copy, indices from the CPU), and invalid
device ordinals. As on Polaris, each rank sees one GPU; the program runs as a rank with local rank
3. Waits are printed as errors.
"""

import gc
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchvision  # noqa: F401 - registers operators, which fails under the fake mode
from torch._subclasses import fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
real_as_tensor, real_init = torch.as_tensor, dist.init_process_group
in_step, waits, draws = False, set(), set()


def on_gpu(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


class WaitRecorder(TorchDispatchMode):
    """Record the operations for which the CPU waits for the GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation._schema.name
        inputs = [leaf for leaf in torch.utils._pytree.tree_leaves(args)
                  if isinstance(leaf, torch.Tensor)]
        if name == "aten::_local_scalar_dense":  # item()
            if on_gpu(inputs[0]):
                record_wait(name)
            return 1
        result = operation(*args, **kwargs)
        if not on_gpu(result):
            return result
        if name in ("aten::normal_", "aten::uniform_"):
            draws.add(f"a first weight is drawn on the GPU: {name}")
        if name in ("aten::_to_copy", "aten::copy_") and not on_gpu(inputs[-1]):
            pinned = getattr(inputs[-1], "pinned", False)
            if not (pinned and kwargs.get("non_blocking")):
                record_wait(name)
        elif name == "aten::index" and not all(map(on_gpu, inputs)):
            record_wait(name)
        return result


def record_wait(operation):
    if in_step:
        frames = [frame for frame in traceback.extract_stack() if frame.filename == sys.argv[0]]
        waits.add(f"line {frames[-1].lineno} waits for the GPU: {operation}")


def set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of 1")


class FakeStream:
    def __init__(self, *args, **kwargs):
        self.device, self.device_index, self.cuda_stream = GPU, 0, 0
        self.wait_stream, self.is_capturing = lambda _: None, lambda: False

    def record_event(self, event=None):
        return event or SimpleNamespace(elapsed_time=lambda _: 1.0)


def backward(loss, *_, **__):
    """Give all parameters gradients, without autograd's engine, which needs a GPU."""
    assert loss.device == GPU, "the loss is on the CPU"
    for value in gc.get_objects():
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            value.grad = torch.empty_like(value)


def gather_object(values, value):
    """A stand-in for all_gather_object: rank 1 has another GPU, and fails only if rank 0 does."""
    values[:] = [value, f"{value} of rank 1" if value else value]


def move_module(module, *args, **_):
    """A stand-in for Module.to(), which swaps tensors; FakeTensors cannot be swapped."""
    for submodule in module.modules():
        for name, tensor in submodule._parameters.items():
            moved = tensor if tensor is None else torch.nn.Parameter(tensor.detach().to(*args))
            submodule._parameters[name] = moved
    return module


def pin_memory(tensor, *_):
    tensor.pinned = True
    return tensor


def tolist(tensor):
    if on_gpu(tensor):
        record_wait("tolist")
    return [0.5] * tensor.numel()


def fake_gpu():
    """Make PyTorch report one GPU, and replace what needs a real one."""
    for module in torch.cuda, torch.accelerator:
        module.is_available, module.device_count = lambda: True, lambda: 1
        module.current_stream = FakeStream
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.set_device = torch.accelerator.set_device_index = set_device
    torch.cuda._lazy_init = fake_tensor.init_gpu_context = lambda *_: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)
    torch.cuda.Stream, torch.cuda.Event = FakeStream, lambda **_: None
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="0", total_memory=2**34)
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.Tensor.tolist, torch.Tensor.pin_memory = tolist, pin_memory
    torch.Tensor.backward, torch.nn.Module.to = backward, move_module
    torch.nn.parallel.DistributedDataParallel = lambda module, **_: module
    dist.all_gather_object = gather_object
    dist.init_process_group = lambda *_, **__: real_init(
        "fake", rank=0, world_size=2, store=FakeStore())
    torch.as_tensor = lambda array: mode.from_tensor(real_as_tensor(array))  # of a batch


del sys.argv[0]
mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
fake_gpu()
if Path(sys.argv[0]).parent.name != "01_single_node":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
from workshop import report  # noqa: E402 - after PyTorch has been patched

real_end_step = report.Report.end_step


def end_step(self, number):
    """Record waits after the first step and before the end of the last."""
    global in_step
    real_end_step(self, number)
    in_step = number < self.last_step


report.Report.end_step = end_step
with mode, WaitRecorder():
    runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit("\n".join(sorted(waits | draws)) or 0)

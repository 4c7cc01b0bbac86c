"""Run programs one after another on a fake GPU: `python fake_cuda.py FLAGS PROGRAM...`.

Tensors are PyTorch's FakeTensors, with shapes and devices but no numbers, and collectives send
nothing. This detects operations that mix CPU and GPU tensors, synchronisation within a step
(.item(), a blocking copy, indices from the CPU), and invalid device ordinals. As on Polaris, each
rank sees one GPU. The programs run as the rank with local rank 3. For each program a line of JSON
is printed: [exit message, {line at which a step waits for the GPU: operation}].
"""

import gc
import json
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
in_step, waits = False, {}  # waits: {line of the program: operation}


class WaitRecorder(TorchDispatchMode):
    """Record the operations for which the CPU waits for the GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation._schema.name
        leaves = torch.utils._pytree.tree_leaves(args)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name == "aten::_local_scalar_dense":  # item()
            if on_gpu(inputs[0]):
                record_wait(name)
            return 0
        result = operation(*args, **kwargs)
        if not on_gpu(result):
            return result
        if name in ("aten::_to_copy", "aten::copy_") and not on_gpu(inputs[-1]):
            pinned = getattr(inputs[-1], "pinned", False)
            if not (pinned and kwargs.get("non_blocking")):
                record_wait(name)
        elif name == "aten::index" and not all(map(on_gpu, inputs)):
            record_wait(name)
        return result


def on_gpu(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def record_wait(operation):
    if not in_step:
        return
    frames = [frame for frame in traceback.extract_stack()
              if frame.filename.startswith(str(folder))]
    waits[f"{frames[-1].lineno}: {frames[-1].line}"] = operation


def set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of 1")


class FakeStream:
    def __init__(self, *args, **kwargs):
        self.device, self.device_index, self.cuda_stream = GPU, 0, 0

    def record_event(self, event=None):
        return event or SimpleNamespace(elapsed_time=lambda _: 1.0)


class FakeDDP(torch.nn.Module):
    """A stand-in for DistributedDataParallel, whose C++ reducer needs a GPU."""

    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def backward(loss, *_, **__):
    """Give all parameters gradients, without autograd's engine, which needs a GPU."""
    assert loss.device == GPU, "the loss is on the CPU"
    for value in gc.get_objects():
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            value.grad = torch.empty_like(value)


def gather_object(values, value):
    """A stand-in for all_gather_object: rank 1 has another GPU, and fails only if rank 0 does."""
    values[:] = [value, f"{value} of rank 1" if value else value]


def move_module(module, *args, memory_format=None):
    """A stand-in for Module.to(), which swaps tensors; FakeTensors cannot be swapped."""
    for submodule in module.modules():
        for name, tensor in submodule._parameters.items():
            if tensor is not None:
                layout = memory_format if tensor.ndim == 4 else None
                tensor = tensor.detach().to(*args, memory_format=layout)
                submodule._parameters[name] = torch.nn.Parameter(tensor)
        for name, tensor in submodule._buffers.items():
            device_and_dtype = args[:2] if tensor.is_floating_point() else args[:1]
            submodule._buffers[name] = tensor.to(*device_and_dtype)
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
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.set_device = torch.accelerator.set_device_index = set_device
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.cuda._lazy_init = fake_tensor.init_gpu_context = lambda *_: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)
    torch.cuda.Stream, torch.cuda.Event = FakeStream, lambda **_: None
    torch.cuda.current_stream = torch.cuda.default_stream = FakeStream
    torch.accelerator.current_stream = FakeStream
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="0", total_memory=2**34)
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.max_memory_allocated = torch.cuda.memory_allocated = lambda *_: 0
    torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.Tensor.tolist, torch.Tensor.pin_memory = tolist, pin_memory
    torch.Tensor.backward = backward
    torch.nn.Module.to = move_module
    torch.nn.parallel.DistributedDataParallel = FakeDDP
    dist.all_gather_object = gather_object
    real_init, real_as_tensor = dist.init_process_group, torch.as_tensor
    dist.init_process_group = lambda *_, **__: real_init(
        "fake", rank=0, world_size=2, store=FakeStore())
    torch.as_tensor = lambda array: mode.from_tensor(real_as_tensor(array))  # of a batch


def watch_steps(report):
    """Record waits after the first step and before the end of the last."""
    real_step = report.Report.end_step

    def end_step(self, number):
        global in_step
        real_step(self, number)
        in_step = number < self.last_step

    report.Report.end_step = end_step


mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
flags = [argument for argument in sys.argv[1:] if not argument.endswith(".py")]
programs = [Path(argument).resolve() for argument in sys.argv[1:] if argument.endswith(".py")]
fake_gpu()
for program in programs:
    folder, waits, message = program.parent, {}, None
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    if "find_ranks" not in program.read_text():  # chapter 1
        for name in "RANK", "WORLD_SIZE", "LOCAL_RANK":
            del os.environ[name]
    for name in [name for name in sys.modules if name.partition(".")[0] == "workshop"]:
        del sys.modules[name]  # of the last program
    sys.argv, sys.path[0] = [program.name, *flags], str(folder)
    from workshop import ranks, report
    ranks.run = lambda main: main()  # the real one catches exceptions
    watch_steps(report)
    with mode, WaitRecorder():
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as system_exit:
            message = system_exit.code
        except Exception:
            message = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps([message, waits]), flush=True)

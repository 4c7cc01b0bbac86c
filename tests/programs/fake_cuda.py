"""Run programs one after another on a fake GPU: `python fake_cuda.py FLAGS PROGRAM...`.

Tensors are PyTorch's fake ones, with shapes and devices but no numbers, and collectives send
nothing. This detects operations that mix CPU and GPU tensors, synchronisation within a step
(.item(), a blocking copy, indices from the CPU), and invalid device ordinals. As on Polaris each
rank sees one GPU, and this one has local rank 3.
Prints for each program a JSON line: [its exit message, the places where a step waits].
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
in_step, waits = False, {}


class Waits(TorchDispatchMode):
    """Record the operations for which the CPU waits for the GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation._schema.name
        leaves = torch.utils._pytree.tree_leaves(args)
        inputs = [part for part in leaves if isinstance(part, torch.Tensor)]
        copied = name in ("aten::_to_copy", "aten::copy_") and inputs[-1].device.type == "cpu"
        number = name == "aten::_local_scalar_dense"
        result = 0 if number else operation(*args, **kwargs)
        on_gpu = isinstance(result, torch.Tensor) and result.device.type == "cuda"
        flows = kwargs.get("non_blocking") and getattr(inputs[-1], "pinned", False)
        blocking = copied and on_gpu and not flows
        from_cpu = any(part.device.type == "cpu" for part in inputs[1:])
        indices = name == "aten::index" and on_gpu and from_cpu
        if blocking or indices or (number and inputs[0].device.type == "cuda"):
            note(name)
        return result


def note(name):
    if not in_step:
        return
    frame = [frame for frame in traceback.extract_stack()
             if frame.filename.startswith(str(folder))][-1]
    waits[f"{frame.lineno}: {frame.line}"] = name


def set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {index} of 1")


class Stream:
    def __init__(self, *args, **kwargs):
        self.device, self.device_index, self.cuda_stream = GPU, 0, 0

    def record_event(self, event=None):
        return event or SimpleNamespace(elapsed_time=lambda _: 1.0)

    def wait_stream(self, _): pass
    wait_event = synchronize = wait_stream
    __enter__, __exit__ = (lambda self: self), (lambda *_: None)


class Wrapped(torch.nn.Module):
    """In place of DistributedDataParallel, whose reducer is C++ that wants a GPU."""

    def __init__(self, module, **_):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def backward(loss, *_, **__):
    """In place of autograd's engine, which wants a GPU: gradients appear."""
    assert loss.device == GPU, "the loss is on the CPU"
    for parameter in gc.get_objects():
        if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def gather(values, value):
    """In place of all_gather_object: the other rank has another GPU, and no message either."""
    values[:] = [value, value and f"{value} of rank 1"]


def move(module, *args, memory_format=None):
    """Module.to(), whose own way swaps tensors, which fake ones do not allow."""
    for part in module.modules():
        for name, tensor in part._parameters.items():
            if tensor is not None:
                layout = memory_format if tensor.ndim == 4 else None
                tensor = tensor.detach().to(*args, memory_format=layout)
                part._parameters[name] = torch.nn.Parameter(tensor)
        for name, tensor in part._buffers.items():
            part._buffers[name] = tensor.to(*args[:1 if not tensor.is_floating_point() else 2])
    return module


def pin_memory(tensor, *_):
    tensor.pinned = True
    return tensor


def tolist(tensor):
    if tensor.device.type == "cuda":
        note("tolist")
    return [0.5] * tensor.numel()


def pretend():
    """Make PyTorch believe in one GPU."""
    for module in torch.cuda, torch.accelerator:
        module.is_available, module.device_count = lambda: True, lambda: 1
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.set_device = torch.accelerator.set_device_index = set_device
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.cuda._lazy_init = fake_tensor.init_gpu_context = lambda *_: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)
    torch.cuda.Stream, torch.cuda.Event = Stream, lambda **_: None
    torch.cuda.current_stream = torch.cuda.default_stream = Stream
    torch.accelerator.current_stream = Stream
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="0", total_memory=2**34)
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.max_memory_allocated = torch.cuda.memory_allocated = lambda *_: 0
    torch.cuda.synchronize = torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.Tensor.tolist, torch.Tensor.pin_memory = tolist, pin_memory
    torch.Tensor.backward = backward
    torch.nn.Module.to = move
    torch.nn.parallel.DistributedDataParallel = Wrapped
    dist.all_gather_object = gather
    meet = dist.init_process_group
    dist.init_process_group = lambda *_, **__: meet("fake", rank=0, world_size=2, store=FakeStore())
    as_tensor = torch.as_tensor
    torch.as_tensor = lambda array: mode.from_tensor(as_tensor(array))  # of a data loader's batch


def watch_steps(report):
    """Note what waits after the first step and before the last."""
    step = report.Report.end_step

    def step_ends(self, number):
        global in_step
        step(self, number)
        in_step = number < self.last_step

    report.Report.end_step = step_ends


mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
flags = [word for word in sys.argv[1:] if not word.endswith(".py")]
programs = [Path(word).resolve() for word in sys.argv[1:] if word.endswith(".py")]
pretend()
for program in programs:
    folder, waits, code = program.parent, {}, None
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    if "find_ranks" not in program.read_text():  # chapter 1
        for name in "RANK", "WORLD_SIZE", "LOCAL_RANK":
            del os.environ[name]
    for name in {path.stem for path in folder.glob("*.py")} & sys.modules.keys():
        del sys.modules[name]
    sys.argv, sys.path[0] = [program.name, *flags], str(folder)
    import ranks
    import report
    ranks.run = lambda main: main()
    watch_steps(report)
    with mode, Waits():
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            code = end.code
        except Exception:
            code = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps([code, waits]), flush=True)

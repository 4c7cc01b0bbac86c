"""Run a main.py unchanged, and write down what it does: `python observed.py FOLDER MAIN FLAG...`.

Into FOLDER go a copy of the checkpoint after each epoch (parameters.1, .2, ...), and a JSON line for each pass over
data (batches.RANK: the indices of all its batches; TensorFlow's chapters: a line a batch), each optimizer step
(rates.RANK: the learning rate), each input of PyTorch's cnn (inputs.RANK: mean, standard deviation, dtype) and each
choice of a GPU (gpus.RANK) or of how many threads TensorFlow takes (threads.RANK). FAKE_GPUS=N,same|own lets the
framework believe in N GPUs, the same or others for each rank, and Horovod in having been built for them unless
FAKE_GPUS=N,same,without. Taking one that is not there fails, as it does on a GPU.

TWIN=smooth trains the twin of smooth.py, TWIN=reversed,N that twin with the N images of each batch in the opposite
order, TWIN=order,N the chapter's own network so.
"""

import importlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import smooth

if sys.argv[1].startswith("--local_rank="):  # deepspeed's launcher adds it in front
    del sys.argv[1]
folder, main = Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(main).parent)
twin, _, batch_size = os.environ.get("TWIN", "").partition(",")
fake_gpus, identity, *without = os.environ.get("FAKE_GPUS", "0,").split(",")


def rank():
    return next((os.environ[name] for name in ("RANK", "HOROVOD_RANK", "PMI_RANK") if name in os.environ), "0")


def note(name, value):
    with open(folder / f"{name}.{rank()}", "a") as file:
        file.write(json.dumps(value) + "\n")


def observe_replace(source, target, original=os.replace):
    original(source, target)
    place = folder / f"parameters.{len(list(folder.glob('parameters.*'))) + 1}"
    if Path(target).name == "latest":  # the checkpoint is a folder
        shutil.copytree(Path(target).parent, place)
    else:
        shutil.copy(target, place)


def fake_horovod(framework):
    """Horovod as if it had been built for GPUs."""
    if "import horovod" in Path(main).read_text() and not without:
        hvd = importlib.import_module(f"horovod.{framework}")
        hvd.cuda_built = lambda: True


def take_gpu(index):
    if index >= int(fake_gpus):
        raise RuntimeError(f"invalid device ordinal: {index} of {fake_gpus}")
    note("gpus", index)


def observe_torch():
    import torch
    import torch.distributed as dist
    from torch.utils.data import BatchSampler

    def observe_batches(sampler, original=BatchSampler.__iter__):
        batches = list(original(sampler))
        note("batches", batches)
        yield from [batch[::-1] for batch in batches] if batch_size else batches

    def observe_rate(optimizer, *args, original=torch.optim.SGD.step, **kwargs):
        if optimizer.param_groups[0]["params"][0].grad.any():  # Horovod makes momentum by a step without a gradient
            note("rates", optimizer.param_groups[0]["lr"])
        return original(optimizer, *args, **kwargs)

    def observe_input(model, images, original=torch.nn.Sequential.forward):
        if images.shape[1] == 1:  # the cnn itself, not a part of a ResNet
            note("inputs", [images.mean().item(), images.std().item(), str(images.dtype)])
        return original(model, images)

    if twin in ("smooth", "reversed"):
        smooth.torch_twin()
    BatchSampler.__iter__ = observe_batches
    torch.nn.Sequential.forward = observe_input
    torch.optim.SGD.step = observe_rate
    if int(fake_gpus):
        fake_horovod("torch")
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: int(fake_gpus)
        torch.cuda.is_bf16_supported = lambda *_: False
        torch.accelerator.device_count = lambda: int(fake_gpus)
        torch.cuda.set_device = torch.accelerator.set_device_index = take_gpu
        torch.cuda.current_device = lambda: 0
        torch.accelerator.current_stream = lambda: SimpleNamespace(is_capturing=lambda: False)  # Adam asks
        torch.cuda.get_device_properties = lambda index: SimpleNamespace(
            uuid=f"{rank() if identity == 'own' else 'node'} {index}")
        meet = dist.init_process_group
        dist.init_process_group = lambda backend, **options: meet("gloo", **options)


def observe_tensorflow():
    import keras
    import numpy
    import tensorflow

    class Labels(numpy.ndarray):
        def __getitem__(self, index):
            if self.ndim == 1 and getattr(index, "dtype", None) == numpy.int64:
                note("batches", index.tolist())
            return super().__getitem__(index)

    def loadtxt(*args, original=numpy.loadtxt, **kwargs):
        return original(*args, **kwargs).view(Labels)

    def observe_threads(original):
        def setter(threads):
            note("threads", threads)
            return original(threads)
        return setter

    def set_rate(optimizer, value, original=keras.optimizers.SGD.learning_rate):
        note("rates", value)
        original.fset(optimizer, value)

    def reverse(order, size):
        """An order of images with those of each batch the other way round."""
        whole = len(order) // size * size
        return numpy.append(order[:whole].reshape(-1, size)[:, ::-1], order[whole:])

    def shuffling(seed, original=numpy.random.default_rng):
        return SimpleNamespace(permutation=lambda n: reverse(original(seed).permutation(n), int(batch_size)))

    def take(gpus, _):
        for gpu in gpus:
            take_gpu(gpu.index)

    if twin in ("smooth", "reversed"):
        smooth.keras_twin()
    if batch_size:
        numpy.random.default_rng = shuffling
    numpy.loadtxt = loadtxt
    threading = tensorflow.config.threading
    for name in "set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads":
        setattr(threading, name, observe_threads(getattr(threading, name)))
    keras.optimizers.SGD.learning_rate = keras.optimizers.SGD.learning_rate.setter(set_rate)
    if int(fake_gpus):
        fake_horovod("tensorflow")
        tensorflow.config.list_physical_devices = lambda _: [SimpleNamespace(name=f"GPU:{index}", index=index)
                                                             for index in range(int(fake_gpus))]
        tensorflow.config.set_visible_devices = take
        tensorflow.config.experimental.set_memory_growth = lambda *_: None


os.replace = observe_replace
(observe_tensorflow if "import tensorflow" in Path(main).read_text() else observe_torch)()
if "svhn" in sys.argv:  # the test's own small files instead of the real ones, whose checksums torchvision knows
    if "tensorflow" in sys.modules:
        sys.modules["triton"] = None  # beside TensorFlow it crashes: see workshop.py
    from torchvision.datasets import SVHN

    SVHN.split_list = {split: [url, name, None] for split, (url, name, _) in SVHN.split_list.items()}
runpy.run_path(main, run_name="__main__")

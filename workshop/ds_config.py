"""Read ds_config.json; a mistake in it ends the program with one line, not a traceback."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from workshop.devices import short_reason

KEYS = ("gradient_accumulation_steps", "gradient_clipping", "bf16", "fp16", "checkpoint",
        "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")


def read_config(path: Path, precision: str, zero: dict | None = None) -> tuple[dict, str]:
    """Return the configuration with ZeRO's options, and the precision that training uses.

    Exits with one line if a key or value would have no effect, or contradicts the flags. DeepSpeed
    ignores keys that it does not know, and "auto"; it checks other values itself.
    """
    try:
        text = path.read_text()
        config = {"gradient_accumulation_steps": 1} | json.loads(text)
    except (OSError, TypeError, ValueError) as problem:
        sys.exit(f"ds_config.json: {problem}")
    if unknown := sorted(config.keys() - set(KEYS)):
        sys.exit(f"ds_config.json: remove {', '.join(unknown)}: only {', '.join(KEYS)} are "
                 "supported here; flags and main.py set the others")
    if '"auto"' in text:
        sys.exit('ds_config.json: "auto" is for Hugging Face\'s Trainer: give a value')
    steps = config["gradient_accumulation_steps"]
    if type(steps) is not int or steps < 1:
        sys.exit("ds_config.json: gradient_accumulation_steps has to be 1 or more")
    for name in "zero_optimization", "bf16", "fp16":
        section = config.setdefault(name, {})
        if type(section) is not dict or type(section.get("enabled", False)) is not bool:
            sys.exit(f"ds_config.json: {name} cannot be {json.dumps(section)}")
    section = config["zero_optimization"]
    if zero and section.keys() & zero.keys():
        sys.exit(f"ds_config.json: remove {', '.join(section.keys() & zero.keys())}: flags set it")
    if not zero and section.get("stage", 0) not in (0, 1, 2):
        sys.exit("ds_config.json: stage has to be 0, 1 or 2; for 3 use chapter 5")
    config["zero_optimization"] = section | (zero or {})
    if precision == "fp64":
        sys.exit("--precision fp64: DeepSpeed does not support it: use fp32")
    if precision == "bf16":
        config["bf16"] = {"enabled": True} | config["bf16"]
    enabled = [name for name in ("bf16", "fp16") if config[name].get("enabled")]
    if len(enabled) > 1 or (precision == "bf16" and enabled != ["bf16"]):
        sys.exit("ds_config.json: remove bf16 and fp16: --precision sets bf16")
    return config, enabled[0] if enabled else precision


def import_deepspeed(device: torch.device, config: dict | None = None) -> ModuleType:
    """Import DeepSpeed quietly, without compiling, and check `config`.

    DeepSpeed takes LOCAL_RANK for the index of this rank's GPU, which is 0 if the rank sees only
    its own GPU (deepspeed/runtime/engine.py, _set_distributed_vars; zero/partition_parameters.py).
    """
    if not find_spec("deepspeed"):
        sys.exit("DeepSpeed is not installed: python -m pip install deepspeed")
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # DeepSpeed wants both equal
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # ZeRO uses old names
    if config:
        with exit_on_failure("DeepSpeedConfig()"):
            deepspeed.DeepSpeedConfig(config)
    return deepspeed


@contextmanager
def exit_on_failure(call: str) -> Iterator[None]:
    """Exit with DeepSpeed's reason if the block fails: within this call, or the model's code."""
    try:
        yield
    except Exception as problem:
        sys.exit(f"{call}, with ds_config.json, failed: "
                 f"{type(problem).__name__}: {short_reason(problem)}")


def initialize(deepspeed: ModuleType, model: nn.Module, **options: object) -> tuple:
    """Return DeepSpeed's engine and optimizer; exit with DeepSpeed's reason if it fails."""
    with exit_on_failure("deepspeed.initialize()"):
        engine, optimizer, _, _ = deepspeed.initialize(model=model, **options)
    for state in options["optimizer"].state.values():  # in bf16 stage 0 steps with zero gradients:
        if "step" in state:  # reset Adam's bias correction
            state["step"].zero_()
    dtype = next(model.parameters()).dtype  # DeepSpeed has cast the parameters
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and dtype != torch.float32:
            keep_statistics(module, dtype)
    return engine, optimizer


def keep_statistics(norm: nn.Module, dtype: torch.dtype) -> None:
    """Keep fp32 copies of BatchNorm's running mean and variance, which are in `dtype`.

    Only the copies are updated: bf16 rounds away updates below 1/256 of the value.
    """
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    norm.running_mean.data, norm.running_var.data = mean.to(dtype), variance.to(dtype)
    norm.register_buffer("mean_fp32", mean)
    norm.register_buffer("variance_fp32", variance)
    momentum, norm.momentum = norm.momentum, 0.0  # disables PyTorch's own update

    def update(_, inputs):
        if norm.training:
            images = inputs[0].detach().float()
            new_variance, new_mean = torch.var_mean(images, (0, 2, 3))
            mean.lerp_(new_mean, momentum)
            variance.lerp_(new_variance, momentum)
        else:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)

    norm.register_forward_pre_hook(update)

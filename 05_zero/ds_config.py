"""ds_config.json, read and checked.

Most of what DeepSpeed would answer with a traceback, or not at all, is one line here.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

CONFIG = Path(__file__).with_name("ds_config.json")
KINDS = {"gradient_accumulation_steps": (int,), "gradient_clipping": (int, float),
         "bf16": (dict,), "fp16": (dict,), "zero_optimization": (dict,)}


def read_config(precision: str, device: str, zero: dict | None = None) -> tuple[dict, str]:
    """Return the configuration, with the options of ZeRO, and the precision of it and the flag.

    Exits with a line where file and flags contradict each other.
    """
    config = read_file()
    if {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        sys.exit("ds_config.json: take the batch out of it, --batch-size sets it")
    if zero:
        if config.get("zero_optimization", {}).keys() & zero.keys():
            sys.exit(f"ds_config.json: take {', '.join(zero)} out of it, flags set them")
        config["zero_optimization"] = config.get("zero_optimization", {}) | zero
    if precision == "fp64":
        sys.exit("--precision fp64: DeepSpeed has none; take fp32")
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    for name in ("bf16", "fp16"):
        if config.get(name, {}).get("enabled"):
            precision = name
    if precision == "fp16" and device == "cpu":
        sys.exit("ds_config.json: fp16 needs a GPU: take it out")
    return config, precision


def read_file():
    try:
        config = json.loads(CONFIG.read_text())
    except ValueError as problem:
        sys.exit(f"ds_config.json: {problem}")
    if not isinstance(config, dict):
        sys.exit('ds_config.json: it has to be {"key": value, ...}')
    config.setdefault("gradient_accumulation_steps", 1)
    for key in KINDS.keys() & config.keys():
        if type(config[key]) not in KINDS[key]:
            sys.exit(f"ds_config.json: {key} cannot be {json.dumps(config[key])}")
    if config["gradient_accumulation_steps"] < 1:
        sys.exit("ds_config.json: gradient_accumulation_steps is less than 1")
    return config


def import_deepspeed(device: torch.device) -> ModuleType:
    """Return DeepSpeed, without what it prints and compiles at its start.

    It takes LOCAL_RANK for the number of this rank's GPU. A rank that sees its own GPU only has
    number 0 (deepspeed/runtime/engine.py, _set_distributed_vars; zero/partition_parameters.py).
    """
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # which would have to be the same
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo is used; else it compiles
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # ZeRO's older names
    return deepspeed


def initialize(deepspeed: ModuleType, model: nn.Module, **options: object) -> tuple:
    """Return DeepSpeed's engine and optimizer; exit with DeepSpeed's reason where it fails."""
    try:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, **options)
    except Exception as problem:
        reason = " ".join(str(problem).split())[:150]
        sys.exit(f"deepspeed.initialize(), with ds_config.json, failed: "
                 f"{type(problem).__name__}: {reason}")
    dtype = next(model.parameters()).dtype  # DeepSpeed has cast them
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and dtype != torch.float32:
            keep_statistics(module, dtype)
    return engine, optimizer


def keep_statistics(norm: nn.Module, dtype: torch.dtype) -> None:
    """Keep BatchNorm's running mean and variance in fp32, next to those that it computes with.

    In bf16 they would not move any more where an update is below 1/256 of their value.
    """
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    norm.running_mean.data, norm.running_var.data = mean.to(dtype), variance.to(dtype)
    norm.register_buffer("mean_fp32", mean)
    norm.register_buffer("variance_fp32", variance)
    momentum, norm.momentum = norm.momentum, 0.0  # PyTorch's own update, of the bf16 ones

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

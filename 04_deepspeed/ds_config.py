"""ds_config.json, read and checked.

What DeepSpeed would answer with a traceback, or not at all, is one line here.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

from torch import nn

CONFIG = Path(__file__).with_name("ds_config.json")


def read_config(args: argparse.Namespace, device: str, zero: dict | None = None) -> dict:
    """Return the configuration as a dict; a precision that it asks for is put into args.

    --precision bf16 is put into it, and the options of ZeRO that flags have set (chapter 5).
    Exits with a line where file and flags contradict each other.
    """
    try:
        config = json.loads(CONFIG.read_text())
        if {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
            raise ValueError("take the batch out of it, --batch-size and --global-batch-size "
                             "set it")
        if zero:
            config["zero_optimization"] = zero | refuse_set(config.get("zero_optimization", {}))
        accumulation = config.setdefault("gradient_accumulation_steps", 1)
        if type(accumulation) is not int or accumulation < 1:
            raise ValueError(f"gradient_accumulation_steps: {accumulation!r} is not a whole number "
                             "above 0")
        clipping = config.get("gradient_clipping", 0.0)
        if type(clipping) not in (int, float) or not clipping >= 0:
            raise ValueError(f"gradient_clipping: {clipping!r} is not a number from 0 on")
        if args.precision == "bf16":
            config["bf16"] = config.get("bf16", {}) | {"enabled": True}
        enabled = {name: config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
        for name, value in enabled.items():
            if type(value) is not bool:
                raise ValueError(f"{name}: enabled is true or false, not {value!r}")
        half = [name for name in enabled if enabled[name]]
        if len(half) > 1:
            raise ValueError("bf16 and fp16 contradict each other: take one of them out")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as problem:
        sys.exit(f"ds_config.json beside main.py: {problem}")
    if half and args.precision == "fp32":
        args.precision = half[0]
    if args.precision == "fp64":
        sys.exit("--precision fp64: DeepSpeed has none; take fp32")
    if args.precision == "fp16" and device == "cpu":
        sys.exit("ds_config.json: fp16 needs a GPU: take it out")
    return config


def refuse_set(zero):
    """The file's options of ZeRO, if they are others than the flags set."""
    if {"stage", "offload_optimizer", "offload_param"} & zero.keys():
        raise ValueError("take stage and offload out of zero_optimization, --stage and --offload "
                         "set them")
    return zero


def import_deepspeed(device: str) -> ModuleType:
    """DeepSpeed without what it says and compiles at its start."""
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo is used; else it compiles
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # ZeRO's older names
    return deepspeed


def initialize(deepspeed: ModuleType, model: nn.Module, **options: object) -> tuple:
    """Return DeepSpeed's engine and optimizer, or exit with a line on what it does not take."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException
    of_config = (deepspeed.DeepSpeedConfigError, ZeRORuntimeException, AssertionError,
                 AttributeError, KeyError, TypeError, ValueError)
    try:
        engine, optimizer, _, _ = deepspeed.initialize(model=model, **options)
    except of_config as problem:
        reason = " ".join(str(problem).split())[:150]
        sys.exit(f"DeepSpeed does not take ds_config.json: {reason}")
    dtype = next(model.parameters()).dtype  # DeepSpeed has cast them
    for buffer in model.buffers():
        if buffer.is_floating_point():  # BatchNorm's statistics go with the parameters
            buffer.data = buffer.to(dtype)
    return engine, optimizer

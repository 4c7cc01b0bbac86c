"""Read ds_config.json; a mistake in it ends the program with one line, not a traceback."""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from workshop.devices import short_reason

DEFAULTS = {  # of the supported keys; a value must have the type of its default
    "gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "bf16": {}, "fp16": {},
    "checkpoint": {}, "zero_optimization": {}, "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False}
REFUSED = {  # keys of sections: their bytes are not counted, or they have another name today
    "zero_hpz_partition_size",
    "offload_param", "cpu_offload", "cpu_offload_param", "bf16_master_weights_and_grads",
    "bf16_optimizer_states", "fp16_master_weights_and_grads"}


def read_config(path: Path, precision: str, device: str,
                zero: dict | None = None) -> tuple[dict, str]:
    """Return the configuration with ZeRO's options, and the precision that training uses.

    Exits with one line if ds_config.json and the flags contradict each other.
    """
    config = read_file(path)
    problems = find_problems(config)
    sections = {key: config.get(key) for key in ("zero_optimization", "bf16", "fp16")}
    sections = {key: value if isinstance(value, dict) else {} for key, value in sections.items()}
    section = sections["zero_optimization"]
    if zero:
        if set_by_flags := sorted(section.keys() & zero.keys()):
            problems.append(f"remove {', '.join(set_by_flags)}: flags set it")
        config["zero_optimization"] = section | zero
    elif section.get("stage", 0) not in (0, 1, 2):
        problems.append("stage has to be 0, 1 or 2; for 3 use chapter 5")
    if precision == "fp64":
        sys.exit("--precision fp64: DeepSpeed does not support it: use fp32")
    if precision == "bf16":
        config["bf16"] = sections["bf16"] = {"enabled": True} | sections["bf16"]
    enabled = [name for name in ("bf16", "fp16") if sections[name].get("enabled")]
    if len(enabled) > 1 or (precision == "bf16" and enabled != ["bf16"]):
        problems.append("remove bf16 and fp16: --precision sets bf16")
    if enabled == ["fp16"] and device == "cpu":
        problems.append("fp16 needs a GPU: remove it")
    if problems:
        sys.exit(f"ds_config.json: {'; '.join(problems)}")
    return config, enabled[0] if enabled else precision


def read_file(path):
    """Return the file's contents; exit with one line if they are not an object in JSON."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        sys.exit(f"ds_config.json: {problem}")
    if not isinstance(config, dict):
        sys.exit('ds_config.json: it has to be {"key": value, ...}')
    config.setdefault("gradient_accumulation_steps", 1)
    return config


def find_problems(config):
    """Return what is wrong with keys and values that would have no effect, or no meaning.

    DeepSpeed ignores keys that it does not know, and "auto" within a section, which is for Hugging
    Face's Trainer. It checks the other values within sections itself.
    """
    problems = []
    sections = [section for section in config.values() if isinstance(section, dict)]
    refused = [*(config.keys() - DEFAULTS.keys()),
               *(key for section in sections for key in section if key in REFUSED)]
    if refused:
        problems.append(f"remove {', '.join(sorted(refused))}: only {', '.join(DEFAULTS)} "
                        "are supported here; flags and main.py set the others")
    if auto := sorted(find_auto(config)):
        problems.append(f'{", ".join(auto)} cannot be "auto": give a value, or remove it')
    for key in config.keys() & DEFAULTS.keys():
        value = config[key]
        types = (int, float) if key == "gradient_clipping" else (type(DEFAULTS[key]),)
        is_switch = isinstance(value, dict) and "enabled" in value
        is_wrong = type(value) not in types or (is_switch and type(value["enabled"]) is not bool)
        if is_wrong and "auto" not in (value, is_switch and value["enabled"]):
            problems.append(f"{key} cannot be {json.dumps(value)}")
    steps = config["gradient_accumulation_steps"]
    if type(steps) is int and steps < 1:
        problems.append("gradient_accumulation_steps has to be 1 or more")
    return problems


def find_auto(value, name=""):
    """Yield the names of the keys, at any depth, whose value is "auto"."""
    if value == "auto":
        yield name
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield from find_auto(inner, key)


def import_deepspeed(device: torch.device, config: dict | None = None) -> ModuleType:
    """Import DeepSpeed quietly, without compiling, and check `config`.

    DeepSpeed takes LOCAL_RANK for the index of this rank's GPU, which is 0 if the rank sees only
    its own GPU (deepspeed/runtime/engine.py, _set_distributed_vars; zero/partition_parameters.py).
    """
    os.environ["DS_ACCELERATOR"] = device.type
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # DeepSpeed wants both equal
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # ZeRO uses old names
    try:
        if config:
            deepspeed.DeepSpeedConfig(config)
    except Exception as problem:
        text = str(problem).partition(" [type=")[0]  # without pydantic's details
        reason = " ".join(text.split())[:200]
        sys.exit(f"ds_config.json: {reason}")
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

"""Checks the names that agree uses, and that PyTorch and DeepSpeed do not document.

If one has moved, agree would not see all of a training, so it refuses to judge.
"""

import importlib
from types import FunctionType

import torch

LOADER = "torch.utils.data.dataloader._BaseDataLoaderIter"
FSDP = "torch.distributed.fsdp._fully_shard"
ZERO = "deepspeed.runtime.zero.partition_parameters.Init"
# {when they are used: {module, class or function: names in it}}. A name after a point is a
# variable, or an attribute that only instances have: its class's methods use it.
NAMES = {
    "always": {
        LOADER: ["__init__", "_reset", "_next_index", "__next__"],
        "torch.nn.modules.module": [
            "register_module_forward_pre_hook", "register_module_forward_hook"],
        "torch.nn.Module._call_impl": [".kwargs"],  # a variable that a hook reads
        "torch.nn.parameter": ["UninitializedTensorMixin"],
        "torch.nn.parallel.DistributedDataParallel": ["_get_ddp_logging_data"],
        "torch.optim.optimizer": [
            "register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"],
        "torch.autograd.graph": ["_engine_run_backward"],  # frames.waits() looks for this file
        "torch.multiprocessing.spawn": ["start_processes"]},
    "FSDP2": {
        "torch.distributed.tensor._utils": ["compute_local_shape_and_global_offset"],
        f"{FSDP}._fsdp_param_group": ["foreach_reduce"],
        f"{FSDP}._fsdp_param_group.FSDPParamGroup": [".fsdp_params"],
        f"{FSDP}._fsdp_param.FSDPParam": [
            "__init__", ".sharded_param", "._unsharded_param", ".mesh_info",
            ".unsharded_accumulated_grad"],
        f"{FSDP}._fully_shard.fully_shard": ["._log_api_usage_once"],
        f"{FSDP}._fsdp_state.FSDPState": ["._fsdp_param_group"]},
    "DeepSpeed": {
        ZERO: [".ds_tensor"], "deepspeed.utils": ["safe_get_full_grad"],
        "deepspeed.DeepSpeedEngine": ["is_gradient_accumulation_boundary"]},
}


def problem(user: str) -> str:
    """Return a message if a name that `user`, a key of NAMES, needs has moved, else ""."""
    missing = [f"{place}.{name.lstrip('.')}" for place, names in NAMES.get(user, {}).items()
               for name in names if not has(find(place), name)]
    if not hasattr((torch.ones(1, requires_grad=True) / 2).grad_fn, "_saved_other"):
        missing.append("torch.autograd's DivBackward0._saved_other")
    if not missing:
        return ""
    library = importlib.import_module(missing[0].split(".")[0])
    return (f"could not check: {library.__name__} {library.__version__} has moved {missing[0]}, "
            "which agree needs; use a version that agree's README names")


def find(place):
    """Return the module, class or function of this name, or None."""
    parts = place.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value
    return None


def has(owner, name):
    if not name.startswith("."):
        return hasattr(owner, name)
    functions = [owner, *getattr(owner, "__dict__", {}).values()]
    codes = [value.__code__ for value in functions if isinstance(value, FunctionType)]
    return hasattr(owner, name[1:]) or any(
        name[1:] in code.co_names + code.co_varnames for code in codes)

"""Count a rank's bytes, tensor by tensor, to compare with ZeRO's formulas (1910.02054)."""

import gc
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

ROLES = ("parameters", "gradients", "master copy", "optimizer state")


def count(groups: dict[str, Iterable], device: torch.device) -> dict[str, int]:
    """Return the bytes of each group of tensors; a shared storage counts for the first."""
    counted, sums = set(), dict.fromkeys(groups, 0)
    for name, tensors in groups.items():
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if local.device.type == device.type and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                sums[name] += storage.nbytes()
    return sums


class Accounting:
    """Count the bytes of one training step; `tensors()` returns {role: tensors held now}.

    batch_bytes: upper bound for one step's images.
    """

    def __init__(self, model, tensors, batch_bytes, device):
        self.model, self.tensors, self.device = model, tensors, device
        self.batch_bytes = batch_bytes
        self.bytes, self.hooks, self.problem = {}, [], None

    def watch(self):
        """Call before forward: then count at every layer, in forward and backward."""
        if self.hooks:  # a later micro-batch of the step
            return
        for module in self.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self.hooks += [module.register_forward_pre_hook(self.before_forward),
                               module.register_forward_hook(self.after_forward)]

    def before_forward(self, module, _):
        self.update_peaks()
        for parameter in module.parameters(recurse=False):  # gathered now, if sharded
            self.hooks += [parameter.register_hook(self.update_peaks),
                           parameter.register_post_accumulate_grad_hook(self.update_peaks)]

    def after_forward(self, module, _, output):
        self.update_peaks()
        self.hooks.append(output.register_hook(self.update_peaks))  # later layers' backward is done

    def update_peaks(self, *_):
        try:
            sums = count(self.tensors(), self.device)
        except Exception as problem:  # another version of the library has other names
            self.problem = f"{type(problem).__name__}: {problem}"
            return
        for role in ROLES[:2]:
            self.bytes[f"peak {role}"] = max(sums[role], self.bytes.get(f"peak {role}", 0))

    def close(self):
        """Count after backward; a problem if over 5 % (plus the batch) have no known role."""
        for hook in self.hooks:
            hook.remove()
        self.update_peaks()
        if self.problem:
            return
        if self.device.type != "cpu":
            gpu = torch.get_device_module(self.device)
            self.bytes["allocator's peak"] = gpu.max_memory_allocated()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # gloo's thread may hold a bucket briefly
            gc.collect()
            others = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
            sums = count(self.tensors() | {"unclassified": others}, self.device)
            del others  # or the next count includes it
            self.bytes |= sums
            if sums["unclassified"] <= 0.05 * sum(sums.values()) + self.batch_bytes:
                return
        self.problem = f"{sums['unclassified']:,} bytes of tensors with no known role"


def layer_sizes(model: torch.nn.Sequential) -> list[int]:
    """Return the parameters of each layer, also if DeepSpeed has sharded them."""
    return [sum(getattr(parameter, "ds_numel", parameter.numel())
                for parameter in layer.parameters()) for layer in model]


def formula(stage: int, ranks: int, parameters: float, layer: float, *, width: int, master: int,
            moments: int, keeps_gradients: bool = False) -> dict[str, float]:
    """Return the bytes that ZeRO's paper expects on each rank, by the names of Accounting.bytes.

    parameters: their number; layer: that of the largest layer, which stage 3 gathers. Bytes per
    parameter: width (also of its gradient), master (fp32 copy, 0 if there is none), moments (Adam's
    state). keeps_gradients: at stage 1 each rank keeps the full gradients, as in the paper.
    """
    whole, sharded = width * parameters, width * parameters / ranks
    updated = parameters if stage == 0 else parameters / ranks  # by this rank's optimizer
    all_gradients = stage == 0 or (stage == 1 and keeps_gradients)
    plus_layer = sharded + width * layer
    return {"parameters": sharded if stage == 3 else whole,
            "gradients": whole if all_gradients else sharded,
            "master copy": master * updated,
            "optimizer state": moments * updated,
            "peak parameters": plus_layer if stage == 3 and ranks > 1 else whole,
            "peak gradients": plus_layer if stage > 1 else whole}


def report_bytes(account: Accounting, expected: dict[str, float]) -> list[dict]:
    """Print on rank 0 one line per rank and one for the formula; return the ranks' counts."""
    if not account.bytes and not account.problem:  # fewer than two steps
        return []
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (account.bytes, account.problem))
    counts = [counted for counted, _ in answers]
    problems = [problem for _, problem in answers if problem]
    if dist.get_rank() == 0 and problems:
        print(f"memory accounting failed: {problems[0]} (only tested with the pinned versions)")
    elif dist.get_rank() == 0:
        names = [*ROLES, "sum", *(name for name in counts[0] if "peak" in name)]
        print("bytes between backward and optimizer step, and the peaks of that step:")
        print("       ", *(f"{name:>15}" for name in names))
        titles = [*(f"rank {rank}" for rank in range(len(counts))), "formula"]
        for title, row in zip(titles, [*counts, expected]):
            row = row | {"sum": sum(row[role] for role in ROLES)}
            cells = [f"{row[name]:15,.0f}" if name in row else 15 * " " for name in names]
            print(f"{title:7}", *cells)
    return [] if problems else counts


# Where this chapter's two programs keep their tensors

def deepspeed_formula(args, ranks, sizes, compute):
    """Return formula() for DeepSpeed's ZeRO and Adam: a master copy in fp32 and two moments."""
    on_gpu = args.offload == "none"
    has_master = args.stage > 0 or compute != torch.float32
    expected = formula(args.stage, ranks, sum(sizes), max(sizes), width=compute.itemsize,
                       master=4 if has_master and on_gpu else 0, moments=8 if on_gpu else 0)
    return expected if on_gpu else expected | {"gradients": 0}


def held_by_deepspeed(model, optimizer, adam):
    """Return the tensors of this rank by role, from where DeepSpeed 0.19 keeps them."""
    whole = list(model.parameters())
    shards = [parameter.ds_tensor for parameter in whole if hasattr(parameter, "ds_tensor")]
    master = [parameter for group in adam.param_groups for parameter in group["params"]]
    master += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    gradients = [parameter.grad for parameter in whole + master]
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += averaged or []
    buckets = []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    return {"parameters": whole + shards, "gradients": gradients, "master copy": master,
            "optimizer state": moments_of(adam), "buckets": buckets}


def held_by_pytorch(model, shards, optimizer):
    """Return the tensors of fsdp.py by role; the model's parameters include a gathered layer."""
    parameters = [*shards, *model.parameters()]
    adam = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps one
    return {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters],
            "master copy": [], "optimizer state": moments_of(adam)}


def pytorch_formula(args, ranks, sizes, dtype):
    """Return formula() for fsdp.py, without peaks: PyTorch gathers into its own buffers."""
    width = dtype.itemsize if args.offload == "none" else 0
    expected = formula(args.stage, ranks, sum(sizes), 0, width=width, master=0, moments=2 * width,
                       keeps_gradients=True)
    return {role: expected[role] for role in ROLES}


def moments_of(adam):
    return [tensor for state in adam.state.values() for tensor in state.values()]

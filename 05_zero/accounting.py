"""Count a rank's bytes, tensor by tensor, to compare with ZeRO's formulas (1910.02054)."""

import gc
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

ROLES = ("parameters", "gradients", "master copy", "optimizer state")


def count(groups: dict[str, Iterable], device: torch.device) -> dict[str, int]:
    """Return the bytes of each group of tensors; storage in several groups counts in the first."""
    addresses, sums = set(), dict.fromkeys(groups, 0)
    for name, tensors in groups.items():
        for tensor in tensors:
            if tensor is None:
                continue
            storage = storage_of(tensor)
            if storage.device.type == device.type and storage.data_ptr() not in addresses:
                addresses.add(storage.data_ptr())
                sums[name] += storage.nbytes()
    return sums


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor, or of this rank's shard of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


class Accounting:
    """Count the bytes of one training step by role, and their peaks.

    tensors(): returns {role: the tensors that exist now}. other_bytes: upper bound for the tensors
    without a role, which are the text, the batch, the logits and their copies.
    """

    def __init__(self, model, tensors, device, other_bytes):
        self.model, self.tensors, self.device = model, tensors, device
        self.other_bytes = other_bytes
        self.bytes, self.hooks, self.problem = {}, [], None

    def start(self):
        """Call before forward, to count at every layer in forward and backward."""
        self.saved = {}  # {address: bytes} of what autograd saves in this forward
        if self.hooks:  # a later micro-batch of the step has them already
            return
        self.saving = saved_tensors_hooks(self.save, lambda tensor: tensor)
        self.saving.__enter__()
        for module in self.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self.hooks += [module.register_forward_pre_hook(self.before_forward),
                               module.register_forward_hook(self.after_forward)]

    def save(self, tensor):
        """Count a tensor that backward needs, unless it is a parameter, perhaps a gathered one."""
        storage = tensor.untyped_storage()
        parameters = {storage_of(parameter).data_ptr() for parameter in self.model.parameters()}
        if tensor.device.type == self.device.type and storage.data_ptr() not in parameters:
            self.saved[storage.data_ptr()] = storage.nbytes()
        activations = sum(self.saved.values())
        self.bytes["activations"] = max(activations, self.bytes.get("activations", 0))
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def before_forward(self, module, _):
        self.update_peaks()
        for parameter in module.parameters(recurse=False):  # stage 3 has just gathered them
            self.hooks += [parameter.register_hook(self.update_peaks),
                           parameter.register_post_accumulate_grad_hook(self.update_peaks)]

    def after_forward(self, module, _, output):
        self.update_peaks()
        if output.requires_grad:  # with activation checkpointing, only in backward
            self.hooks.append(output.register_hook(self.update_peaks))  # before its backward

    def update_peaks(self, *_):
        try:
            sums = count(self.tensors(), self.device)
        except Exception as problem:  # other versions of the library use other names
            self.problem = f"{type(problem).__name__}: {problem}"
            return
        for role in ROLES[:2]:
            self.bytes[f"peak {role}"] = max(sums[role], self.bytes.get(f"peak {role}", 0))

    def stop(self):
        """Count after backward; if unclassified tensors exceed 5 % + other_bytes, set `problem`."""
        self.saving.__exit__(None, None, None)
        for hook in self.hooks:
            hook.remove()
        self.update_peaks()
        if self.problem:
            return
        if self.device.type != "cpu":
            gpu = torch.get_device_module(self.device)
            self.bytes["peak of the run"] = gpu.max_memory_allocated()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # gloo's thread may hold a bucket briefly
            gc.collect()
            tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
            sums = count(self.tensors() | {"unclassified": tensors}, self.device)
            del tensors  # else the list keeps them in memory
            self.bytes |= sums
            if sums["unclassified"] <= 0.05 * sum(sums.values()) + self.other_bytes:
                return
        self.problem = f"{sums['unclassified']:,} bytes of tensors without a role"


def sizes_of(model: torch.nn.Sequential) -> list[int]:
    """Return the number of parameters of each part, also if DeepSpeed has sharded them."""
    return [sum(getattr(parameter, "ds_numel", parameter.numel())
                for parameter in part.parameters()) for part in model]


def activations(layers: int, width: int, heads: int, context: int, sequences: int, *,
                element_bytes: int, checkpointing: bool = False) -> int:
    """Return the bytes that backward needs of a forward of transformer.py's GPT, on the CPU.

    sequences: of the batch. element_bytes: of a number of the network. Counted from autograd: what
    each operation saves. (PyTorch's fused attention keeps no scores.)
    """
    fp32_or_more = max(4, element_bytes)  # the loss, and the sums of attention's softmax
    norm = element_bytes * (2 * width + 2)  # its input, its output, mean, standard deviation
    attention = element_bytes * 4 * width + fp32_or_more * heads  # query, key, value, output; sums
    mlp = element_bytes * 8 * width  # GELU's input and output
    block = element_bytes * width if checkpointing else 2 * norm + attention + mlp
    head = norm + fp32_or_more * 256 + 8  # the logits' softmax, the next token
    tokens = context * sequences
    return 8 * context + tokens * (8 + layers * block + head) + fp32_or_more  # and a sum of weights


def formula(stage: int, ranks: int, parameters: float, *, element_bytes: int, master: int,
            moments: int, gathered: float = 0, bucket: float = 0,
            keeps_gradients: bool = False) -> dict[str, float]:
    """Return the bytes that ZeRO's paper expects on each rank, by the names of Accounting.bytes.

    parameters: number of parameters of the network; gathered: of what stage 3 gathers at a time;
    bucket: gradients that stages 2 and 3 reduce at a time. Bytes per parameter: element_bytes (of
    the parameter, and of its gradient), master (of its fp32 copy, or 0), moments (of Adam's state).
    keeps_gradients: at stage 1 each rank keeps all gradients, as in the paper.
    """
    full, shard = element_bytes * parameters, element_bytes * parameters / ranks
    optimizer_parameters = parameters if stage == 0 else parameters / ranks
    full_gradients = stage == 0 or (stage == 1 and keeps_gradients)
    peak_parameters = shard + element_bytes * gathered if stage == 3 and ranks > 1 else full
    return {"parameters": shard if stage == 3 else full,
            "gradients": full if full_gradients else shard,
            "master copy": master * optimizer_parameters,
            "optimizer state": moments * optimizer_parameters,
            "peak parameters": peak_parameters,
            "peak gradients": shard + element_bytes * bucket if stage > 1 else full}


def report_bytes(accounting: Accounting, expected: dict[str, float]) -> list[dict]:
    """Print on rank 0 a table of the ranks' bytes and the formula's; return those of the ranks."""
    if not accounting.bytes and not accounting.problem:  # fewer than two steps
        return []
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, (accounting.bytes, accounting.problem))
    counts = [rank_bytes for rank_bytes, _ in results]
    problems = [problem for _, problem in results if problem]
    if dist.get_rank() == 0 and problems:
        print(f"memory accounting failed: {problems[0]} (only tested with the pinned versions)")
    elif dist.get_rank() == 0:
        peaks = [name for name in counts[0] if "peak" in name]
        names = [*ROLES, "sum", *peaks, "activations"]
        print("bytes between backward and optimizer step, the peaks, and activations of a forward:")
        rows = [row | {"sum": sum(row[role] for role in ROLES)} for row in [*counts, expected]]
        columns = [["", "", *(f"rank {rank}" for rank in range(len(counts))), "formula"]]
        for name in names:  # of up to two lines
            first_line, _, last_line = name.rpartition(" ")
            cells = [f"{row[name]:,.0f}" if name in row else "" for row in rows]
            columns.append([first_line, last_line, *cells])
        widths = [max(map(len, column)) for column in columns]
        for line in zip(*columns):
            print(*(f"{cell:>{width}}" for cell, width in zip(line, widths)))
    return [] if problems else counts


def deepspeed_formula(args, ranks, sizes, batch, compute_dtype):
    """Return formula() for main.py, where DeepSpeed has a master copy in fp32 and two moments.

    It gathers one module at a time: the embedding, or one of the MLP's layers; with activation
    checkpointing, both of them. A bucket has the size of a block.
    """
    gathered = 4 * args.width * (args.width + 1)  # the MLP's first layer
    if args.activation_checkpointing:
        gathered += (4 * args.width + 1) * args.width  # and the second
    on_gpu = args.offload == "none"
    has_master = args.stage > 0 or compute_dtype != torch.float32
    expected = formula(args.stage, ranks, sum(sizes), element_bytes=compute_dtype.itemsize,
                       master=4 if has_master and on_gpu else 0, moments=8 if on_gpu else 0,
                       gathered=max(sizes[0], gathered), bucket=sizes[1])
    if not on_gpu:
        expected["gradients"] = 0
    return expected | activation_formula(args, batch, compute_dtype)


def deepspeed_tensors(model, optimizer, adam):
    """Return this rank's tensors of main.py by role; the attributes are DeepSpeed 0.19's."""
    parameters = list(model.parameters())
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    master = [parameter for group in adam.param_groups for parameter in group["params"]]
    master += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    gradients = [parameter.grad for parameter in parameters + master]
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    for group_gradients in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += group_gradients or []
    buckets = []
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    return {"parameters": parameters + shards, "gradients": gradients, "master copy": master,
            "optimizer state": adam_moments(adam), "buckets": buckets}


def pytorch_tensors(model, shards, optimizer):
    """Return this rank's tensors of fsdp.py by role, a gathered layer included."""
    parameters = [*shards, *model.parameters()]
    adam = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's is in optim
    return {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters],
            "master copy": [], "optimizer state": adam_moments(adam)}


def pytorch_formula(args, ranks, sizes, batch, dtype):
    """Return formula() for fsdp.py, without peaks, as PyTorch gathers into its own buffers."""
    element_bytes = dtype.itemsize if args.offload == "none" else 0
    expected = formula(args.stage, ranks, sum(sizes), element_bytes=element_bytes, master=0,
                       moments=2 * element_bytes, keeps_gradients=True)
    compute_dtype = torch.bfloat16 if args.precision == "bf16" else dtype
    activations_expected = activation_formula(args, batch, compute_dtype)
    if args.stage == 1 and compute_dtype != dtype:  # autocast computes some operations in fp32
        activations_expected = {}
    return {role: expected[role] for role in ROLES} | activations_expected


def activation_formula(args, batch, compute_dtype):
    """Return activations() of a program's flags, by its name in Accounting.bytes."""
    return {"activations": activations(
        args.layers, args.width, args.heads, args.context, batch,
        element_bytes=compute_dtype.itemsize, checkpointing=args.activation_checkpointing)}


def adam_moments(adam):
    return [tensor for state in adam.state.values() for tensor in state.values()]

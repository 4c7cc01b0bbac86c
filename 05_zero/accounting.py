"""What a rank holds, counted tensor by tensor, beside what ZeRO's formulae say (Rajbhandari et al., 1910.02054)."""

import gc
import math

import torch
import torch.distributed as dist

ROLES = ("parameters", "gradients", "master copy", "optimizer state")


def storages(tensors, device=None):
    """{address: bytes} of what these tensors keep on the device, or anywhere; what several share counts once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors if tensor is not None]
    found = {}
    for tensor in local:
        storage = tensor.untyped_storage()
        if storage.nbytes() and (device is None or tensor.device.type == device.type):
            found[storage.data_ptr()] = storage.nbytes()
    return found


def count(groups, device):
    """Bytes of each group of tensors; a storage belongs to the first group that has it."""
    seen, sums = set(), {}
    for name, tensors in groups.items():
        own = {address: size for address, size in storages(tensors, device).items() if address not in seen}
        seen |= own.keys()
        sums[name] = sum(own.values())
    return sums


class Accounting:
    """Counts the bytes of one training step. `tensors()` gives {role: tensors} of what the rank holds just now."""

    def __init__(self, model, tensors, data, device):
        self.model, self.tensors, self.data, self.device, self.bytes, self.hooks = model, tensors, data, device, {}, []

    def watch(self):
        """Before the step's forward: look at parameters and gradients whenever a layer has done a part of its work."""
        for module in self.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self.hooks += [module.register_forward_pre_hook(self.enter), module.register_forward_hook(self.leave)]

    def enter(self, module, _):
        self.look()
        for parameter in module.parameters(recurse=False):  # gathered, where that is how it works
            self.hooks += [parameter.register_hook(self.look),
                           parameter.register_post_accumulate_grad_hook(self.look)]

    def leave(self, module, _, output):
        self.look()
        self.hooks.append(output.register_hook(self.look))  # the layers behind this one are through with backward

    def look(self, *_):
        now = count(self.tensors(), self.device)
        for role in ROLES[:2]:
            self.bytes[f"peak {role}"] = max(now[role], self.bytes.get(f"peak {role}", 0))

    def close(self):
        """After the step's backward and before its optimizer step, when all there is exists.

        Raises RuntimeError if it finds no parameters, gradients or state, or cannot place 5 % of all tensors
        beside the step's batch.
        """
        for hook in self.hooks:
            hook.remove()
        self.look()
        if self.device.type == "cuda":
            self.bytes["allocator's peak"] = torch.cuda.max_memory_allocated()
        gc.collect()  # what is only waiting to be collected
        everything = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        groups = self.tensors() | {"data": self.data, "unclassified": everything}
        self.bytes |= count(groups, self.device)
        for role in ROLES:
            if role != "master copy" and not storages(groups[role]):
                raise RuntimeError(f"the accounting finds no {role}: have the framework's names changed?")
        batch = 4 * sum(tensor.nbytes for tensor in self.data)  # the step's images as fp32 are at most that
        if self.bytes["unclassified"] > 0.05 * sum(storages(everything, self.device).values()) + batch:
            raise RuntimeError(f"the accounting cannot place {self.bytes['unclassified']:,} bytes")


def formula(stage, ranks, parameters, layer, *, width, gathered, master, moments, keeps_gradients=False):
    """The bytes that ZeRO's paper expects on each rank, by the names of Accounting.bytes.

    parameters: their number P; layer: that of the largest layer, which is gathered whole at stage 3. Bytes a parameter:
    width, of it and its gradient; gathered, of it while it is gathered; master, of the fp32 master copy, or 0; moments,
    of Adam's state. keeps_gradients: whether stage 1 keeps gradients of others' shards after backward, as in the paper.
    """
    share, whole = parameters / ranks, width * parameters
    return {"parameters": width * share if stage == 3 else whole,
            "gradients": whole if stage == 0 or (stage == 1 and keeps_gradients) else width * share,
            "master copy": master * (share if stage else parameters),
            "optimizer state": moments * (share if stage else parameters),
            "peak parameters": width * share + gathered * layer if stage == 3 and ranks > 1 else whole,
            "peak gradients": width * share + gathered * layer if stage > 1 else whole}


def report(account, expected):
    """Print a line for each rank and one for the formula, in bytes. Returns what each rank counted, in their order."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, account.bytes)
    names = [*ROLES, "sum", *(name for name in every[0] if "peak" in name)]
    print("bytes between backward and optimizer step, and the peaks of that step:")
    print("       ", *(f"{name:>15}" for name in names))
    for title, row in [*((f"rank {rank}", row) for rank, row in enumerate(every)), ("formula", expected)]:
        row = {"allocator's peak": math.nan} | row | {"sum": sum(row[role] for role in ROLES)}
        print(f"{title:7}", *(f"{row[name]:15,.0f}" for name in names))
    return every

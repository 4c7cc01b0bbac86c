"""What footprint needs of PyTorch's internals, which another version may not have."""

import pkgutil

from cluster.footprint.report import Refusal

PRIVATE_NAMES = (  # as pkgutil.resolve_name() takes them
    "torch.testing._internal.distributed.fake_pg:FakeStore",  # the fake process group
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils.flop_counter:flop_registry",
    "torch.distributed.distributed_c10d:_resolve_process_group",  # a group by its name
    "torch._C._distributed_c10d:Reducer._rebuild_buckets",  # DDP on fake tensors
    "torch.distributed.device_mesh:DeviceMesh.__init__",
    "torch.nn:Module._apply",  # to() and to_empty() of fake tensors
    "torch.amp:GradScaler._maybe_opt_step",
    "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    "torch.distributed.tensor._sharding_prop:"
    "ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch:UntypedStorage._cdata",  # a storage's identity
    "torch:UntypedStorage.resize_",  # by which FSDP frees gathered parameters
)


def check_internals() -> None:
    """Raise Refusal if the installed PyTorch lacks one of the names."""
    import torch
    import torch.distributed.tensor
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            raise Refusal(f"PyTorch {torch.__version__} has no {name.replace(':', '.')}: use the "
                          "version in requirements.txt") from None

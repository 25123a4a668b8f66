"""Parameters by their own names, whatever a network was wrapped in, and this rank's piece of each.

Source: spec/worldplay2.md i.2 (wrappers are stripped); spec/faults.md F3.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What compilation, activation checkpointing and sharding put into names."""


def canonical(name: str) -> str:
    """A name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by its canonical name, in the order of the network; sharded ones as their shards.

    Not between forward and backward: what a pass has gathered is given back first, because the root of a
    sharded network keeps its gathered parameters, by the same names, after a pass without gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found = {canonical(name): parameter for name, parameter in model.named_parameters()}
    if len(found) != sum(1 for _ in model.parameters()):
        raise ValueError("two parameters have one name once wrappers are stripped")
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor, sharing its memory; a plain tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Optimizers of float32 masters, whole or sharded, and what is done to gradients and rates around a step.

Bytes a parameter with its gradient: AdamW 16; beta1 = 0 without its first moment 12; 8-bit moments 10.
Source: spec/worldplay2.md n.4; spec/faults.md F1, F3.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.config import ConfigError
from trainer.curriculum import OptimConfig


class OptimError(ValueError):
    """Parameters or gradients that no step can be made with."""


class SecondMomentAdam(torch.optim.Optimizer):
    """AdamW at beta1 = 0: the first moment is the gradient, so none is kept.

    Same operations in the same order as torch's AdamW, on the local part of each parameter.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, beta2: float, eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta2 = group["lr"], group["beta2"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                weight, grad, square = map(_local, (parameter, parameter.grad, state["exp_avg_sq"]))
                weight.mul_(1 - lr * group["weight_decay"])
                square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                correction = math.sqrt(1 - beta2 ** state["step"].item())
                weight.addcdiv_(grad, (square.sqrt() / correction).add_(group["eps"]), value=-lr)


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, *, offload: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained. offload: they live on the host.

    Raises OptimError with the name of one that is not float32, or when none is trained; ConfigError for
    8-bit moments with offload (they fail together: pytorch/ao issue 1931), or with beta1 = 0.
    """
    params = []
    for name, parameter in named:
        if parameter.requires_grad:
            if parameter.dtype is not torch.float32:
                raise OptimError(f"master {name} is {parameter.dtype}: it must be float32")
            params.append(parameter)
    if not params:
        raise OptimError("no parameter is trained")
    if config.eight_bit and offload:
        raise ConfigError("eight_bit and offload do not work together: choose one of them")
    if config.eight_bit and config.betas[0] == 0:
        raise ConfigError("eight_bit keeps a first moment, betas[0] = 0 needs none: choose one of them")
    if config.betas[0] == 0:
        return SecondMomentAdam(params, config.lr, config.betas[1], config.eps, config.weight_decay)
    common: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.eight_bit:
        quantised: torch.optim.Optimizer = importlib.import_module("torchao.optim").AdamW8bit(
            params, **common
        )
        return quantised
    return torch.optim.AdamW(params, **common)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step 0 .. steps - 1: a linear rise over `warmup` steps, then constant, then a linear fall
    over the last `decay` share of the steps, to zero just behind the last one."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    falling = config.decay * steps
    fall = min(1.0, (steps - step) / falling) if falling else 1.0
    return config.lr * rise * max(0.0, fall)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step; torchao keeps it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients so that their global norm is at most `limit`; returns the norm before.

    The norm is that of the whole network on every rank: squares are summed over the mesh dimensions along
    which a parameter is sharded, once for those along which it is replicated. Raises OptimError, on every
    rank, when it is not finite. Source: spec/faults.md F1.
    """
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    squares = [(grad, _local(grad).double().square().sum()) for _, grad in named]
    norm = math.sqrt(_over_shards(squares))
    if not math.isfinite(norm):
        bad = [name for (name, _), (_, square) in zip(named, squares) if not bool(torch.isfinite(square))]
        here = f", here in {', '.join(bad[:3])}" if bad else ""
        raise OptimError(f"the gradient norm is {norm}{here}: nothing was updated")
    if norm > limit:
        torch._foreach_mul_([_local(grad) for _, grad in named], limit / norm)
    return norm


def _over_shards(squares: list[tuple[Tensor, Tensor]]) -> float:
    """Sum of (gradient, square of its local part) over the whole network."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for grad, square in squares:
        if isinstance(grad, DTensor):
            dims = tuple(d for d, p in enumerate(grad.placements) if isinstance(p, Shard))
            groups[grad.device_mesh, dims].append(square)
        else:
            groups[None, ()].append(square)
    total = 0.0
    for (mesh, dims), parts in groups.items():
        part = torch.stack(parts).sum()
        if mesh is not None:
            part = part.to(mesh.device_type)
            for dim in dims:
                dist.all_reduce(part, group=mesh.get_group(dim))
        total += part.item()
    return total


@dataclass(frozen=True)
class Parked:
    """State of one role that left its device: storages that are empty now, and their bytes on the host."""

    held: tuple[tuple[torch.UntypedStorage, Tensor], ...]

    @property
    def bytes(self) -> int:
        return sum(host.numel() for _, host in self.held)

    def unpark(self) -> None:
        """Bring everything back to where it was. Once; every tensor is the same object as before."""
        for storage, host in self.held:
            storage.resize_(host.numel())
            storage.copy_(host.untyped_storage())


def park(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Parked:
    """Move weights and moments to the host, so that another role has the device; gradients must be gone.

    Storages are emptied, not replaced: the optimizer and the shards keep their tensors.
    Raises OptimError when a gradient is left.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise OptimError(f"{name} still has a gradient: step and zero_grad() before parking")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
    for tensor in tensors:
        for plain in _plain(tensor.detach()):
            storage = plain.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in held:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=plain.is_cuda)
                host.untyped_storage().copy_(storage)
                held[storage.data_ptr()] = (storage, host)
    for storage, _ in held.values():
        storage.resize_(0)
    return Parked(tuple(held.values()))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the values of a sharded or quantised one."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from _plain(part)
    else:
        yield tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

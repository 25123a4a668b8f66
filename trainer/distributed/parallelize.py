"""Parallelism as a function applied to single-device code from outside, in one order:

what is trained -> sequence -> activation checkpointing -> compile -> shards (FSDP2, a group a block and the
root). Names of parameters stay what they are in the bare network: nothing is wrapped.
Source: spec/worldplay2.md n.4; spec/faults.md F3, F5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from trainer.config import ConfigError
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.ulysses import Ulysses
from trainer.lora import LowRank
from trainer.model.wan import WanModel


class DtypeError(ValueError):
    """A master or a buffer that is not float32."""


def train_only(model: WanModel, prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """Train the parameters whose names begin with one of `prefixes` ("" for all), freeze the others.

    Before `parallelize`: shards fix what has a gradient. Returns the names of the trained.
    Raises ConfigError when a prefix names nothing. Source: spec/faults.md F3.
    """
    if isinstance(model, FSDPModule):
        raise ConfigError("what is trained is chosen before the network is sharded")
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise ConfigError(f"no parameter begins with {prefix!r}, which the stage trains")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
    return tuple(name for name in names if name.startswith(prefixes))


def freeze(model: WanModel, dtype: torch.dtype = torch.bfloat16) -> WanModel:
    """A role that is only read (a teacher, a real score): 2 bytes a parameter, no gradient."""
    return model.requires_grad_(False).to(dtype).eval()


def parallelize(model: WanModel, mesh: Mesh, parallel: Parallel) -> WanModel:
    """The same network, sharded over the mesh; it must not have been used before, and lies on the host or on
    the device of the mesh; on the way a block at a time is whole on the device. Its `forward` is the only
    method that gathers weights.

    Raises DtypeError, with names, when a trained parameter or a buffer is not float32; ConfigError when a
    sequence cannot be shared.
    """
    check_dtypes(model)
    heads = model.config.heads
    if heads % mesh.sequence_world:
        raise ConfigError(
            f"{heads} heads do not divide by {mesh.sequence_world} ranks a sequence: use a divisor of {heads}"
        )
    if mesh.sequence_world > 1:
        model.spread = Ulysses(mesh.sequence_group)
    for block in model.blocks:
        forward = block.forward
        if parallel.checkpointing:
            # Nothing in the network draws random numbers.
            forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        if parallel.compile:
            forward = torch.compile(forward)
        block.forward = forward
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    shard = functools.partial(
        fully_shard,
        mesh=mesh.shards,
        # Inputs keep their dtypes: torch's cast reaches into dataclasses, and would turn noise levels,
        # modulation and rotations to bf16. The network casts what it computes with.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=parallel.precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=(
            CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if parallel.offload else OffloadPolicy()
        ),
    )
    for block in model.blocks:
        for layer in block.modules():
            if isinstance(layer, LowRank):  # trained, in fp32, beside frozen weights
                shard(layer.addition)
        shard(block)
    shard(model)
    return model.train(not frozen)


def buffer_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Every buffer by name, as the start of a run logs it."""
    return {name: buffer.dtype for name, buffer in model.named_buffers()}


def check_dtypes(model: nn.Module) -> None:
    """Raises DtypeError with the names of trained parameters, and of buffers of real numbers, that are not
    float32. Source: spec/faults.md F5."""
    _refuse(
        "trained parameters",
        ((name, p.dtype) for name, p in model.named_parameters() if p.requires_grad),
    )
    _refuse("buffers", ((n, d) for n, d in buffer_dtypes(model).items() if d.is_floating_point))


def _refuse(what: str, dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    wrong = [f"{name} ({dtype})" for name, dtype in dtypes if dtype is not torch.float32]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DtypeError(f"{what} must be float32: {', '.join(wrong[:3])}{more}")


def accumulate(model: WanModel, parallel: Parallel, *, last: bool) -> None:
    """Before the backward of a micro-batch: say whether it is the last of the step.

    Only the last one waits for other ranks: for the reduction of all with `whole_sums`, else for that between
    replicas. The sum of micro-batches is exact either way.
    """
    assert isinstance(model, FSDPModule)
    if parallel.whole_sums:
        model.set_requires_gradient_sync(last)
    else:
        model.set_requires_all_reduce(last)

"""The processes of a run, and which of them share what.

One code path: a run without torchrun is a group of one process over a store in its own memory, so no port is
opened. Ranks are laid out (replicate, shard, sequence), the last fastest: neighbours share a sequence.
Source: spec/worldplay2.md n.4, g.4; spec/faults.md S5.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schemas.errors import UserError
from trainer.config import ConfigError

T = TypeVar("T")


class StalledError(RuntimeError):
    """Ranks that did not come to where the others wait."""


class RanksDifferError(RuntimeError):
    """Ranks that are about to run different branches, so that a collective would wait for ever."""


class Precision(StrEnum):
    """What weights and activations are computed in. Masters, gradients and their sums stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self is Precision.FLOAT32 else torch.bfloat16


@dataclass(frozen=True)
class Parallel:
    """How one network lies on the ranks. World size = replicate * shard * sequence.

    replicate: copies of the sharded network (hybrid sharding); shard: ranks that share one copy, 0 for all
    that are left; sequence: ranks that share one sample's sequence, and hold shards of the copy too.
    checkpointing: recompute blocks in backward. compile: torch.compile each block. offload: masters, their
    gradients and moments live on the host (FSDP CPU offload). whole_sums: micro-batches add up unsharded
    gradients, reduced once a step, at 4 bytes a parameter on every device (70 GB for `a14b`); else each
    micro-batch is reduced into the shards. timeout_s: longest wait for another rank.
    """

    replicate: int = 1
    shard: int = 0
    sequence: int = 1
    precision: Precision = Precision.FLOAT32
    checkpointing: bool = True
    compile: bool = False
    offload: bool = False
    whole_sums: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision(self.precision))
        if min(self.replicate, self.sequence) < 1 or self.shard < 0 or self.timeout_s <= 0:
            raise ConfigError(
                f"replicate {self.replicate}, shard {self.shard}, sequence {self.sequence}, "
                f"timeout {self.timeout_s} s: positive numbers needed (shard 0: all that are left)"
            )

    def shards(self, world: int) -> int:
        """Ranks that share a copy, without those of a sequence. Raises ConfigError when `world` is no
        product of the three."""
        shard = self.shard or world // (self.replicate * self.sequence)
        if self.replicate * shard * self.sequence != world:
            raise ConfigError(
                f"{world} ranks are not replicate {self.replicate} x shard {self.shard or '(all left)'} x "
                f"sequence {self.sequence}: start another number, or change one of the three"
            )
        return shard


@dataclass(frozen=True)
class Mesh:
    """The place of this process. shards: (replicate, shard) or (shard,) of parameters; a rank of a sequence
    is one of the shards. sequences: (data, sequence). device: where this process computes. hosts: all ranks,
    over gloo whatever the device, whose barrier can name who is missing."""

    device: torch.device
    shards: DeviceMesh
    sequences: DeviceMesh
    hosts: dist.ProcessGroup
    timeout: timedelta

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    @property
    def data_rank(self) -> int:
        """Which share of the batch this process reads; ranks of one sequence read the same."""
        return self.sequences.get_local_rank("data")

    @property
    def data_world(self) -> int:
        return self.sequences.size(0)

    @property
    def sequence_rank(self) -> int:
        return self.sequences.get_local_rank("sequence")

    @property
    def sequence_world(self) -> int:
        return self.sequences.size(1)

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        return self.sequences.get_group("sequence")

    def meet(self, where: str) -> None:
        """Wait until every rank has come here; a call a step names a rank that stalls or died.

        Raises StalledError, with the missing ranks, after the timeout. Source: spec/faults.md S5.
        """
        if self.world == 1:
            return
        try:
            dist.monitored_barrier(self.hosts, timeout=self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise StalledError(
                f"rank {self.rank} of {self.world} waited {self.timeout.total_seconds():g} s at {where}: "
                f"{' '.join(str(error).split())}"
            ) from error

    def gather(self, values: Tensor) -> Tensor:
        """[n] of each rank -> [world, n], the same on all. For the log: it waits for every rank."""
        values = values.to(self.device)
        if self.world == 1:
            return values[None]
        parts = [torch.empty_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)
        return torch.stack(parts)

    def agree(self, what: str, value: int) -> None:
        """Before a step: every rank must have the same `value` (the history of the batch, the number of
        micro-batches), or they would run different branches. Raises RanksDifferError on all, with the ranks
        that differ from the first. Source: spec/faults.md S5."""
        given = self.gather(torch.tensor([value])).flatten().tolist()
        others = [f"rank {rank} has {other}" for rank, other in enumerate(given) if other != given[0]]
        if others:
            raise RanksDifferError(f"{what}: rank 0 has {given[0]}, {', '.join(others[:8])}; all must agree")

    def first(self, work: Callable[[], T]) -> T:
        """What the first rank finds, on every rank; an error that it ends with, too.

        What depends on a disk is asked here alone: nodes do not see a new file of another at the same moment,
        and ranks that decide by themselves run different branches. `work` must not wait for other ranks.
        """
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = work()
            except (UserError, ConfigError, OSError) as error:
                found[1] = error
        if self.world > 1:
            dist.broadcast_object_list(found, src=0, group=self.hosts)
        if found[1] is not None:
            raise found[1]
        return cast(T, found[0])

    def mean(self, value: Tensor) -> Tensor:
        """Mean over all ranks of a tensor of one shape, the same on all."""
        return self.gather(value.reshape(-1)).mean(0).reshape(value.shape)

    def close(self) -> None:
        """Leave the group; a process can then make another. A rank of torchrun stays in it (`end_rank`)."""
        if not dist.is_torchelastic_launched():
            dist.destroy_process_group()


def end_rank() -> None:
    """End a rank of torchrun here and now, with success; nothing in a process of its own.

    Threads of gloo abort a process that tears itself down beside others: one of 8 launches of two ranks ended
    with SIGABRT after all its work was done, which torchrun takes for a failure.
    """
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def make_mesh(parallel: Parallel, device: str | None = None) -> Mesh:
    """Join the run that torchrun started, or make one of this process alone.

    device: "cpu" or "cuda"; CUDA where there is one if None. Raises ConfigError when the number of ranks is
    not replicate x shard x sequence.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind)
    timeout = timedelta(seconds=parallel.timeout_s)
    if kind == "cuda":
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        alone = not dist.is_torchelastic_launched()
        parallel.shards(1 if alone else int(os.environ["WORLD_SIZE"]))
        group: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
        # gloo beside nccl: host tensors of an offloaded run, and asynchronous saves, need it.
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, **group)
    shard = parallel.shards(dist.get_world_size())
    sizes = (parallel.replicate, shard * parallel.sequence)
    shards = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
    sequences = init_device_mesh(
        kind, (parallel.replicate * shard, parallel.sequence), mesh_dim_names=("data", "sequence")
    )
    if parallel.replicate == 1:
        shards = shards["shard"]
    return Mesh(place, shards, sequences, _hosts(timeout), timeout)


def _hosts(timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group

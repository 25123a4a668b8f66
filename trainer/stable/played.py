"""A rollout of the student, without gradient, and all that scoring and replay read of it.

Every chunk runs all steps of the schedule and only its final prediction enters history; of one step, drawn
by (seed, step, chunk), the state that it started from is kept. Source: spec/worldplay2.md g.1, g.2 step 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.model.kvcache import KvCache
from trainer.model.wan import WanModel
from trainer.noise import keyed
from trainer.rollout import Rollout, Scene, Settings
from trainer.schedule import Block, PddSchedule
from trainer.stable.watch import Pictures


@dataclass(frozen=True)
class Snapshot:
    """What one step of a chunk started from. state: [B, 16, 4, H, W]."""

    chunk: int
    block: Block
    state: Tensor


@dataclass(frozen=True)
class Played:
    """full: [B, 36, T, H, W], latents with their image condition; low: [B, 36, T / 2 - 2, H / 4, W / 4], of
    all chunks but the last. snapshots: one a chunk. caches: the final memory of each expert, whose prefixes
    are the memory before every chunk. seconds of the rollout are the caller's to measure."""

    scene: Scene
    full: Tensor
    low: Tensor
    snapshots: tuple[Snapshot, ...]
    caches: Mapping[str, KvCache]

    @property
    def chunks(self) -> int:
        return len(self.scene.prompts)

    @property
    def clean(self) -> Tensor:
        """[B, 16, T, H, W]."""
        return self.full[:, :16]

    def video(self) -> Played:
        """What was made, without the states and caches that replay alone reads."""
        return replace(self, snapshots=(), caches={})


def replayed_block(schedule: PddSchedule, seed: int, step: int, chunk: int) -> Block:
    """The step of a chunk that is replayed: uniform, the same for all videos of a batch and on every rank."""
    draw = torch.randint(len(schedule.blocks), (), generator=keyed(seed, step, chunk, "replay"))
    return schedule.blocks[int(draw)]


@torch.no_grad()
def play(
    preset: Preset,
    students: Mapping[str, WanModel],
    codec: Codec,
    scene: Scene,
    schedule: PddSchedule,
    seed: int,
    step: int,
    looked: Callable[[Pictures], None] = lambda pictures: None,
    device: torch.device | None = None,
) -> Played:
    """The videos of a scene by four steps a chunk. seed, step: key the noise and the replayed steps. looked:
    told what the videos look like, whose pixels are not kept."""
    noise_seed = int(torch.randint(2**62, (), generator=keyed(seed, step, "rollout")))
    rollout = Rollout(preset, students, codec, scene, Settings(noise_seed, few=schedule), device=device)
    full: list[Tensor] = []
    low: list[Tensor] = []
    snapshots: list[Snapshot] = []

    def painted() -> Iterator[Tensor]:
        for chunk in rollout.chunks():
            block = replayed_block(schedule, seed, step, chunk.index)
            snapshots.append(Snapshot(chunk.index, block, chunk.states[block.index]))
            full.append(chunk.full)
            if chunk.low is not None:
                low.append(chunk.low)
            yield chunk.pixels

    looked(Pictures.of(painted()))
    low = low or [full[0].new_zeros(len(full[0]), full[0].shape[1], 0, *preset.geometry.low_latent)]
    return Played(scene, torch.cat(full, 2), torch.cat(low, 2), tuple(snapshots), rollout.caches)

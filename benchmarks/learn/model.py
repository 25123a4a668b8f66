"""A finished stage of a run, and what it makes of many held-out clips at once: the next chunk, or frames that
are asked of its memory.

A chunk is sampled behind true latents in one masked pass a step, which is what a rollout over a cache
computes (tests/trainer hold the two equal); so a batch of clips costs one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jobs.train_data import TrainingData
from jobs.train_weights import from_run
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import Draw
from trainer.data.sample import make_batch
from trainer.model.layout import Frame, Kind, Layout, Rule, frame_queries, teacher_forced
from trainer.model.wan import WanModel
from trainer.noise import noise_of
from trainer.objectives.passes import forward
from trainer.run_folder import RunFolder
from trainer.sampler import ManySteps, many_steps
from trainer.schedule import Sigma, schedule_of

STEPS = ManySteps(steps=12, shift=5.0, guidance=1.0)
"""Of the sampler. 12 of UniPC: four of them at noise levels of the expert `high`."""
MASK = 4

Experts = Mapping[str, WanModel]


class LearnError(RuntimeError):
    """Evidence that cannot be taken; one line."""


def load_experts(run: Path, stage: str, preset: Preset) -> dict[str, WanModel]:
    """The averaged weights at the end of a stage, fp32."""
    folder, schedule = RunFolder(run), schedule_of(preset)
    return {e: from_run(folder, stage, e, preset, schedule).eval() for e in preset.experts}


def read_clips(data: TrainingData, preset: Preset, rows: list[int], latents: int, history: int) -> Batch:
    """Held-out clips from latent 0: rows of the held-out table. The target lies behind `history` chunks;
    without one, the history is asked itself."""
    target = latents - preset.chunk * history
    objective = Objective.CHUNKS if target else Objective.QUERIES
    stage = Stage("look", objective, None, 1, target or preset.chunk, (history,))
    stage = replace(stage, text_drop=0.0, field_drop=0.0)
    table = data.held_out
    draws = [Draw(k, 0, int(table.row[k]), history) for k in rows]
    return make_batch(draws, data.corpus.read, stage, preset, 0)


def usable(data: TrainingData, latents: int) -> list[int]:
    """Rows of the held-out table with so many latents whose actions are known."""
    table = data.held_out
    return np.flatnonzero(np.minimum(table.latents, table.actions_known) >= latents).tolist()


def with_actions(batch: Batch, rows: Tensor) -> Batch:
    """Other action rows for the target. rows: [B, 4, 6] or [4, 6]."""
    actions = batch.actions.clone()
    actions[:, -rows.shape[-2] :] = rows
    return replace(batch, actions=actions)


def window(preset: Preset, history: int) -> Layout:
    """Sink, last latent, and instead of the compressed frames the newest latents of as many tokens."""
    whole = teacher_forced(preset, history, 1)
    budget = whole.only(Kind.CMP).tokens // preset.grid.tokens
    stop = preset.chunk * history
    times = range(max(preset.sink, stop - preset.temporal - max(1, budget)), stop)
    frames = tuple(Frame(Kind.TMP, history, k, preset.grid) for k in times)
    return whole.only(Kind.SINK) + Layout(frames) + whole.only(Kind.PRED)


@torch.no_grad()
def next_chunk(
    experts: Experts,
    preset: Preset,
    batch: Batch,
    seed: int = 0,
    memory: Batch | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Latents [B, 16, 4, h, w] of the chunk behind each history. memory: whose latents the compressor reads;
    layout: another sequence than that of training."""
    layout = layout or teacher_forced(preset, batch.history, 1)
    return _sampled(experts, preset, batch, layout, Rule.CAUSAL, seed, memory, image=True)


@torch.no_grad()
def answers(
    experts: Experts,
    preset: Preset,
    batch: Batch,
    times: tuple[int, ...],
    seed: int = 0,
    memory: Batch | None = None,
) -> Tensor:
    """Latents [B, 16, Q, h, w] that are asked of the memory at `times`."""
    layout = frame_queries(preset, batch.history, times)
    return _sampled(experts, preset, batch, layout, Rule.FULL, seed, memory, image=False)


def _sampled(
    experts: Experts,
    preset: Preset,
    batch: Batch,
    layout: Layout,
    rule: Rule,
    seed: int,
    memory: Batch | None,
    image: bool,
) -> Tensor:
    times = list(layout.only(Kind.PRED).times)
    y = batch.condition[:, :, times]
    if not image:
        y = torch.cat(
            [torch.zeros_like(y[:, :MASK]), batch.condition[:, MASK:, -1:].expand_as(y[:, MASK:])], 1
        )
    noise = noise_of(
        batch.positions, (16, len(times), *preset.geometry.latent), batch.latents.device, seed, "sample"
    )

    def velocity(state: Tensor, sigma: Sigma) -> Tensor:
        levels = torch.full((len(batch), len(times)), sigma, dtype=torch.float64)
        target = torch.cat([state, y], dim=1)
        model = experts[preset.expert(sigma)]
        return forward(model, batch, layout, rule, target, levels, memory=memory).velocity

    return many_steps(velocity, noise, STEPS)


@dataclass(frozen=True)
class Decoded:
    """Pictures of a chunk behind a history, in [-1, 1]: [B, 3, F, H, W]; last: [B, 3, 1, H, W] before it."""

    pixels: Tensor
    last: Tensor


def decode(codec: Codec, batch: Batch, preset: Preset, target: Tensor) -> Decoded:
    """A chunk [B, 16, 4, h, w] behind the true history of a batch."""
    known = batch.latents[:, :, : preset.chunk * batch.history]
    if not known.shape[2]:
        pixels, _ = codec.decode(target)
        return Decoded(pixels, pixels[:, :, :1])
    before, cache = codec.decode(known)
    pixels, _ = codec.decode(target, cache)
    return Decoded(pixels, before[:, :, -1:])


def db(left: Tensor, right: Tensor) -> Tensor:
    """PSNR [B] of pictures in [-1, 1]: [B, 3, F, H, W]."""
    return 10 * torch.log10(4.0 / (left - right).square().mean(dim=(1, 2, 3, 4)))

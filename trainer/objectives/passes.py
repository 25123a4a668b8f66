"""One forward pass of a network over a batch: memory from its clean latents, targets as they are given.

Source: spec/worldplay2.md a.3, a.5, c.2, d.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from trainer.config import LATENTS_PER_PAIR, ModelConfig
from trainer.data.batch import Batch
from trainer.model.attention import Backend
from trainer.model.kvcache import RawText
from trainer.model.layout import Kind, Layout, Rule, chunk_prompts
from trainer.model.wan import History, Inputs, Outputs, Plan, make_plan


class Network(Protocol):
    """What an objective needs of an expert: `WanModel`, whole or sharded, or a stand-in of a test."""

    @property
    def config(self) -> ModelConfig: ...

    def __call__(self, inputs: Inputs, /) -> Outputs: ...


def forward(
    model: Network,
    batch: Batch,
    layout: Layout,
    rule: Rule,
    target: Tensor,
    levels: Tensor,
    *,
    negative: bool = False,
    rows: Tensor | None = None,
    memory: Batch | None = None,
) -> Outputs:
    """What a network says of the predicted frames of a layout.

    target: [B, 36, P, H, W], those frames noisy, with their condition. levels: [B, P] their noise levels.
    negative: read the negative prompt, memory too. rows: [B, P, R, K] coefficients of a bank of heads.
    memory: whose latents the compressor reads in place of the batch's own, for controls.
    """
    device = batch.latents.device
    prompts = (0,) * len(layout) if negative else prompts_of(batch, layout)
    text = batch.negative[None, None].expand(len(batch), 1, -1, -1) if negative else batch.text
    return model(
        Inputs(
            plan(model.config, layout, rule, prompts, backend(device), device),
            torch.cat([memory_frames(batch, layout), target], dim=2),
            levels,
            batch.actions,
            RawText(text),
            history(batch if memory is None else memory, layout),
            rows=rows,
        )
    )


@functools.lru_cache(maxsize=32)
def plan(
    config: ModelConfig,
    layout: Layout,
    rule: Rule,
    prompts: tuple[int, ...],
    backend: Backend,
    device: torch.device,
) -> Plan:
    """Plans are made again and again of a few layouts: a history, a bucket and a map of prompts each."""
    return make_plan(config, layout, rule=rule, prompts=prompts, backend=backend, device=device)


def backend(device: torch.device) -> Backend:
    return Backend.FLEX if device.type == "cuda" else Backend.DENSE


def prompts_of(batch: Batch, layout: Layout) -> tuple[int, ...]:
    """The prompt that each frame reads."""
    return tuple(batch.prompts[chunk] for chunk in chunk_prompts(layout))


def memory_frames(batch: Batch, layout: Layout) -> Tensor:
    """[B, 36, F, H, W]: the clean full-resolution frames of the memory, with their own condition."""
    times = [frame.time for frame in layout.frames if frame.kind in (Kind.SINK, Kind.TMP)]
    return torch.cat([batch.latents[:, :, times], batch.condition[:, :, times]], dim=1)


def history(batch: Batch, layout: Layout) -> History | None:
    """The chunks that the compressed frames of a layout stand for, from latent 0."""
    pairs = layout.count(Kind.CMP)
    if not pairs:
        return None
    latents = LATENTS_PER_PAIR * pairs
    full = torch.cat([batch.latents[:, :, :latents], batch.condition[:, :, :latents]], dim=1)
    return History(full, batch.low[:, :, :pairs])

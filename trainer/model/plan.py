"""Everything about a pass that is known before its tensors, and where its tokens lie.

Source: spec/worldplay2.md a.4, n.3, g.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.attention import Backend, Mask, attend, make_mask
from trainer.model.kvcache import check_horizon
from trainer.model.layout import NOTHING, Layout, Rule
from trainer.model.rope import rotations


class InputError(ValueError):
    """Tensors that do not fit the plan of the pass."""


@dataclass(frozen=True)
class Plan:
    """Everything about a pass that is known before its tensors.

    layout: the sequence, or the stretch of `whole` that is here; all but context, mask and whole are of it.
    context: the cached memory before it. prompts: which of the sample's prompts each frame reads.
    prompt_runs: (start, stop, prompt) in tokens. times: [L] int64, rows of the action table.
    cos, sin: [N, d / 2] fp32.
    """

    layout: Layout
    context: Layout
    prompts: tuple[int, ...]
    prompt_runs: tuple[tuple[int, int, int], ...]
    times: Tensor
    cos: Tensor
    sin: Tensor
    mask: Mask
    whole: Layout

    def part(self, first: int, stop: int) -> Plan:
        """What frames [first, stop) are made of; the mask stays that of the whole sequence."""
        if (first, stop) == (0, len(self.layout)):
            return self
        layout = Layout(self.layout.frames[first:stop])
        start = Layout(self.layout.frames[:first]).tokens
        tokens = slice(start, start + layout.tokens)
        prompts = self.prompts[first:stop]
        return replace(
            self,
            layout=layout,
            prompts=prompts,
            prompt_runs=_prompt_runs(layout, prompts),
            times=self.times[first:stop],
            cos=self.cos[tokens],
            sin=self.sin[tokens],
        )


def make_plan(
    config: ModelConfig,
    layout: Layout,
    *,
    context: Layout = NOTHING,
    rule: Rule = Rule.CAUSAL,
    prompts: tuple[int, ...] | None = None,
    backend: Backend = Backend.DENSE,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a sequence after cached memory. prompts: one for each frame; all read prompt 0 if None.

    Raises HorizonError when a frame lies beyond what the weights can place.
    """
    check_horizon(max(layout.times) + 1, config.max_latents)
    chosen = (0,) * len(layout) if prompts is None else prompts
    if len(chosen) != len(layout):
        raise InputError(f"{len(chosen)} prompts for {len(layout)} frames")
    device = torch.device(device)
    cos, sin = rotations(layout.positions().to(device), config.head_dim, config.theta)
    mask = make_mask(layout, context + layout, rule, backend, device)
    times = torch.tensor(layout.times, device=device)
    return Plan(layout, context, chosen, _prompt_runs(layout, chosen), times, cos, sin, mask, layout)


def _prompt_runs(layout: Layout, prompts: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    token = 0
    for frame, prompt in zip(layout.frames, prompts):
        end = token + frame.grid.tokens
        if runs and runs[-1][2] == prompt:
            runs[-1] = (runs[-1][0], end, prompt)
        else:
            runs.append((token, end, prompt))
        token = end
    return tuple(runs)


Past = tuple[list[Tensor], list[Tensor]]
"""Cached keys and values of a block by segment, [B, N, heads, d] each, of the heads that are here."""


class Attended(NamedTuple):
    """out: [B, own N, heads, d]. key, value: [B, N, heads, d] of the whole sequence as this process caches
    them: of all heads, or of its share."""

    out: Tensor
    key: Tensor
    value: Tensor


def over_memory(
    query: Tensor, key: Tensor, value: Tensor, past: Past, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over cached memory and the sequence itself; its keys and values as they were given."""
    keys, values = torch.cat([*past[0], key], dim=1), torch.cat([*past[1], value], dim=1)
    return attend(query, keys, values, mask), key, value


class Spread(Protocol):
    """How the frames of a sequence are spread over processes: each has a stretch of whole frames, or none,
    through all blocks. The network is told from outside, and knows of no process."""

    def share(self, layout: Layout) -> tuple[int, int]:
        """The frames [first, stop) that this process has."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, past: Past, mask: Mask, layout: Layout
    ) -> Attended:
        """Attention of the whole sequence of `layout` over the cached memory and itself, from [B, own N,
        heads, d] to the same."""

    def gather(self, predicted: Tensor, layout: Layout) -> Tensor:
        """[B, own N, D] of the predicted frames -> [B, N, D] of all of them."""


class Here:
    """All frames are on this process."""

    def share(self, layout: Layout) -> tuple[int, int]:
        return 0, len(layout)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, past: Past, mask: Mask, layout: Layout
    ) -> Attended:
        return Attended(*over_memory(query, key, value, past, mask))

    def gather(self, predicted: Tensor, layout: Layout) -> Tensor:
        return predicted


HERE = Here()

"""Floating-point operations of a pass, exact, from what is known before its tensors.

Counted: every matrix product (2 m n k), every convolution, and attention by exactly the pairs of tokens that
may see each other (`layout.visible`), whatever a backend computes beside them. Not counted, as everywhere:
norms, activations, rotary turns, softmax, sums and shortcuts without parameters, under 1 % at full size.
Source: spec/worldplay2.md a.1, b, c.1, n.5.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from math import prod

import torch

from trainer.config import LATENTS_PER_PAIR, ModelConfig
from trainer.curriculum import Objective, Solver, Stage
from trainer.model.layout import NOTHING, Kind, Layout, Rule, visible
from trainer.model.memory import SPACE_FOLD
from trainer.model.wan import WanModel


@dataclass(frozen=True)
class Flops:
    """One forward pass of one sample, by part.

    embed: patches of full and low resolution. memory: the fine branch of the compressor. conditions: time,
    modulation, action and text, once a frame or a prompt. linear, attention, cross: inside the blocks, the
    text's keys and values in `cross`. head: of the predicted tokens.
    """

    embed: int
    memory: int
    conditions: int
    linear: int
    attention: int
    cross: int
    head: int

    @property
    def blocks(self) -> int:
        """What block checkpointing computes a second time."""
        return self.linear + self.attention + self.cross

    @property
    def total(self) -> int:
        return self.embed + self.memory + self.conditions + self.blocks + self.head

    def training(self, *, checkpointing: bool, share: float = 1.0) -> float:
        """Forward and backward, which is two products for each one of the forward pass; with checkpointing
        the blocks run forward twice. share: of the parameters that are trained; the others' gradients, one of
        the two, are not made, and attention has no parameters. Slightly too much: nothing asks for the
        gradient of a network's input.
        """
        unasked = (1.0 - share) * (self.total - self.attention)
        return 3 * self.total - unasked + (self.blocks if checkpointing else 0)


def visible_pairs(queries: Layout, keys: Layout, rule: Rule) -> int:
    """Pairs of tokens (query, key) that attention works on."""
    sizes_q, sizes_k = (
        torch.tensor([frame.grid.tokens for frame in layout.frames], dtype=torch.int64)
        for layout in (queries, keys)
    )
    return int((visible(queries, keys, rule).long() * sizes_q[:, None] * sizes_k[None]).sum())


def count(
    config: ModelConfig,
    layout: Layout,
    rule: Rule,
    *,
    prompts: int = 1,
    context: Layout = NOTHING,
    cached_text: bool = False,
    bank: tuple[int, int] | None = None,
) -> Flops:
    """One forward pass of one sample.

    layout: the sequence, whose compressed frames are made from as many pairs of latents. prompts: how many
    the sample has. context: cached memory before it. cached_text: keys and values of the text are given.
    bank: (R, K), rows of coefficients over heads, for few-step heads; None for one velocity.
    """
    dim, tokens, frames = config.dim, layout.tokens, len(layout)
    text_tokens = prompts * config.text_len
    predicted = layout.only(Kind.PRED)
    padding = layout.only(Kind.PAD).tokens

    conditions = frames * _chain(config.freq_dim, dim, dim) + frames * _linear(dim, 6 * dim)
    conditions += frames * _chain(2, *config.action_hidden, dim)
    conditions += 0 if cached_text else text_tokens * _chain(config.text_dim, dim, dim)
    # Queries, keys, values, output; the feed-forward; W1 h and W2 of the action, and W1 e once a frame.
    linear = tokens * (4 * _linear(dim, dim) + _chain(dim, config.ffn, dim) + 2 * _linear(dim, dim))
    linear += frames * _linear(dim, dim)
    attention = _attention(visible_pairs(layout, context + layout, rule), dim)
    cross = tokens * 2 * _linear(dim, dim) + _attention(tokens * config.text_len, dim)
    cross += 0 if cached_text else text_tokens * 2 * _linear(dim, dim)
    return Flops(
        embed=(tokens - padding) * _linear(config.in_dim * prod(config.patch), dim),
        memory=_compressor(config, layout),
        conditions=conditions,
        linear=config.layers * linear,
        attention=config.layers * attention,
        cross=config.layers * cross,
        head=_head(config, predicted, bank),
    )


def forward_flops(
    config: ModelConfig, layout: Layout, rule: Rule, *, prompts: int = 1, context: Layout = NOTHING
) -> int:
    """FLOPs of one forward pass of one sample; see `count`."""
    return count(config, layout, rule, prompts=prompts, context=context).total


def training_flops(
    config: ModelConfig,
    layout: Layout,
    rule: Rule,
    *,
    prompts: int = 1,
    context: Layout = NOTHING,
    checkpointing: bool = False,
) -> float:
    """FLOPs of one forward and backward pass of one sample; see `Flops.training`."""
    flops = count(config, layout, rule, prompts=prompts, context=context)
    return flops.training(checkpointing=checkpointing)


def stage_flops(
    config: ModelConfig, stage: Stage, layout: Layout, rule: Rule, *, prompts: int, heads: int
) -> float:
    """FLOPs of one sample of a step of stages 1 to 4, without what checkpointing computes twice: the network
    in training, and of stage 4 the passes of its teacher.

    heads: few-step heads of the student, where the stage trains them.
    """
    share = trained_share(config, stage.trainable)
    if stage.objective is not Objective.PDD:
        return count(config, layout, rule, prompts=prompts).training(checkpointing=False, share=share)
    student = count(config, layout, rule, prompts=prompts, bank=(2, heads))
    teacher = count(config, layout, rule, prompts=prompts).total
    if stage.pdd.guidance != 1.0:
        teacher += count(config, layout, rule).total
    calls = 2 if stage.pdd.solver is Solver.MIDPOINT else 1
    return student.training(checkpointing=False, share=share) + calls * teacher


@functools.lru_cache(maxsize=16)
def trained_share(config: ModelConfig, prefixes: tuple[str, ...]) -> float:
    """Of the parameters, those whose names begin with one of `prefixes`."""
    if "" in prefixes:
        return 1.0
    with torch.device("meta"):
        sizes = {name: value.numel() for name, value in WanModel(config).named_parameters()}
    return sum(n for name, n in sizes.items() if name.startswith(prefixes)) / sum(sizes.values())


def _linear(width: int, out: int) -> int:
    return 2 * width * out


def _chain(*widths: int) -> int:
    return sum(_linear(a, b) for a, b in itertools.pairwise(widths))


def _attention(pairs: int, width: int) -> int:
    """Scores and their mix of values."""
    return 2 * _linear(pairs, width)


def _head(config: ModelConfig, predicted: Layout, bank: tuple[int, int] | None) -> int:
    rows, heads = (1, 0) if bank is None else bank
    mixing = len(predicted) * rows * heads * _linear(config.dim + 1, config.patch_out)
    return mixing + predicted.tokens * rows * _linear(config.dim, config.patch_out)


def _compressor(config: ModelConfig, layout: Layout) -> int:
    """The fine branch over the latents behind the compressed frames. Source: spec/worldplay2.md c.1."""
    compressed = layout.only(Kind.CMP)
    if not len(compressed):
        return 0
    memory, grid = config.memory, compressed.frames[0].grid
    frames, area = LATENTS_PER_PAIR * len(compressed), grid.tokens * SPACE_FOLD**2
    flops = frames * area * _linear(config.in_dim, memory.stem)
    widths = (memory.stem, *memory.down, *memory.flat)
    for index, (width, out) in enumerate(itertools.pairwise(widths)):
        flops += frames * area * _linear(27 * width, out)
        if index >= len(memory.down):
            flops += frames * area * _linear(width, out)
            continue
        area //= 4
        flops += frames * area * _linear(9 * out, out)
        if index == 0:
            frames //= LATENTS_PER_PAIR
            flops += frames * area * _linear(3 * out, out)
    width = widths[-1]
    mixing = area * (_linear(width, 3 * width) + _linear(width, width)) + _attention(area * area, width)
    flops += memory.attention_blocks * frames * mixing
    return flops + frames * area * _linear(width, config.dim)

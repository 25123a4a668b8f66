"""FLOPs counted from a layout are those that torch counts, and attention's are its visible pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from model_support import PRESET, Video, oracle
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import A14B
from trainer.flops import count, forward_flops, training_flops, visible_pairs
from trainer.model.kvcache import EMPTY, RawText
from trainer.model.layout import (
    NOTHING,
    Layout,
    Rule,
    chunk_prompts,
    clip,
    frame_queries,
    prefill,
    target,
    teacher_forced,
)
from trainer.model.pdd_head import VelocityHead, bank_from_velocity, compact_from_bank
from trainer.model.wan import History, Inputs, WanModel, make_plan
from trainer.schedule import PddSchedule

LAYOUTS = {
    "a clip without memory": (clip(PRESET, 0, 2), Rule.FULL),
    "a clip with memory": (clip(PRESET, 3, 2), Rule.FULL),
    "frame queries": (frame_queries(PRESET, 3, (2, 5, 6)), Rule.FULL),
    "teacher forced": (teacher_forced(PRESET, 2, 3), Rule.CAUSAL),
    "teacher forced from the start": (teacher_forced(PRESET, 0, 3), Rule.CAUSAL),
    "teacher forced, padded": (teacher_forced(PRESET, 1, 2, compressed_frames=8), Rule.CAUSAL),
}


def shape_of(video: Video, layout: Layout, rule: Rule, prompts: int = 1, context: Layout = NOTHING) -> Inputs:
    """A pass on the meta device, which has shapes and no numbers."""
    given = video.inputs(layout, rule)
    chosen = tuple(min(c // 5, prompts - 1) for c in chunk_prompts(layout))
    history = given.history
    if history is not None:
        history = History(history.full.to("meta"), history.low.to("meta"))
    return Inputs(
        make_plan(PRESET.model, layout, context=context, rule=rule, prompts=chosen, device="meta"),
        given.latents.to("meta"),
        given.sigma.to("meta"),
        given.actions.to("meta"),
        RawText(video.prompts[:, :prompts].to("meta")),
        history,
    )


def empty_expert() -> WanModel:
    with torch.device("meta"):
        return WanModel(PRESET.model)


def counted(run: Callable[[], object]) -> int:
    """What torch counts. Attention runs as two products, for torch does not count the CPU's own: they go over
    every pair of tokens, visible or not. It does not see norms, activations and sums, as we do not."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


def hidden_pairs(layout: Layout, context: Layout, rule: Rule) -> int:
    """Pairs that a dense backend computes and masks, as FLOPs of all layers."""
    keys = context + layout
    pairs = layout.tokens * keys.tokens - visible_pairs(layout, keys, rule)
    return PRESET.model.layers * 4 * pairs * PRESET.model.dim


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_costs_what_torch_counts(name: str) -> None:
    layout, rule = LAYOUTS[name]
    prompts = 2  # of 5 s each
    inputs, model = shape_of(Video(6), layout, rule, prompts), empty_expert()
    expected = forward_flops(PRESET.model, layout, rule, prompts=prompts)
    assert counted(lambda: model(inputs)) == expected + hidden_pairs(layout, NOTHING, rule)


def test_a_cached_pass_counts_its_context_and_no_text() -> None:
    video, model = Video(4), empty_expert()
    out = model(replace(shape_of(video, prefill(PRESET, 2), Rule.CAUSAL), keep=True))
    cache = EMPTY.extend(out.segment)
    layout = target(PRESET, 2, 3)
    given = shape_of(video, layout, Rule.CAUSAL, context=cache.layout)
    given = replace(given, cache=cache, text=out.text)
    expected = count(PRESET.model, layout, Rule.CAUSAL, context=cache.layout, cached_text=True)
    assert counted(lambda: model(given)) == expected.total + hidden_pairs(layout, cache.layout, Rule.CAUSAL)


@pytest.mark.parametrize("kind", ["bank", "compact"])
def test_few_step_heads_count_their_mixing(kind: str) -> None:
    schedule, model = PddSchedule(), empty_expert()
    assert isinstance(model.head, VelocityHead)
    bank = bank_from_velocity(model.head, schedule.heads("high"))
    model.head = bank if kind == "bank" else compact_from_bank(bank, schedule.blocks_of("high"))
    heads = model.head.heads
    layout = target(PRESET, 0, 1)
    inputs = replace(shape_of(Video(2), layout, Rule.CAUSAL), rows=torch.empty(1, 4, 2, heads, device="meta"))
    expected = count(PRESET.model, layout, Rule.CAUSAL, bank=(2, heads))
    assert counted(lambda: model(inputs)) == expected.total


@pytest.mark.parametrize("name", LAYOUTS)
def test_visible_pairs_are_those_of_the_mask_token_by_token(name: str) -> None:
    layout, rule = LAYOUTS[name]
    table = torch.tensor([[oracle(q, k, rule) for k in layout.frames] for q in layout.frames])
    frames = layout.frame_of_token()
    assert visible_pairs(layout, layout, rule) == int(table[frames][:, frames].sum())


def test_training_is_three_forward_passes_and_a_fourth_of_the_blocks() -> None:
    layout, rule = LAYOUTS["teacher forced"]
    flops = count(PRESET.model, layout, rule)
    assert training_flops(PRESET.model, layout, rule) == 3 * flops.total
    again = training_flops(PRESET.model, layout, rule, checkpointing=True)
    assert again == 3 * flops.total + flops.blocks


def test_backward_is_two_products_for_each_of_the_forward_pass() -> None:
    """But for the inputs, whose gradient nobody asks for."""
    layout = clip(PRESET, 3, 2)
    inputs, model = shape_of(Video(6), layout, Rule.FULL), empty_expert()
    made = counted(lambda: model(inputs).velocity.sum().backward())
    flops = count(PRESET.model, layout, Rule.FULL)
    unasked = flops.embed + flops.memory + flops.conditions
    expected = training_flops(PRESET.model, layout, Rule.FULL)
    assert expected - unasked < made <= expected


def test_full_size_costs_what_the_spec_says() -> None:
    """A bidirectional clip: 46,592 tokens through matrices of 40 (6 x 5120^2 + 2 x 5120 x 13824)."""
    flops = count(A14B.model, clip(A14B, 0, 8), Rule.FULL)
    assert flops.attention == 40 * 4 * 46_592**2 * 5120
    matrices = 40 * (6 * 5120**2 + 2 * 5120 * 13824)
    assert flops.linear == 2 * 46_592 * matrices + 40 * 32 * 2 * 5120**2
    assert flops.embed + flops.memory + flops.conditions + flops.head < 0.01 * flops.total

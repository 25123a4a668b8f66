"""Masks against a brute-force oracle, and FlexAttention against dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from jobs.evaluate.history import conditions, held, histories_of, layout_of
from jobs.train_config import GateConfig
from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET, Video, draw, noisy_expert, oracle
from trainer.config import A14B
from trainer.curriculum import STAGES, Objective, Stage
from trainer.model.attention import BLOCK, COMPILATIONS, Backend, MaskError, attend, compiled, make_mask
from trainer.model.layout import (
    NOTHING,
    Frame,
    Kind,
    Layout,
    LayoutError,
    Rule,
    clip,
    compressed,
    frame_queries,
    memory,
    prefill,
    sink,
    target,
    teacher_forced,
    visible,
)
from trainer.objectives.flow import bucketed, objective

CPU = torch.device("cpu")
KNOWN = sink(PRESET) + compressed(PRESET, 0, 2)
SEQUENCES = {
    "first clip": (clip(PRESET, 0, 1), NOTHING, Rule.FULL),
    "clip after two chunks": (clip(PRESET, 2, 2), NOTHING, Rule.FULL),
    "queries into the history": (frame_queries(PRESET, 3, (1, 6)), NOTHING, Rule.FULL),
    "teacher forcing from the start": (teacher_forced(PRESET, 0, 4), NOTHING, Rule.CAUSAL),
    "teacher forcing after one chunk": (teacher_forced(PRESET, 1, 3), NOTHING, Rule.CAUSAL),
    "teacher forcing after a long history": (teacher_forced(PRESET, 70, 2), NOTHING, Rule.CAUSAL),
    "teacher forcing, padded": (teacher_forced(PRESET, 1, 2, 9), NOTHING, Rule.CAUSAL),
    "first prefill": (prefill(PRESET, 1), NOTHING, Rule.CAUSAL),
    "prefill of three chunks": (prefill(PRESET, 3), NOTHING, Rule.CAUSAL),
    "next prefill": (prefill(PRESET, 3, 2), KNOWN, Rule.CAUSAL),
    "first chunk": (target(PRESET, 0, 1), NOTHING, Rule.CAUSAL),
    "chunk after a cache": (target(PRESET, 2, 3), memory(PRESET, 2), Rule.CAUSAL),
    "four chunks after the memory of a clip": (
        target(PRESET, 1, 5),
        Layout(tuple(f for f in teacher_forced(PRESET, 1, 4).frames if f.kind is not Kind.PRED)),
        Rule.CAUSAL,
    ),
}
each_sequence = pytest.mark.parametrize("name", SEQUENCES)


def roles(layout: Layout) -> list[Frame]:
    return [frame for frame in layout.frames for _ in range(frame.grid.tokens)]


@each_sequence
def test_every_token_sees_what_the_oracle_says(name: str) -> None:
    layout, context, rule = SEQUENCES[name]
    keys = roles(context + layout)
    wanted = torch.tensor([[oracle(q, k, rule) for k in keys] for q in roles(layout)])
    mask = make_mask(layout, context + layout, rule, Backend.DENSE, CPU)
    given = torch.ones_like(wanted) if mask.dense is None else mask.dense
    assert torch.equal(given, wanted)
    assert wanted.any(dim=1).all()


@each_sequence
def test_the_blocks_of_flex_are_those_of_the_full_square(name: str) -> None:
    layout, context, rule = SEQUENCES[name]
    mask = make_mask(layout, context + layout, rule, Backend.FLEX, CPU)
    if mask.blocks is None:
        assert make_mask(layout, context + layout, rule, Backend.DENSE, CPU).dense is None
        return
    wanted = create_block_mask(
        mask.blocks.mask_mod, None, None, layout.tokens, (context + layout).tokens, "cpu", BLOCK
    )
    assert torch.equal(mask.blocks.to_dense(), wanted.to_dense())
    given_whole, wanted_whole = mask.blocks.full_kv_num_blocks, wanted.full_kv_num_blocks
    assert given_whole is not None and wanted_whole is not None
    assert torch.equal(given_whole, wanted_whole.to(given_whole.dtype))


@each_sequence
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_equals_dense(name: str) -> None:
    layout, context, rule = SEQUENCES[name]
    keys = (context + layout).tokens
    query, key, value = draw(1, 1, layout.tokens, 2, 16), draw(2, 1, keys, 2, 16), draw(3, 1, keys, 2, 16)
    dense, flex = (
        attend(query, key, value, make_mask(layout, context + layout, rule, backend, CPU))
        for backend in (Backend.DENSE, Backend.FLEX)
    )
    assert (flex - dense).abs().max() <= 2e-6


def test_flex_is_compiled_once_for_each_length_and_for_more_of_them_than_torch_allows_by_itself() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    flex = compiled(counter)
    lengths = set()
    more = tuple((1, padded) for padded in range(22, 22 + torch._dynamo.config.recompile_limit))
    for history, padded in ((1, 13), (3, 13), (1, 21), (4, 21), (2, 13), *more):
        layout = teacher_forced(PRESET, history, 2, padded)
        lengths.add(layout.tokens)
        q, k, v = (draw(seed, 1, layout.tokens, 2, 16) for seed in (1, 2, 3))
        blocks = make_mask(layout, layout, Rule.CAUSAL, Backend.FLEX, CPU).blocks
        assert blocks is not None
        given = flex(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=blocks)
        wanted = attend(q, k, v, make_mask(layout, layout, Rule.CAUSAL, Backend.DENSE, CPU))
        assert (given.transpose(1, 2) - wanted).abs().max() <= 2e-6
        assert counter.frame_count == len(lengths)
    assert len(lengths) == 2 + torch._dynamo.config.recompile_limit


def test_the_lengths_of_all_stages_and_their_gates_together_are_fewer_than_may_be_compiled() -> None:
    """Of `a14b`: the layouts that objectives and gates ask for, and which of them have a mask at all."""
    asked: set[tuple[int, int, bool, int]] = set()
    by_stage: dict[str, int] = {}
    for stage in STAGES:
        own: set[tuple[int, int, bool, int]] = set()
        for layout, rule, trained, batches in _asked(replace(stage, memory_drop=0.5 * (stage.name == "3"))):
            layout = _of_a14b(layout)
            if not bool(visible(layout, layout, rule).all()):
                kinds = (True, False) if trained else (False,)
                own |= {(layout.tokens, layout.tokens, kind, size) for kind in kinds for size in batches}
        by_stage[stage.name] = len(own)
        asked |= own
    assert min(by_stage["3"], by_stage["4"]) > torch._dynamo.config.recompile_limit
    # What has no mask is not compiled: everything sees everything in stages 1 and 2 and in scores of stage 5.
    assert not any(by_stage[name] for name in ("1", "2a", "2b", "5"))
    assert 2 * len(asked) <= COMPILATIONS


def _asked(stage: Stage) -> Iterator[tuple[Layout, Rule, bool, tuple[int, ...]]]:
    """(layout, rule, whether in training too, sizes of its batch) of a stage and of its gate."""
    chunks, gate = stage.target // PRESET.chunk, GateConfig()
    sizes = (gate.batch, gate.batch + 1)
    for history in stage.histories:
        if stage.objective is Objective.PDD:
            yield bucketed(PRESET, history, chunks), Rule.CAUSAL, True, (stage.micro,)
            continue
        if stage.objective is Objective.STABLE:
            yield clip(PRESET, history, chunks), Rule.FULL, True, (stage.micro,)
            continue
        model = ByHand(predicted)
        batch = batch_of((1,), history, 0 if stage.objective is Objective.QUERIES else chunks)
        with torch.no_grad():
            for step in range(8):  # of which some have no compressed memory
                objective(stage)(model, PRESET, batch, "high", 0, step)
        for given in model.seen:
            rule = Rule.CAUSAL if stage.objective is Objective.CHUNKS else Rule.FULL
            yield given.plan.layout, rule, True, (stage.micro,)
    histories = histories_of(stage, gate.history)
    if stage.gate == "few_steps":
        yield teacher_forced(PRESET, max(histories), 1), Rule.CAUSAL, False, sizes
    elif stage.gate:
        for history in histories:
            for condition in conditions(stage, history):
                yield *layout_of(held(stage, PRESET), PRESET, history, condition), False, sizes


def _of_a14b(layout: Layout) -> Layout:
    """The same frames on the grids of `a14b`, whose chunks, sink and anchor are those of `tiny`."""
    assert (A14B.chunk, A14B.sink, A14B.temporal) == (PRESET.chunk, PRESET.sink, PRESET.temporal)
    small = (Kind.CMP, Kind.PAD)
    return Layout(
        tuple(replace(f, grid=A14B.low_grid if f.kind in small else A14B.grid) for f in layout.frames)
    )


def test_a_query_with_nothing_to_see_is_refused() -> None:
    with pytest.raises(MaskError, match="4 frames"):
        make_mask(target(PRESET, 0, 1), sink(PRESET), Rule.CAUSAL, Backend.DENSE, CPU)


def test_a_mask_of_another_length_is_refused() -> None:
    layout = prefill(PRESET, 2)
    mask = make_mask(layout, layout, Rule.CAUSAL, Backend.DENSE, CPU)
    longer = draw(1, 1, prefill(PRESET, 3).tokens, 2, 16)
    with pytest.raises(MaskError, match="build the plan from the layout"):
        attend(longer, longer, longer, mask)


def test_predicted_frames_come_last() -> None:
    with pytest.raises(LayoutError):
        target(PRESET, 0, 1) + sink(PRESET)


def test_padding_changes_no_prediction_and_no_gradient() -> None:
    video, model = Video(chunks=3), noisy_expert()
    results = []
    for frames in (None, 13):
        model.zero_grad()
        velocity = model(video.inputs(teacher_forced(PRESET, 1, 2, frames))).velocity
        velocity.square().mean().backward()
        grads = [p.grad for p in (model.memory.blocks[0].conv.weight, model.blocks[0].self_attn.k.weight)]
        results.append([velocity.detach(), *(g.clone() for g in grads if g is not None)])
    for plain, padded in zip(*results, strict=True):
        assert torch.isfinite(padded).all()
        assert (plain - padded).abs().max() <= 1e-5 * plain.abs().max()


def test_the_first_chunk_has_finite_gradients_without_memory() -> None:
    video, model = Video(chunks=2), noisy_expert()
    model(video.inputs(teacher_forced(PRESET, 0, 2))).velocity.square().mean().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert model.memory.output_layer.weight.grad is not None

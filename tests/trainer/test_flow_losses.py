"""Flow matching of stages 1 to 3: what is predicted, from what, and where gradients go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET, noisy_expert
from trainer.config import ConfigError
from trainer.curriculum import STAGES, SigmaLaw, Stage, curriculum
from trainer.data.batch import Batch
from trainer.model.layout import Kind
from trainer.model.wan import Inputs
from trainer.objectives.flow import (
    bucketed,
    chunk_loss,
    clip_loss,
    objective,
    query_loss,
    query_times,
    sequence,
)
from trainer.objectives.loss import Loss

SEED = 9
PER_CHUNK = SigmaLaw(per_chunk=True)
TIMES = (0, 3, 6)
Run = Callable[[object, Batch, str], Loss]


def of_clip(model: object, batch: Batch, expert: str = "high") -> Loss:
    return clip_loss(model, PRESET, batch, expert, SigmaLaw(), SEED)  # type: ignore[arg-type]


def of_queries(model: object, batch: Batch, expert: str = "high") -> Loss:
    return query_loss(model, PRESET, batch, expert, SigmaLaw(), SEED, TIMES)  # type: ignore[arg-type]


def of_chunks(model: object, batch: Batch, expert: str = "high") -> Loss:
    return chunk_loss(model, PRESET, batch, expert, PER_CHUNK, SEED)  # type: ignore[arg-type]


# The objective, history and target in chunks, and the latents that are predicted.
CASES = {
    "stage 1": (of_clip, 0, 2, range(0, 8)),
    "stage 2b": (of_clip, 2, 2, range(8, 16)),
    "stage 2a": (of_queries, 2, 0, TIMES),
    "stage 3": (of_chunks, 1, 2, range(4, 12)),
    "stage 3 from the start": (of_chunks, 0, 2, range(0, 8)),
}
case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("expert", ["high", "low"])
@case
def test_the_true_velocity_of_the_target_costs_nothing(name: str, expert: str) -> None:
    run, history, chunks, times = CASES[name]
    batch = batch_of((4, 7), history, chunks)

    def truth(inputs: Inputs) -> Tensor:
        # x_sigma = (1 - sigma) x + sigma eps, so eps - x = (x_sigma - x) / sigma.
        clean = batch.latents[:, :, list(times)]
        return (predicted(inputs) - clean) / inputs.sigma.float()[:, None, :, None, None]

    assert float(run(ByHand(truth), batch, expert).total) < 1e-8
    off = run(ByHand(lambda inputs: truth(inputs) + 0.5), batch, expert)
    assert float(off.total) == pytest.approx(0.25, rel=1e-4)


@case
def test_memory_is_clean_and_the_target_stands_at_its_own_place(name: str) -> None:
    run, history, chunks, times = CASES[name]
    batch = batch_of((4, 7), history, chunks)
    model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
    loss = run(model, batch, "low")
    (given,) = model.seen
    layout = given.plan.layout
    assert layout.only(Kind.PRED).times == tuple(times)
    frames = [f for f in layout.frames if f.kind in (Kind.SINK, Kind.TMP)]
    for at, frame in enumerate(frames):
        assert torch.equal(given.latents[:, :16, at], batch.latents[:, :, frame.time])
        assert torch.equal(given.latents[:, 16:, at], batch.condition[:, :, frame.time])
    pairs = layout.count(Kind.CMP)
    assert (given.history is None) == (pairs == 0)
    if given.history is not None:
        assert torch.equal(given.history.full[:, :16], batch.latents[:, :, : 2 * pairs])
        assert torch.equal(given.history.full[:, 16:], batch.condition[:, :, : 2 * pairs])
        assert torch.equal(given.history.low, batch.low[:, :, :pairs])
    assert torch.equal(given.actions, batch.actions)
    assert bool((given.sigma < 0.9).all())
    assert torch.equal(loss.sigma[:, :1], given.sigma[:, :1])
    assert loss.history == history


@case
def test_the_loss_of_a_sample_is_the_same_alone_and_in_a_batch(name: str) -> None:
    run, history, chunks, _ = CASES[name]
    model = noisy_expert()
    with torch.no_grad():
        together = run(model, batch_of((4, 7, 30), history, chunks), "high")
        alone = [run(model, batch_of((p,), history, chunks), "high") for p in (4, 7, 30)]
    assert torch.equal(together.sigma, torch.cat([a.sigma for a in alone]))
    torch.testing.assert_close(together.value, torch.cat([a.value for a in alone]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.total, sum(a.total for a in alone) / 3)


@pytest.mark.parametrize("expert", ["high", "low"])
@case
def test_gradients_go_to_the_parts_that_took_part(name: str, expert: str) -> None:
    run, history, chunks, _ = CASES[name]
    model = noisy_expert(expert)
    run(model, batch_of((4,), history, chunks), expert).total.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    touched = {n for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    remembers = name != "stage 1"
    assert any(n.startswith("memory.") for n in touched) == remembers
    for part in ("action.", "blocks.0.action_mlp.", "head.", "patch_embedding.", "text_embedding."):
        assert any(n.startswith(part) for n in touched), part


def test_without_history_the_first_chunk_sends_no_gradient_to_memory() -> None:
    model = noisy_expert()
    of_chunks(model, batch_of((4,), 0, 1)).total.backward()
    assert not any(bool(p.grad.any()) for p in model.memory.parameters() if p.grad is not None)


def test_padding_changes_neither_loss_nor_gradients() -> None:
    # Source: spec/faults.md F8: equal to a dense fp32 reference without a padded row.
    batch = batch_of((4, 7), 1, 2, prompts=3)
    padded, bare = noisy_expert(), noisy_expert()
    loss = of_chunks(padded, batch)
    loss.total.backward()
    reference = chunk_loss(bare, PRESET, batch, "high", PER_CHUNK, SEED, bucket=1)
    reference.total.backward()
    torch.testing.assert_close(loss.total, reference.total, rtol=1e-6, atol=1e-7)
    for (name, p), q in zip(padded.named_parameters(), bare.parameters()):
        if q.grad is not None:
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_stage_3_has_few_lengths_whatever_the_history() -> None:
    seen, lengths = set(), set()
    for history in (0, 1, 2, 4, 6, 7, 12):
        model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
        of_chunks(model, batch_of((1,), history, 4))
        layout = model.seen[0].plan.layout
        seen.add(layout.count(Kind.CMP) + layout.count(Kind.PAD))
        lengths.add(layout.tokens)
    assert seen == {16, 32}
    assert len(lengths) == 3  # history 0 has no anchor before its first chunk
    every = {bucketed(PRESET, history, 4).tokens for history in STAGES[3].histories}
    assert len(every) == 6


def test_queries_see_neither_the_image_nor_anything_but_compressed_latents() -> None:
    batch = batch_of((4,), 2, 0)
    model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
    of_queries(model, batch)
    (given,) = model.seen
    kinds = [f.kind for f in given.plan.layout.frames]
    assert kinds == [Kind.CMP] * 4 + [Kind.PRED] * 3
    assert not bool(given.latents[:, 16:20].any())  # mask 0, at latent 0 too
    zero_clip = batch.condition[:, 4:, -1:]
    assert torch.equal(given.latents[:, 20:], zero_clip.expand(-1, -1, 3, -1, -1))
    assert given.history is not None and given.history.full.shape[2] == 8


def test_query_places_cover_the_history_and_follow_the_step_alone() -> None:
    drawn = [query_times(16, 4, SEED, step) for step in range(400)]
    assert {len(d) for d in drawn} == {1, 2, 3, 4}
    assert all(len(set(d)) == len(d) and tuple(sorted(d)) == d for d in drawn)
    counts = torch.bincount(torch.tensor([k for d in drawn for k in d]), minlength=16)
    assert int(counts.min()) > 30 and int(counts.max()) < 100  # 62 expected
    assert drawn[5] == query_times(16, 4, SEED, 5)


def test_chunks_read_their_own_prompts() -> None:
    batch = batch_of((4,), 1, 2, prompts=3)
    model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
    of_chunks(model, batch)
    plan = model.seen[0].plan
    for frame, prompt in zip(plan.layout.frames, plan.prompts):
        made = frame.chunk - 1 if frame.kind is Kind.TMP else frame.chunk
        assert frame.kind is Kind.PAD or prompt == batch.prompts[made]


def test_one_level_for_a_clip_and_one_for_each_chunk_where_the_law_says_so() -> None:
    assert of_clip(noisy_expert(), batch_of((1, 2), 0, 2)).sigma.shape == (2, 1)
    model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
    loss = of_chunks(model, batch_of((1, 2), 0, 2))
    assert loss.sigma.shape == loss.value.shape == (2, 2)
    levels = model.seen[0].sigma
    assert torch.equal(levels, loss.sigma.repeat_interleave(PRESET.chunk, dim=1))
    assert len(loss.sigma.unique()) == 4


FLOW = [s for s in curriculum("tiny") if s.name in ("1", "2a", "2b", "3")]


@pytest.mark.parametrize("stage", FLOW, ids=lambda s: s.name)
def test_each_stage_of_the_curriculum_has_its_objective(stage: Stage) -> None:
    history = min(stage.histories)
    chunks = 0 if stage.name == "2a" else stage.target // PRESET.chunk
    model = ByHand(lambda inputs: torch.zeros_like(predicted(inputs)))
    loss = objective(stage)(model, PRESET, batch_of((3,), history, chunks), "low", SEED, 11)
    assert bool(loss.total.isfinite()) and loss.value.shape[0] == 1


def test_stages_of_more_than_one_network_are_refused() -> None:
    with pytest.raises(ConfigError, match="stage 1: pdd is no flow matching"):
        objective(replace(STAGES[0], objective="pdd"))  # type: ignore[arg-type]


def test_a_share_of_steps_has_no_compressed_memory_whatever_the_batch() -> None:
    """`memory_drop`: none of it in the others, and the same in every micro-batch of a step."""
    stage = replace(STAGES[3], memory_drop=0.4, batch=2, micro=1)
    minimise, lacked = objective(stage), []
    for step in range(60):
        of_step = []
        for position in (3, 8):
            model = ByHand(predicted)
            minimise(model, PRESET, batch_of((position,), 1, 2), "high", SEED, step)
            (inputs,) = model.seen
            of_step.append(inputs.history is None)
            kinds = [frame.kind for frame in inputs.plan.layout.frames]
            assert (Kind.CMP in kinds) is (inputs.history is not None)
            assert kinds.count(Kind.SINK) == 1 and kinds.count(Kind.TMP) == 2
        assert len(set(of_step)) == 1
        layout, _ = sequence(stage, PRESET, 1, SEED, step)
        assert (Kind.CMP in [frame.kind for frame in layout.frames]) is not of_step[0]
        lacked.append(of_step[0])
    assert 10 <= sum(lacked) <= 38
    with pytest.raises(ConfigError, match="memory_drop is of chunks"):
        replace(STAGES[0], memory_drop=0.1)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        *(
            (name, {what: share}, f"stage {name}: {what} is {share}: a share lies in 0 to 1")
            for name in ("2a", "3")
            for what in ("events", "text_drop", "field_drop", "memory_drop")
            for share in (10, -0.1, math.nan)
        ),
        ("2a", {"sigma": PER_CHUNK}, "stage 2a: frame queries are no chunks"),
        ("1", {"target": 18, "segments": False}, "stage 1: a target of 18 latents: whole chunks of 4"),
        ("2b", {"target": 18}, "stage 2b: a target of 18 latents: whole chunks of 4"),
        ("3", {"target": 18}, "stage 3: a target of 18 latents: whole chunks of 4"),
        ("4", {"target": 2}, "stage 4: a target of 2 latents: whole chunks of 4"),
    ],
)
def test_what_a_stage_cannot_mean_is_refused_where_it_is_made(
    name: str, changes: dict[str, object], said: str
) -> None:
    (stage,) = (s for s in STAGES if s.name == name)
    with pytest.raises(ConfigError) as caught:
        replace(stage, **changes)  # type: ignore[arg-type]
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert replace(STAGES[1], target=3, events=1.0, text_drop=0.0).target == 3

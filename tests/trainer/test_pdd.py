"""Few-step training: states, intervals and targets of the bank are those of the spec, f.1 and f.3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET, draw, noisy_expert
from trainer.curriculum import PddConfig, Solver
from trainer.data.batch import Batch
from trainer.model.layout import Kind
from trainer.model.pdd_head import IntervalHead, VelocityHead, bank_from_velocity
from trainer.model.wan import Inputs, WanModel
from trainer.objectives import pdd
from trainer.objectives.flow import bucketed
from trainer.objectives.pdd import Places, coefficients, draw_places, pdd_loss
from trainer.schedule import PddSchedule

SCHEDULE = PddSchedule()
PLAIN = PddConfig(Solver.EULER, guidance=1.0)
EXPERTS = ("high", "low")
HISTORY, CHUNKS = 2, 2


@pytest.fixture(scope="module")
def batch() -> Batch:
    torch.set_num_threads(1)
    return batch_of((3, 5), HISTORY, CHUNKS, prompts=2)


def student_of(teacher: WanModel, expert: str, spread: float = 0.0) -> WanModel:
    """The start of stage 4, its heads moved apart by `spread`."""
    student = noisy_expert(expert)
    assert isinstance(teacher.head, VelocityHead)
    student.head = bank_from_velocity(teacher.head, SCHEDULE.heads(expert))
    with torch.no_grad():
        student.head.bank_weight.add_(spread * draw(1, *student.head.bank_weight.shape))
    return student


def loss_of(student: object, teacher: object, batch: Batch, expert: str, config: PddConfig = PLAIN) -> Tensor:
    return pdd_loss(student, teacher, PRESET, SCHEDULE, batch, expert, config, 0).total  # type: ignore[arg-type]


@pytest.mark.parametrize("expert", EXPERTS)
def test_places_are_uniform_inside_the_experts_blocks_and_keyed_by_position(expert: str) -> None:
    places = draw_places(SCHEDULE, expert, tuple(range(400)), 4, seed=1)
    blocks = {b.start: b.stop for b in SCHEDULE.blocks_of(expert)}
    starts = places.start.flatten().tolist()
    assert set(starts) == set(blocks)
    assert all(s <= k < blocks[s] for s, k in zip(starts, places.interval.flatten().tolist()))
    counts = torch.bincount(places.interval.flatten())[min(blocks) :]
    assert len(counts) == SCHEDULE.heads(expert) and counts.min() > 5
    alone = draw_places(SCHEDULE, expert, (7,), 4, seed=1)
    assert torch.equal(alone.interval[0], places.interval[7])


@pytest.mark.parametrize("expert", EXPERTS)
def test_at_the_last_interval_the_rows_are_those_of_the_released_step(expert: str) -> None:
    head = IntervalHead(8, 4, 1e-6, SCHEDULE.heads(expert))
    for block in SCHEDULE.blocks_of(expert):
        last = Places(torch.tensor([[block.start]]), torch.tensor([[block.stop - 1]]))
        torch.testing.assert_close(coefficients(SCHEDULE, expert, last)[0, 0], head.rows(block))


@pytest.mark.parametrize("expert", EXPERTS)
def test_a_copied_head_starts_in_the_teachers_direction(
    batch: Batch, expert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = noisy_expert(expert)
    monkeypatch.setattr(pdd, "draw_places", lambda s, e, p, g, seed: _first(draw_places(s, e, p, g, seed)))
    assert loss_of(student_of(teacher, expert), teacher, batch, expert) < 1e-10
    assert loss_of(student_of(teacher, expert, 0.1), teacher, batch, expert) > 1e-3


def _first(places: Places) -> Places:
    return replace(places, interval=places.start)


def test_gradient_reaches_head_k_and_the_trunk_and_no_head_before_it(batch: Batch) -> None:
    one = replace(batch, positions=(3, 3))  # both samples draw the same places
    teacher = noisy_expert("low")
    student = student_of(teacher, "low", 0.1).train().requires_grad_(True)
    loss_of(student, teacher, one, "low").backward()
    places = draw_places(SCHEDULE, "low", (3,), CHUNKS, 0)
    drawn = {int(k) - 56 for k in places.interval.flatten()}
    grads = student.head.bank_weight.grad
    assert grads is not None
    assert {int(k) for k in grads.flatten(1).abs().sum(1).nonzero()} == drawn
    assert all(p.grad is not None and p.grad.any() for p in student.blocks[0].self_attn.q.parameters())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("solver", list(Solver))
def test_the_target_is_one_runge_kutta_step_with_guidance_folded_in(batch: Batch, solver: Solver) -> None:
    """A teacher by hand whose velocity is state + 10 sigma, and half of that under the negative prompt."""

    def says(inputs: Inputs) -> Tensor:
        negative = inputs.text.embeddings.shape[2] == batch.negative.shape[0]
        level = inputs.sigma.float()[:, None, :, None, None]
        return (0.5 if negative else 1.0) * (predicted(inputs) + 10 * level)

    teacher = ByHand(says)
    student = student_of(noisy_expert("low"), "low", 0.1)
    config = PddConfig(solver, guidance=3.0)
    found = pdd_loss(student, teacher, PRESET, SCHEDULE, batch, "low", config, 0)  # type: ignore[arg-type]
    state, level = predicted(teacher.seen[0]), teacher.seen[0].sigma
    places = draw_places(SCHEDULE, "low", batch.positions, CHUNKS, 0)
    sigmas = torch.tensor(SCHEDULE.sigmas, dtype=torch.float64)
    torch.testing.assert_close(level, sigmas[places.interval].repeat_interleave(PRESET.chunk, 1))

    def velocity(at: Tensor, sigma: Tensor) -> Tensor:
        full = at + 10 * sigma.float()[:, None, :, None, None]
        return 0.5 * full + 3.0 * (full - 0.5 * full)

    wanted = velocity(state, level)
    if solver is Solver.MIDPOINT:
        step = (sigmas[places.interval + 1] - sigmas[places.interval]).repeat_interleave(PRESET.chunk, 1)
        half = 0.5 * step.float()[:, None, :, None, None]
        wanted = velocity(state + half * wanted, level + 0.5 * step)
    assert len(teacher.seen) == (2 if solver is Solver.EULER else 4)
    rows = coefficients(SCHEDULE, "low", places).repeat_interleave(PRESET.chunk, 1)
    assert found.value.shape == (2, CHUNKS)
    again = _student(student, batch, rows)
    expected = (again - wanted).square().mean(dim=(1, 3, 4)).reshape(2, CHUNKS, -1).mean(2)
    torch.testing.assert_close(found.value, expected.detach(), rtol=1e-4, atol=1e-4)


def _student(student: WanModel, batch: Batch, rows: Tensor) -> Tensor:
    """u_k of the student, from a pass built here."""
    seen: list[Inputs] = []
    handle = student.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss_of(student, ByHand(lambda i: predicted(i)), batch, "low")
    handle.remove()
    out = student(replace(seen[0], rows=rows)).prediction
    assert out is not None
    return out[:, 1]


def test_stage_4_has_the_lengths_of_stage_3_and_padding_changes_nothing(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for bucket in (16, 1):
        monkeypatch.setattr(pdd, "bucketed", lambda p, h, c, b=bucket: bucketed(p, h, c, b))
        student, teacher = student_of(noisy_expert("low"), "low", 0.1), ByHand(lambda i: predicted(i))
        seen: list[Inputs] = []
        student.register_forward_pre_hook(lambda module, args, kept=seen: kept.append(args[0]))
        loss = loss_of(student, teacher, batch, "low")
        loss.backward()
        grads = [p.grad for p in student.parameters() if p.grad is not None]
        layouts = {given.plan.layout for given in (*seen, *teacher.seen)}
        found.append((loss.detach(), grads, {f.count(Kind.CMP) + f.count(Kind.PAD) for f in layouts}))
    (padded, grads, lengths), (bare, wanted, plain) = found
    assert (lengths, plain) == ({16}, {6})
    torch.testing.assert_close(padded, bare, rtol=1e-6, atol=1e-7)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_states_are_the_students_own(batch: Batch) -> None:
    """X_k = X_n + the sum over its mean velocities before k; X_n lies on the line from data to noise."""
    student, teacher = student_of(noisy_expert("high"), "high", 0.1), ByHand(lambda i: predicted(i))
    seen: list[Inputs] = []
    student.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss_of(student, teacher, batch, "high")
    places = draw_places(SCHEDULE, "high", batch.positions, CHUNKS, 0)
    sigmas = torch.tensor(SCHEDULE.sigmas, dtype=torch.float64)
    begin = sigmas[places.start].repeat_interleave(PRESET.chunk, 1)
    torch.testing.assert_close(seen[0].sigma, begin)
    first = predicted(seen[0])
    level = begin.float()[:, None, :, None, None]
    noise = (first - (1 - level) * batch.latents[:, :, -CHUNKS * PRESET.chunk :]) / level
    assert abs(float(noise.std()) - 1) < 0.05 and abs(float(noise.mean())) < 0.05
    moved = first.clone()
    for sample in range(2):
        for chunk in range(CHUNKS):
            own = slice(chunk * PRESET.chunk, (chunk + 1) * PRESET.chunk)
            for k in range(int(places.start[sample, chunk]), int(places.interval[sample, chunk])):
                rows = torch.zeros(2, CHUNKS * PRESET.chunk, 1, student.head.heads)
                rows[..., k] = 1.0
                with torch.no_grad():
                    u = student(replace(seen[0], rows=rows)).prediction
                assert u is not None
                moved[sample, :, own] += (sigmas[k + 1] - sigmas[k]).float() * u[sample, 0, :, own]
    torch.testing.assert_close(predicted(teacher.seen[0]), moved, rtol=1e-3, atol=1e-3)

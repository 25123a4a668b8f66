"""The schedule of few-step sampling and its heads."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.trainer.model_support import PRESET, Video, draw, noisy_expert
from trainer.model.layout import Rule, target
from trainer.model.pdd_head import (
    HeadError,
    IntervalHead,
    VelocityHead,
    bank_from_velocity,
    compact_from_bank,
)
from trainer.model.wan import WanModel
from trainer.schedule import (
    PddSchedule,
    ScheduleError,
    clean_estimate,
    deterministic_step,
    flow_sigmas,
    renoise,
    shift_ratio,
    unshift_sigma,
)

SCHEDULE = PddSchedule()
# expert, local index, t in, sigma of the last interval's start, sigma end (spec/worldplay2.md f.2)
TABLE = [
    ("high", 0, 1000.0, 0.963215, 0.961538),
    ("high", 1, 961.538, 0.902827, 0.9),
    ("low", 0, 900.0, 0.740000, 0.732558),
    ("low", 1, 732.558, 0.052239, 0.0),
]


def test_the_released_table() -> None:
    assert [(b.start, b.stop) for b in SCHEDULE.blocks] == [(0, 28), (28, 56), (56, 92), (92, 128)]
    assert (SCHEDULE.heads("high"), SCHEDULE.heads("low")) == (56, 72)
    for block, (expert, local, timestep, endpoint, stop) in zip(SCHEDULE.blocks, TABLE, strict=True):
        assert (block.expert, block.local) == (expert, local)
        assert block.sigma_start * 1000 == pytest.approx(timestep, abs=5e-4)  # the table has 3 decimals
        assert block.sigma_endpoint == pytest.approx(endpoint, abs=1e-6)
        assert block.sigma_stop == pytest.approx(stop, abs=1e-6)
    assert SCHEDULE.blocks[2].sigma_start == pytest.approx(0.9, abs=1e-12)


def test_the_shift_and_its_inverse() -> None:
    assert flow_sigmas(4, 5.0)[:4] == pytest.approx((1.0, 0.9375, 0.8333333, 0.625), abs=1e-6)
    for shift in (1.0, 3.0, 5.0, 7.0):
        for ratio in (0.0, 0.2, 0.5625, 1.0):
            assert unshift_sigma(shift_ratio(ratio, shift), shift) == pytest.approx(ratio, abs=1e-12)
    assert unshift_sigma(0.9, 5.0) == pytest.approx(0.643, abs=5e-4)
    assert unshift_sigma(0.9, 7.0) == pytest.approx(0.5625, abs=1e-12)


def test_a_grid_that_misses_the_boundary_is_refused() -> None:
    with pytest.raises(ScheduleError, match="choose a grid"):
        _ = PddSchedule(shift=5.0).blocks
    assert len(PddSchedule(shift=5.0, boundary=None, blocks_per_expert=4).blocks) == 4


def exact(sigma: float, start: Tensor) -> Tensor:
    """The state at sigma of the flow that ends in N(0, 0.25): x(sigma) = x(1) sqrt(var(sigma))."""
    return start * math.sqrt(sigma**2 + 0.25 * (1 - sigma) ** 2)


def test_four_deterministic_steps_with_true_mean_velocities_equal_128() -> None:
    noise = draw(1, 3, 5).double()
    sigmas = SCHEDULE.sigmas
    means = [
        (exact(after, noise) - exact(before, noise)) / (after - before)
        for before, after in itertools.pairwise(sigmas)
    ]
    many = noise
    for k in range(SCHEDULE.intervals):
        many = many + (sigmas[k + 1] - sigmas[k]) * means[k]
    few = noise
    for block in SCHEDULE.blocks:
        bank = IntervalHead(1, 1, 1e-6, SCHEDULE.heads(block.expert))
        own = torch.stack(means[block.first : block.first + bank.heads])
        displacement, endpoint = torch.einsum("rk,k...->r...", bank.rows(block).double(), own)
        few = deterministic_step(few, displacement, endpoint, block)
        assert (few - exact(block.sigma_stop, noise)).abs().max() <= 1e-6
    assert (few - many).abs().max() <= 1e-6
    assert (few - exact(0.0, noise)).abs().max() <= 1e-6


def test_a_consistency_step_finds_clean_data_on_a_straight_path() -> None:
    clean, noise, fresh = (draw(seed, 2, 3).double() for seed in (1, 2, 3))
    state = noise
    for block in SCHEDULE.blocks:
        velocity = (state - clean) / block.sigma_start  # of the straight path through `state`
        displacement = sum(block.steps[:-1]) * velocity
        found = clean_estimate(state, displacement, velocity, block)
        assert (found - clean).abs().max() <= 1e-12
        state = renoise(found, fresh, block)
    assert torch.equal(state, found)


def predict(model: WanModel, block_index: int) -> Tensor:
    """[R, C, P, H, W]: displacement and endpoint velocity of a block for one chunk."""
    video = Video(chunks=1)
    rows = model.head.rows(SCHEDULE.blocks[block_index])[None, None].expand(1, PRESET.chunk, -1, -1)
    with torch.no_grad():
        out = model(video.inputs(target(PRESET, 0, 1), Rule.FULL, rows=rows)).prediction
    assert out is not None
    return out[0]


@pytest.mark.parametrize("expert", ["high", "low"])
def test_the_compact_head_equals_the_bank(expert: str) -> None:
    model = noisy_expert(expert)
    config, blocks = PRESET.model, SCHEDULE.blocks_of(expert)
    assert isinstance(model.head, VelocityHead)
    bank = bank_from_velocity(model.head, SCHEDULE.heads(expert))
    with torch.no_grad():
        bank.bank_weight.copy_(draw(1, *bank.bank_weight.shape))
        bank.bank_bias.copy_(draw(2, *bank.bank_bias.shape))
    compact = compact_from_bank(bank, blocks)
    assert compact.block_weight.shape == (2, 2 * config.patch_out, config.dim)
    assert compact.block_bias.shape == (2, 2 * config.patch_out)
    for block in blocks:
        model.head = bank
        wanted = predict(model, block.index)
        model.head = compact
        given = predict(model, block.index)
        for mine, theirs in zip(given, wanted):
            assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_a_copied_bank_starts_in_the_direction_of_the_teacher() -> None:
    model = noisy_expert()
    video = Video(chunks=1)
    with torch.no_grad():
        velocity = model(video.inputs(target(PRESET, 0, 1), Rule.FULL)).velocity[0]
    assert isinstance(model.head, VelocityHead)
    model.head = bank_from_velocity(model.head, SCHEDULE.heads("high"))
    block = SCHEDULE.blocks[1]
    displacement, endpoint = predict(model, block.index)
    moved = deterministic_step(torch.zeros_like(displacement), displacement, endpoint, block)
    euler = (block.sigma_stop - block.sigma_start) * velocity
    assert (moved - euler).abs().max() <= 1e-5 * euler.abs().max()


def test_only_the_chosen_head_gets_a_gradient() -> None:
    model = noisy_expert()
    assert isinstance(model.head, VelocityHead)
    bank = bank_from_velocity(model.head, SCHEDULE.heads("high"))
    model.head = bank
    rows = torch.zeros(1, PRESET.chunk, 1, bank.heads)
    rows[..., 7] = 1.0
    video = Video(chunks=1)
    model(video.inputs(target(PRESET, 0, 1), Rule.FULL, rows=rows)).velocity.square().mean().backward()
    assert bank.bank_weight.grad is not None
    assert [k for k in range(bank.heads) if bank.bank_weight.grad[k].any()] == [7]
    assert model.blocks[0].self_attn.q.weight.grad.any()


def test_a_bank_without_rows_and_blocks_of_another_expert_are_refused() -> None:
    model = noisy_expert()
    assert isinstance(model.head, VelocityHead)
    with pytest.raises(HeadError, match="velocity head"):
        model.head.rows(SCHEDULE.blocks[0])
    bank = bank_from_velocity(model.head, SCHEDULE.heads("high"))
    model.head = bank
    with pytest.raises(HeadError, match="rows"):
        model(Video(chunks=1).inputs(target(PRESET, 0, 1), Rule.FULL))
    with pytest.raises(HeadError, match="do not cover"):
        compact_from_bank(bank, SCHEDULE.blocks_of("low"))
    with pytest.raises(HeadError, match="bank of 56"):
        bank.rows(SCHEDULE.blocks[3])

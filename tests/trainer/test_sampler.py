"""Samplers against flows whose end is known, and noise that depends on its key alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.trainer.model_support import draw
from trainer.config import A14B
from trainer.noise import keyed_noise
from trainer.sampler import ManySteps, few_steps, guided, many_steps
from trainer.schedule import Block, PddSchedule, ScheduleError, Sigma, flow_sigmas, shift_ratio

SHAPE = (1, 2, 4, 3, 3)
MEAN, SPREAD = 0.7, 0.4


def spread(sigma: float) -> float:
    """Standard deviation of the state at a noise level, for data N(MEAN, SPREAD^2)."""
    return math.hypot((1 - sigma) * SPREAD, sigma)


def exact(noise: Tensor, sigma: float) -> Tensor:
    """Where the flow carries a state of sigma 1."""
    return (1 - sigma) * MEAN + spread(sigma) * noise


def velocity(state: Tensor, sigma: Sigma) -> Tensor:
    """d/dsigma of `exact`, at the state that is given."""
    slope = (sigma - (1 - sigma) * SPREAD**2) / spread(sigma)
    return -MEAN + slope * (state - (1 - sigma) * MEAN) / spread(sigma)


def euler(noise: Tensor, settings: ManySteps) -> Tensor:
    state, sigmas = noise, flow_sigmas(settings.steps, settings.shift)
    for sigma, after in itertools.pairwise(sigmas):
        state = state + (after - sigma) * velocity(state, sigma)
    return state


def test_steps_reach_the_end_of_a_flow_that_is_known() -> None:
    """Largest errors at 20, 40, 80 steps: 0.17, 0.033, 0.0006; of as many Euler steps 0.23, 0.12, 0.06."""
    noise = draw(1, *SHAPE)
    wanted = exact(noise, 0.0)
    forty, eighty = (
        float((many_steps(velocity, noise, ManySteps(k)) - wanted).abs().max()) for k in (40, 80)
    )
    assert forty < 0.05 and forty < float((euler(noise, ManySteps()) - wanted).abs().max()) / 3
    assert eighty < 2e-3


def test_the_network_sees_shifted_noise_levels_and_each_expert_its_own() -> None:
    seen: list[float] = []

    def record(state: Tensor, sigma: Sigma) -> Tensor:
        seen.append(sigma)
        return velocity(state, sigma)

    many_steps(record, draw(1, *SHAPE), ManySteps())
    ratios = [1 - k * 0.999 / 40 for k in range(40)]  # from 1 to a thousandth, the last left out
    assert seen == pytest.approx([shift_ratio(r, 5.0) for r in ratios], abs=2e-6)
    experts = [A14B.expert(sigma) for sigma in seen]
    high = sum(sigma >= 0.9 for sigma in seen)
    assert experts == ["high"] * high + ["low"] * (40 - high)
    assert high == 15  # 0.9 lies at ratio 0.643


def test_a_velocity_sampler_needs_a_step() -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        many_steps(velocity, draw(1, *SHAPE), ManySteps(steps=0))


def test_guidance_leads_away_from_the_negative() -> None:
    c, u = draw(1, 3), draw(2, 3)
    assert torch.equal(guided(c, u, 0.0), u)
    torch.testing.assert_close(guided(c, u, 1.0), c)
    torch.testing.assert_close(guided(c, u, 3.5), u + 3.5 * (c - u))


def test_four_steps_are_the_consistency_steps_of_the_release() -> None:
    """f.2, written out; the table of its noise levels is that of the specification."""
    levels = [(0.963215, 0.961538), (0.902827, 0.9), (0.740000, 0.732558), (0.052239, 0.0)]
    experts: list[str] = []
    heads = {k: (draw(10 + k, *SHAPE), draw(20 + k, *SHAPE)) for k in range(4)}
    fresh = {k: draw(30 + k, *SHAPE) for k in range(4)}
    states: list[Tensor] = []

    def decode(state: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        experts.append(block.expert)
        states.append(state)
        return heads[block.index]

    given = few_steps(decode, draw(1, *SHAPE), PddSchedule(), fresh.__getitem__)
    z = draw(1, *SHAPE)
    for k, (endpoint, end) in enumerate(levels):
        torch.testing.assert_close(states[k], z, rtol=1e-5, atol=1e-5)
        displacement, last = heads[k]
        clean = z + displacement - endpoint * last
        z = (1 - end) * clean + end * fresh[k]
    torch.testing.assert_close(given, clean, rtol=1e-5, atol=1e-5)
    assert experts == ["high", "high", "low", "low"]


def test_noise_depends_on_its_key_alone() -> None:
    cpu = torch.device("cpu")
    one = keyed_noise(SHAPE, cpu, 3, 7, "start")
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert torch.equal(keyed_noise(SHAPE, cpu, 3, 7, "start"), one)
    assert torch.equal(torch.random.get_rng_state(), before)
    others = [(4, 7, "start"), (3, 8, "start"), (3, 7, "renoise-0"), (37, "start")]
    for seed, *role in others:
        assert not torch.equal(keyed_noise(SHAPE, cpu, int(seed), *role), one)
    many = keyed_noise((100_000,), cpu, 0, "x")
    assert abs(float(many.mean())) < 0.02 and abs(float(many.std()) - 1) < 0.02

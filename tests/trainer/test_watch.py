"""Watchdogs on a flow in the plane with four modes: what is sound runs on, what is not is stopped by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET, draw
from trainer.curriculum import CLIP, StableConfig
from trainer.data.batch import Batch
from trainer.model.wan import Inputs
from trainer.stable.scores import critic_loss, draw_level, score_clip
from trainer.stable.step import replay_loss
from trainer.stable.watch import Pictures, Reading, Rule, Verdict, Watch, WatchConfig

MODES = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
SPREAD = 0.3
PLAIN = StableConfig(guidance=1.0)
FINE = Pictures((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)


def points(latents: Tensor) -> Tensor:
    """The plane is channels 0 and 1 of every place: [..., 2]."""
    return latents[:, :2].movedim(1, -1)


def placed(plane: Tensor) -> Tensor:
    """[B, 2 + 14 of zeros, P, H, W]."""
    moved = plane.movedim(-1, 1)
    return torch.cat([moved, moved.new_zeros(len(moved), 14, *moved.shape[2:])], 1)


def four_modes(inputs: Inputs) -> Tensor:
    """The velocity of four equal Gaussians, E[eps - x | x_sigma]."""
    x, sigma = points(predicted(inputs)), inputs.sigma.float()[:, :, None, None, None]
    spread = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    away = x[..., None, :] - (1 - sigma)[..., None] * MODES
    share = torch.softmax(-away.square().sum(-1) / (2 * spread), -1)
    clean = MODES + (SPREAD**2 * (1 - sigma) / spread)[..., None] * away
    clean = (share[..., None] * clean).sum(-2)
    return placed((x - (1 - sigma) * clean) / sigma - clean)


class Plane(nn.Module):
    """A network of the plane: of a point and its noise level."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.config = PRESET.model
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        for k, p in enumerate(self.net.parameters()):
            p.data = 0.3 * draw(100 * seed + k, *p.shape)

    def at(self, x: Tensor, sigma: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, sigma.expand(*x.shape[:-1], 1)], -1))
        return out

    def forward(self, inputs: Inputs) -> object:
        sigma = inputs.sigma.float()[:, :, None, None, None]
        return ByHand(lambda i: placed(self.at(points(predicted(i)), sigma)))(inputs)


def small(position: int) -> Batch:
    """A clip of 4 x 4 places a latent: 512 points."""
    batch = batch_of((position,), 0, CLIP // PRESET.chunk)
    cut = {name: getattr(batch, name)[..., :4, :4] for name in ("latents", "condition", "low")}
    return replace(batch, **cut)


def run(
    steps: int, critic_lr: float, critic_steps: int = 5, guided: float = 1.0
) -> tuple[list[Verdict], Tensor]:
    """A student of one step against the four modes; until a rule ends it."""
    torch.manual_seed(0)
    student, critic, base = Plane(1), Plane(2), small(0)
    real = dict.fromkeys(PRESET.experts, ByHand(four_modes))
    moves = torch.optim.Adam(student.parameters(), lr=8e-3)
    follows = torch.optim.Adam(critic.parameters(), lr=critic_lr)
    watch, verdicts, paused = Watch(WatchConfig(), FINE), list[Verdict](), True
    x = base.latents

    def follow(batch: Batch, step: int, updates: int) -> None:
        for k in range(updates):
            sigma = draw_level(PRESET, PLAIN, None, 0, step, "critic", k)
            follows.zero_grad()
            critic_loss(critic, PRESET, batch, sigma, step, k).mean().backward()
            follows.step()

    for step in range(-60, steps):
        z = points(draw(1000 + step, *base.latents.shape))
        x = placed(student.at(z, torch.ones(1)))
        batch = replace(base, latents=x.detach())
        if step < 0:  # the fake score learns the student's start
            follow(batch, step, 5 if critic_lr else 0)
            continue
        if not paused:
            sigma = draw_level(PRESET, PLAIN, None, 0, step, "score")
            scored = score_clip(PRESET, real, dict.fromkeys(PRESET.experts, critic), batch,
                                PLAIN, sigma, draw(step, *x.shape))  # fmt: skip
            moves.zero_grad()
            (replay_loss(x, scored.gradient) * x.numel() / 1000).backward()
            moves.step()

        def probe(model: nn.Module = critic, batch: Batch = batch) -> float:
            with torch.no_grad():
                levels = [draw_level(PRESET, PLAIN, None, 0, "probe", k) for k in range(2)]
                return sum(float(critic_loss(model, PRESET, batch, s, 0, "probe", k))
                           for k, s in enumerate(levels))  # fmt: skip

        before = probe()
        follow(batch, step, critic_steps)
        verdict = watch.read(Reading(before, probe(), probe(real["low"]), 1, 0, FINE))
        paused = bool(verdict.paused)
        verdicts.append(verdict)
        if verdict.stopped:
            break
    return verdicts, points(x.detach()).reshape(-1, 2)


def spread_over_modes(x: Tensor) -> list[int]:
    near = (x[:, None] - MODES).norm(dim=-1)
    return torch.bincount(near.argmin(1)[near.amin(1) < 1.0], minlength=4).tolist()


def test_a_sound_run_is_never_stopped_and_comes_to_all_modes() -> None:
    start = spread_over_modes(run(1, critic_lr=0.0)[1])
    verdicts, x = run(90, critic_lr=4e-3)
    assert not any(v.stopped for v in verdicts)
    assert sum(bool(v.paused) for v in verdicts) < 10
    assert min(start) == 0 and min(spread_over_modes(x)) > 20


def test_a_frozen_fake_score_is_caught_within_50_steps() -> None:
    verdicts, _ = run(60, critic_lr=0.0)
    assert len(verdicts) <= 50 and Rule.CRITIC_FROZEN in verdicts[-1].stopped


def test_a_fake_score_that_lags_makes_the_student_wait() -> None:
    verdicts, _ = run(30, critic_lr=2e-5, critic_steps=1)
    assert sum(Rule.CRITIC_BEHIND in v.paused for v in verdicts) > 20


# --- each rule by its reading -----------------------------------------------------------------------------


def steady(watch: Watch, steps: int, **change: object) -> Verdict:
    verdict = Verdict({}, {})
    for k in range(steps):
        verdict = watch.read(
            replace(Reading(1.0 + 0.01 * k, 1.0 + 0.01 * k - 1e-3, 2.0, 10, 0, FINE), **change)
        )  # type: ignore[arg-type]
    return verdict


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (Rule.LEFT_OUT, {"left_out": 4}),
        (Rule.STILL, {"pictures": Pictures((1.0, 1.0, 1.0, 0.1), FINE.saturation, FINE.sharpness)}),
        (Rule.SATURATED, {"pictures": Pictures(FINE.motion, (1.0, 1.0, 1.0, 2.0), FINE.sharpness)}),
        (Rule.BLURRED, {"pictures": Pictures(FINE.motion, FINE.saturation, (1.0, 1.0, 1.0, 0.2))}),
    ],
)
def test_a_rule_ends_the_run_with_its_name_and_figures(rule: Rule, change: dict[str, object]) -> None:
    assert not steady(Watch(WatchConfig(), FINE), 20).stopped
    verdict = steady(Watch(WatchConfig(), FINE), 20, **change)
    assert list(verdict.stopped) == [rule] and any(c.isdigit() for c in verdict.stopped[rule])


def test_a_student_that_waits_too_long_ends_the_run() -> None:
    watch = Watch(WatchConfig(patience=5), FINE)
    verdicts = [watch.read(Reading(3.0, 1.0 + 0.01 * k, 4.0, 10, 0, FINE)) for k in range(10)]
    assert verdicts[1].paused and not verdicts[1].stopped
    assert Rule.CRITIC_LOST in verdicts[-1].stopped


def test_a_resumed_watch_judges_as_one_that_was_not_interrupted() -> None:
    readings = [Reading(1.0 + (k % 5) * 0.2, 1.0, 1.0 + k % 2, 10, k % 3, FINE) for k in range(30)]
    whole, first = Watch(WatchConfig(), FINE), Watch(WatchConfig(), FINE)
    for reading in readings[:17]:
        whole.read(reading)
        first.read(reading)
    again = Watch(WatchConfig(), FINE)
    again.load(first.state())
    assert [whole.read(r) for r in readings[17:]] == [again.read(r) for r in readings[17:]]


def test_pictures_of_a_frozen_video_have_no_motion() -> None:
    still = Pictures.of([torch.ones(1, 3, 4, 8, 8) * torch.linspace(-1, 1, 8)])
    assert still.motion == (0.0,) and still.sharpness[0] > 0

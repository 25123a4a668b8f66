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
from trainer.stable.watch import Critic, Late, Pictures, Reading, Rule, Verdict, Watch, WatchConfig

MODES = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
SPREAD = 0.3
PLAIN = StableConfig(guidance=1.0)
FINE = Late(motion=1.0, saturation=1.0, sharpness=1.0, drift=0.1)
EXPERTS = ("high", "low")


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
    watch, verdicts, paused = Watch(WatchConfig(), FINE, ("low",)), list[Verdict](), True
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
        critic_of = Critic(before, probe(), probe(real["low"]), critic_steps)
        verdict = watch.read(Reading({"low": critic_of}, 1, 0, FINE))
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


def reading(
    before: float, after: float, real: float, high: Critic | None = None, left_out: int = 0, late: Late = FINE
) -> Reading:
    """Of `low`, and a sound `high`."""
    sound = Critic(1.0, 0.99, 1.02, 2)
    return Reading({"high": high or sound, "low": Critic(before, after, real, 3)}, 10, left_out, late)


def watch_of(**change: float) -> Watch:
    return Watch(replace(WatchConfig(), **change), FINE, EXPERTS)


def steady(watch: Watch, steps: int, **change: object) -> Verdict:
    verdict = Verdict({}, {})
    for k in range(steps):
        verdict = watch.read(replace(reading(1.0 + 0.01 * k, 1.0 + 0.01 * k - 1e-3, 2.0), **change))  # type: ignore[arg-type]
    return verdict


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (Rule.LEFT_OUT, {"left_out": 4}),
        (Rule.STILL, {"late": replace(FINE, motion=0.1)}),
        (Rule.SATURATED, {"late": replace(FINE, saturation=2.0)}),
        (Rule.BLURRED, {"late": replace(FINE, sharpness=0.2)}),
        (Rule.DRIFTED, {"late": replace(FINE, drift=0.5)}),
    ],
)
def test_a_rule_ends_the_run_with_its_name_and_figures(rule: Rule, change: dict[str, object]) -> None:
    assert not steady(watch_of(), 20).stopped
    verdict = steady(watch_of(), 20, **change)
    assert list(verdict.stopped) == [rule] and any(c.isdigit() for c in verdict.stopped[rule])


def test_one_step_of_other_scenes_ends_nothing() -> None:
    """A step's videos may stand still where the teacher's turned: looks are judged over the window."""
    watch = watch_of()
    for k in range(40):
        late = replace(FINE, motion=0.0, saturation=3.0, drift=0.9) if k % 9 == 0 else FINE
        assert not watch.read(reading(1.0, 0.99, 2.0, late=late)).stopped


def test_a_student_that_waits_too_long_ends_the_run() -> None:
    watch = watch_of(patience=5)
    verdicts = [watch.read(reading(3.0, 1.0 + 0.01 * k, 4.0)) for k in range(10)]
    assert verdicts[1].paused and not verdicts[1].stopped
    assert Rule.CRITIC_LOST in verdicts[-1].stopped


@pytest.mark.parametrize("moved", [0.0, 1e-6])
def test_one_expert_that_stands_still_is_caught_while_the_other_learns(moved: float) -> None:
    """Exactly, or by so little that a rate too low for its precision has left it the real score."""
    watch = watch_of()
    still = Critic(1.0, 1.0 - moved, 1.0, 2)
    verdicts = [watch.read(reading(1.0, 0.98, 1.1, high=still)) for _ in range(10)]
    assert Rule.CRITIC_FROZEN in verdicts[-1].stopped and not verdicts[-2].stopped
    assert "high" in verdicts[-1].stopped[Rule.CRITIC_FROZEN]


def test_an_expert_whose_turn_it_is_not_is_not_frozen() -> None:
    watch = watch_of()
    for k in range(60):
        idle = Critic(1.0, 1.0, 1.1, 0) if k % 2 else None
        assert not watch.read(reading(1.0, 0.99, 1.1, high=idle)).stopped


def test_a_resumed_watch_judges_as_one_that_was_not_interrupted() -> None:
    readings = [
        reading(1.0 + (k % 5) * 0.2, 1.0, 1.0 + k % 2, left_out=k % 3, late=replace(FINE, motion=k % 4 / 8))
        for k in range(30)
    ]
    whole, first, again = watch_of(), watch_of(), watch_of()
    for one in readings[:17]:
        whole.read(one)
        first.read(one)
    again.load(first.state())
    rest = [whole.read(r) for r in readings[17:]]
    assert rest == [again.read(r) for r in readings[17:]] and any(v.stopped for v in rest)


def test_pictures_of_a_frozen_video_have_no_motion_and_no_drift() -> None:
    chunk = torch.ones(1, 3, 4, 8, 8) * torch.linspace(-1, 1, 8)
    still = Pictures.of([chunk, chunk])
    assert still.motion == still.drift == (0.0, 0.0) and still.sharpness[0] > 0


def test_drift_is_how_far_each_video_s_colour_has_gone() -> None:
    """Two videos that go opposite ways: their mean colour stays."""
    chunks = [torch.stack([torch.full((3, 4, 8, 8), c), torch.full((3, 4, 8, 8), -c)]) for c in (0.0, 0.5)]
    assert Pictures.of(chunks).drift == pytest.approx((0.0, 0.5 * 3**0.5))

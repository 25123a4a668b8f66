"""`few_steps`: is a four-step student nearer to its many-step teacher than four steps of the teacher are?

One chunk of a held-out clip behind its true history, from the same noise, four ways:
  teacher    many Euler steps of the teacher, guided (40; shift 5)
  student    four deterministic steps of the student's banks (`schedule.deterministic_step`): each lands on
             the noise level of the next. Rollouts and exported weights renoise between steps instead (f.2),
             and then no noise would pair the four with the teacher's chunk
  euler      four Euler steps of the teacher between the same noise levels, guided, each by the expert that
             has the student's step
Compared in pixels, because latents of a codec do not weigh alike. Source: spec/worldplay2.md f.1, f.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from jobs.evaluate.stats import Interval, paired
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.data.batch import Batch
from trainer.model.layout import Kind, Rule, teacher_forced
from trainer.model.wan import WanModel
from trainer.noise import noise_of
from trainer.objectives.passes import forward
from trainer.sampler import ManySteps, guided
from trainer.schedule import PddSchedule, Sigma, deterministic_step, flow_sigmas

SHARE = 0.7
"""Of pairs in which the student must be the nearer one."""


@dataclass(frozen=True)
class Pair:
    """PSNR against the teacher's chunk, in decibels."""

    sample: str
    student: float
    euler: float


@torch.no_grad()
def compare(
    student: Mapping[str, WanModel],
    teacher: Mapping[str, WanModel],
    preset: Preset,
    schedule: PddSchedule,
    batch: Batch,
    codec: Codec,
    seed: int,
    many: ManySteps | None = None,
) -> list[Pair]:
    """The samples of a batch whose target is one chunk. Both are given by expert, on one device."""
    many = many or ManySteps()
    device = batch.latents.device
    layout = teacher_forced(preset, batch.history, 1)
    first = batch.latents.shape[2] - preset.chunk
    y = batch.condition[:, :, first:]
    shape = (16, preset.chunk, *batch.latents.shape[3:])
    noise = noise_of(batch.positions, shape, device, seed, "few-steps")

    def velocity(state: Tensor, sigma: Sigma, expert: str) -> Tensor:
        model = teacher[expert]
        levels = torch.full((len(batch), preset.chunk), sigma, dtype=torch.float64, device=device)
        given = torch.cat([state, y], 1)
        conditional = forward(model, batch, layout, Rule.CAUSAL, given, levels).velocity
        if many.guidance == 1.0:
            return conditional
        other = forward(model, batch, layout, Rule.CAUSAL, given, levels, negative=True).velocity
        return guided(conditional, other, many.guidance)

    def steps_of_student() -> Tensor:
        state = noise
        for block in schedule.blocks:
            model = student[block.expert]
            rows = model.head.rows(block).to(device)[None, None].expand(len(batch), preset.chunk, -1, -1)
            levels = torch.full(
                (len(batch), preset.chunk), block.sigma_start, dtype=torch.float64, device=device
            )
            given = torch.cat([state, y], 1)
            out = forward(model, batch, layout, Rule.CAUSAL, given, levels, rows=rows).prediction
            assert out is not None
            state = deterministic_step(state, out[:, 0], out[:, 1], block)
        return state

    sigmas = flow_sigmas(many.steps, many.shift)
    # The boundary of the experts is a level of the schedule, where a sigma alone would name the wrong one.
    blocks = [(block.sigma_start, block.sigma_stop, block.expert) for block in schedule.blocks]
    pixels = _decoder(codec, batch, first)
    wanted = pixels(_euler(velocity, noise, [(a, b, preset.expert(a)) for a, b in pairwise(sigmas)]))
    near = [_psnr(pixels(found), wanted) for found in (steps_of_student(), _euler(velocity, noise, blocks))]
    assert layout.count(Kind.PRED) == preset.chunk
    return [Pair(name, a, b) for name, a, b in zip(batch.samples, *near)]


def _euler(
    velocity: Callable[[Tensor, Sigma, str], Tensor], noise: Tensor, steps: Sequence[tuple[Sigma, Sigma, str]]
) -> Tensor:
    """x <- x + (sigma' - sigma) v(x, sigma) for each step (sigma, sigma', expert)."""
    state = noise
    for before, after, expert in steps:
        state = state + (after - before) * velocity(state, before, expert)
    return state


def _decoder(codec: Codec, batch: Batch, first: int) -> Callable[[Tensor], Tensor]:
    """Chunks to pixels behind the true history, which is decoded once."""
    cache = codec.decode(batch.latents[:, :, :first].to(codec.device))[1] if first else None
    return lambda chunk: codec.decode(chunk.to(codec.device), cache)[0].float()


def _psnr(found: Tensor, wanted: Tensor) -> list[float]:
    """Of each sample; pixels in [-1, 1], 60 dB at most."""
    error = (found - wanted).square().mean(dim=(1, 2, 3, 4)).clamp(min=4e-6)
    return (10 * torch.log10(4.0 / error)).tolist()


@dataclass(frozen=True)
class Verdict:
    """share: of pairs in which the student is nearer. gain: PSNR of the student less that of Euler, over
    clips. passed: at least `SHARE` of the pairs, and the interval above zero."""

    share: float
    gain: Interval
    student: float
    euler: float
    passed: bool

    def line(self) -> str:
        return (
            f"student {self.student:.2f} dB from the teacher, 4 Euler steps {self.euler:.2f}; nearer in "
            f"{self.share:.0%} of {self.gain.n} pairs, by {self.gain.mean:+.2f} dB "
            f"({self.gain.low:+.2f} to {self.gain.high:+.2f})"
        )


def verdict(pairs: Sequence[Pair]) -> Verdict:
    """Paired over clips. Raises ValueError without a pair."""
    if not pairs:
        raise ValueError("no pair to judge by")
    student, euler = [p.student for p in pairs], [p.euler for p in pairs]
    gain = paired(student, euler, [p.sample for p in pairs])
    share = sum(a > b for a, b in zip(student, euler)) / len(pairs)
    return Verdict(
        share,
        gain,
        sum(student) / len(pairs),
        sum(euler) / len(pairs),
        share >= SHARE and gain.low > 0.0,
    )

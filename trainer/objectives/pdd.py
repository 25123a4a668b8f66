"""Few steps, first half: every head of the bank learns the teacher's mean velocity over its interval (PDD).

    X_n = (1 - sigma_n) x + sigma_n eps                      block start n, from data
    X_k = X_n + sum_{j<k} (sigma_{j+1} - sigma_j) u_j(X_n)     the student's own state at interval k
    L = E || u_k(X_n) - sg( mean velocity of the teacher over [sigma_k, sigma_{k+1}] from sg(X_k) ) ||^2

One forward pass of the student gives both terms, the sum and u_k, as two rows of coefficients of its bank.
The teacher's mean velocity is one Runge-Kutta step, guidance folded in. A block never straddles two experts,
so each is trained by itself. Source: spec/worldplay2.md f.1, f.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Preset
from trainer.curriculum import PddConfig, Solver
from trainer.data.batch import Batch
from trainer.model.layout import Kind, Layout, Rule
from trainer.noise import keyed, noise_of
from trainer.objectives.flow import bucketed
from trainer.objectives.loss import Loss
from trainer.objectives.passes import Network, forward
from trainer.sampler import guided
from trainer.schedule import PddSchedule


@dataclass(frozen=True)
class Places:
    """Where chunks stand on the grid: `start` of the block and `interval` k of each, [B, G] int64."""

    start: Tensor
    interval: Tensor


def draw_places(
    schedule: PddSchedule, expert: str, positions: tuple[int, ...], groups: int, seed: int
) -> Places:
    """For every chunk one of the expert's blocks and one of its intervals, uniform, by the sample's key."""
    blocks = schedule.blocks_of(expert)
    starts = torch.tensor([block.start for block in blocks])
    lengths = torch.tensor([block.stop - block.start for block in blocks])
    chosen, share = [], []
    for position in positions:
        generator = keyed(seed, position, "interval")
        chosen.append(torch.randint(len(blocks), (groups,), generator=generator))
        share.append(torch.rand(groups, dtype=torch.float64, generator=generator))
    block = torch.stack(chosen)
    within = (torch.stack(share) * lengths[block]).long()
    return Places(starts[block], starts[block] + within)


def coefficients(schedule: PddSchedule, expert: str, places: Places) -> Tensor:
    """[B, G, 2, K] fp64: the displacement from the block's start to interval k, and the velocity of k."""
    first = schedule.blocks_of(expert)[0].start
    heads = torch.arange(schedule.heads(expert)) + first
    sigmas = torch.tensor(schedule.sigmas, dtype=torch.float64)
    steps = (sigmas[1:] - sigmas[:-1])[heads]
    start, interval = places.start[..., None], places.interval[..., None]
    displacement = torch.where((heads >= start) & (heads < interval), steps, 0.0)
    return torch.stack([displacement, (heads == interval).double()], dim=-2)


def pdd_loss(
    student: Network,
    teacher: Network,
    preset: Preset,
    schedule: PddSchedule,
    batch: Batch,
    expert: str,
    config: PddConfig,
    seed: int,
) -> Loss:
    """The student's bank against its frozen teacher, both on true memory, all chunks of the target at once.

    student: with an interval head of the expert. teacher: the expert of stage 3, frozen.
    """
    chunks = batch.latents.shape[2] // preset.chunk - batch.history
    layout = bucketed(preset, batch.history, chunks)
    times = list(layout.only(Kind.PRED).times)
    clean, y, device = batch.latents[:, :, times], batch.condition[:, :, times], batch.latents.device
    places = draw_places(schedule, expert, batch.positions, chunks, seed)
    rows = coefficients(schedule, expert, places).to(device)
    sigmas = torch.tensor(schedule.sigmas, dtype=torch.float64)

    def levels(place: Tensor) -> Tensor:
        """[B, P] of [B, G]."""
        return sigmas[place].to(device).repeat_interleave(preset.chunk, dim=1)

    noise = noise_of(batch.positions, tuple(clean.shape[1:]), device, seed, "noise")
    begin = levels(places.start)
    state = _spread(1.0 - begin) * clean + _spread(begin) * noise
    out = forward(
        student,
        batch,
        layout,
        Rule.CAUSAL,
        torch.cat([state, y], dim=1),
        begin,
        rows=rows.repeat_interleave(preset.chunk, dim=1),
    ).prediction
    assert out is not None
    state = state + out[:, 0].detach()
    wanted = _mean_velocity(
        teacher, batch, layout, state, y, levels(places.interval), levels(places.interval + 1), config
    )
    error = (out[:, 1] - wanted).square().mean(dim=(1, 3, 4))
    value = error.reshape(len(batch), chunks, -1).mean(dim=2)
    return Loss(value.mean(), sigmas[places.interval].to(device), value.detach(), batch.history)


@torch.no_grad()
def _mean_velocity(
    teacher: Network,
    batch: Batch,
    layout: Layout,
    state: Tensor,
    y: Tensor,
    before: Tensor,
    after: Tensor,
    config: PddConfig,
) -> Tensor:
    """[B, 16, P, H, W]: the teacher's velocity over [before, after], both [B, P], from a state at `before`.

    Euler: v at the state. Midpoint: v at the state half an interval on. Source: spec/worldplay2.md f.1.
    """

    def velocity(at: Tensor, level: Tensor) -> Tensor:
        target = torch.cat([at, y], dim=1)
        conditional = forward(teacher, batch, layout, Rule.CAUSAL, target, level).velocity
        if config.guidance == 1.0:
            return conditional
        other = forward(teacher, batch, layout, Rule.CAUSAL, target, level, negative=True).velocity
        return guided(conditional, other, config.guidance)

    first = velocity(state, before)
    if config.solver is Solver.EULER:
        return first
    half = 0.5 * (after - before)
    return velocity(state + _spread(half) * first, before + half)


def _spread(level: Tensor) -> Tensor:
    """[B, P] -> [B, 1, P, 1, 1] float32."""
    return level.float()[:, None, :, None, None]

"""Scores of rollouts, clip by clip: where the teacher would move a clip, against where the fake score would.

    g = (x0_fake - x0_real) / mean |x - x0_real|

A clip is scored by bidirectional experts that see it and their own compressed memory of what the student made
before it. So the cost grows with the number of clips. Source: spec/worldplay2.md g.1, g.2 steps 3 and 5, l.6;
spec/faults.md M1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Preset
from trainer.curriculum import CLIP, StableConfig
from trainer.data.batch import Batch
from trainer.model.layout import Kind, Rule, clip
from trainer.noise import keyed, noise_of
from trainer.objectives.passes import Network, forward
from trainer.sampler import guided
from trainer.schedule import Sigma, shift_ratio
from trainer.stable.played import Played

Experts = Mapping[str, Network]


def clips_of(played: Played, preset: Preset, length: int = CLIP) -> int:
    """Clips of `length` latents of a rollout. Raises ValueError where it is no whole number of them."""
    latents = played.chunks * preset.chunk
    if latents % length:
        raise ValueError(f"a rollout of {latents} latents does not split into clips of {length}")
    return latents // length


def clip_batch(played: Played, preset: Preset, index: int, length: int = CLIP) -> Batch:
    """Clip `index` and everything before it, as the batch that stage 2 trains on: one prompt, that of the
    clip's middle. Source: spec/worldplay2.md l.7."""
    scene, stop = played.scene, (index + 1) * length
    chunks = length // preset.chunk
    device = played.full.device
    prompt = scene.prompts[index * chunks + chunks // 2]
    return Batch(
        scene.positions,
        tuple(str(p) for p in scene.positions),
        index * chunks,
        played.full[:, :16, :stop],
        played.full[:, 16:, :stop],
        played.low[:, :, : index * length // 2],
        scene.actions[:, :stop].to(device),
        scene.text(prompt, device).embeddings,
        (0,) * (stop // preset.chunk),
        scene.negative.to(device),
    )


def draw_level(
    preset: Preset, config: StableConfig, expert: str | None, seed: int, *role: str | int
) -> Sigma:
    """One noise level: u uniform, shifted, clamped. expert: only inside its range; None for all levels.

    Source: spec/worldplay2.md g.2 step 3, g.3.
    """
    generator = keyed(seed, *role)
    while True:
        u = float(torch.rand((), dtype=torch.float64, generator=generator))
        sigma = Sigma(min(max(shift_ratio(u, config.shift), config.lowest), config.highest))
        if expert is None or preset.expert(sigma) == expert:
            return sigma


@dataclass(frozen=True)
class Scored:
    """gradient: g of a clip, [B, 16, L, H, W], zero where a video does not count. counts: [B] bool.
    scale: [B], mean |x - x0_real|. size: [B], mean |g|. sigma: at which it was scored."""

    gradient: Tensor
    counts: Tensor
    scale: Tensor
    size: Tensor
    sigma: Sigma


@torch.no_grad()
def score_clip(
    preset: Preset,
    real: Experts,
    fake: Experts,
    batch: Batch,
    config: StableConfig,
    sigma: Sigma,
    noise: Tensor,
) -> Scored:
    """g of the clip of L latents that a batch ends with, at one noise level. noise: [B, 16, L, H, W].

    The floor of the scale is a share of the clip's own size, so that a clip which the teacher would not move
    gives a bounded gradient. A video whose g is not finite, or has a value above the limit, is left out.
    """
    clean = _clip(batch, preset)
    noisy = (1.0 - sigma) * clean + sigma * noise
    expert = preset.expert(sigma)

    def estimate(model: Network, guidance: float) -> Tensor:
        """x0 = x_sigma - sigma v."""
        velocity = clip_velocity(model, preset, batch, noisy, sigma)
        if guidance != 1.0:
            other = clip_velocity(model, preset, batch, noisy, sigma, negative=True)
            velocity = guided(velocity, other, guidance)
        return noisy - sigma * velocity

    x0_real = estimate(real[expert], config.guidance)
    x0_fake = estimate(fake[expert], 1.0)
    scale = (clean - x0_real).abs().mean(dim=(1, 2, 3, 4))
    floor = config.floor * clean.square().mean(dim=(1, 2, 3, 4)).sqrt()
    gradient = (x0_fake - x0_real) / torch.maximum(scale, floor)[:, None, None, None, None]
    largest = gradient.abs().amax(dim=(1, 2, 3, 4))
    counts = torch.isfinite(largest) & (largest <= config.limit)
    gradient = torch.where(counts[:, None, None, None, None], gradient, 0.0)
    return Scored(gradient, counts, scale, gradient.abs().mean(dim=(1, 2, 3, 4)), sigma)


def _clip(batch: Batch, preset: Preset) -> Tensor:
    """The clip that a batch ends with: all behind its history."""
    return batch.latents[:, :, batch.history * preset.chunk :]


def clip_velocity(
    model: Network, preset: Preset, batch: Batch, noisy: Tensor, sigma: Sigma, *, negative: bool = False
) -> Tensor:
    """v(x_sigma, sigma, m_<, A) of the clip that a batch ends with, [B, 16, L, H, W]."""
    length = noisy.shape[2]
    layout = clip(preset, batch.history, length // preset.chunk)
    levels = torch.full(
        (len(batch), layout.count(Kind.PRED)), sigma, dtype=torch.float64, device=noisy.device
    )
    target = torch.cat([noisy, batch.condition[:, :, -length:]], dim=1)
    return forward(model, batch, layout, Rule.FULL, target, levels, negative=negative).velocity


def critic_loss(
    model: Network, preset: Preset, batch: Batch, sigma: Sigma, seed: int, *role: str | int
) -> Tensor:
    """[B]: flow matching of the fake score on a clip of a rollout, with its own memory of what lies before.

    L = || v_fake(x_sigma, m_<) - (eps - x) ||^2. The rollout is data: no gradient reaches the student.
    Source: spec/worldplay2.md g.2 step 5.
    """
    clean = _clip(batch, preset)
    noise = noise_of(batch.positions, tuple(clean.shape[1:]), clean.device, seed, *role)
    noisy = (1.0 - sigma) * clean + sigma * noise
    velocity = clip_velocity(model, preset, batch, noisy, sigma)
    return (velocity - (noise - clean)).square().mean(dim=(1, 2, 3, 4))

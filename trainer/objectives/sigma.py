"""Noise levels of training: a law, restricted to the range of an expert, drawn for every sample by its key.

sigma = s u / (1 + (s - 1) u). The range of an expert has a pre-image in u; u is drawn inside it by its
inverse distribution, one uniform draw a level, so no draw is rejected and none depends on another.
Source: spec/worldplay2.md e.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.config import ConfigError, Preset
from trainer.curriculum import Draw, SigmaLaw
from trainer.noise import keyed
from trainer.schedule import unshift_sigma


def expert_range(preset: Preset, expert: str) -> tuple[float, float]:
    """The noise levels of an expert: [boundary, 1] for "high", [0, boundary) for "low", [0, 1] for "single".

    Raises ConfigError for an expert that the preset does not have.
    """
    if expert not in preset.experts:
        raise ConfigError(f"no expert {expert!r} in preset {preset.name}: {', '.join(preset.experts)}")
    if preset.boundary is None:
        return 0.0, 1.0
    return (preset.boundary, 1.0) if expert == "high" else (0.0, preset.boundary)


def draw_sigma(
    law: SigmaLaw, preset: Preset, expert: str, positions: Iterable[int], groups: int, seed: int
) -> Tensor:
    """float64 [B, G] on the CPU: G noise levels for each position in the stream, by its own key alone."""
    drawn = torch.stack(
        [torch.rand(groups, dtype=torch.float64, generator=keyed(seed, p, "sigma")) for p in positions]
    )
    return _levels(law, preset, expert, drawn)


def even_levels(law: SigmaLaw, preset: Preset, expert: str, count: int) -> Tensor:
    """float64 [count]: the middles of `count` equally likely parts of what an expert is trained on."""
    return _levels(law, preset, expert, (torch.arange(count, dtype=torch.float64) + 0.5) / count)


def _levels(law: SigmaLaw, preset: Preset, expert: str, drawn: Tensor) -> Tensor:
    """Levels of an expert below which shares `drawn` of its part of the law lie."""
    low, high = expert_range(preset, expert)
    first, last = (_share(law, unshift_sigma(sigma, law.shift)) for sigma in (low, high))
    u = _quantile(law, first + (last - first) * drawn)
    sigma = law.shift * u / (1.0 + (law.shift - 1.0) * u)
    # Rounding must not hand a level to the other expert.
    open_end = high if high == 1.0 else math.nextafter(high, 0.0)
    return sigma.clamp(low, open_end)


def _share(law: SigmaLaw, u: float) -> float:
    """Share of the law below u."""
    if law.draw is Draw.UNIFORM:
        return u
    if u <= 0.0 or u >= 1.0:
        return float(u >= 1.0)
    return 0.5 * math.erfc(-(math.log(u / (1.0 - u)) - law.mean) / (law.std * math.sqrt(2.0)))


def _quantile(law: SigmaLaw, share: Tensor) -> Tensor:
    """u below which a share of the law lies."""
    if law.draw is Draw.UNIFORM:
        return share
    return torch.sigmoid(law.mean + law.std * torch.special.ndtri(share))

"""Every random draw has a key, and nothing else decides it: no process, no order, no device.

A draw of training is keyed by (seed, position in the stream of samples, role), so that it is the same on any
number of ranks, after any restart. Source: DESIGN rule 9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def keyed(seed: int, *role: str | int) -> torch.Generator:
    """A CPU generator that depends on the seed and the role alone, so every device draws the same."""
    digest = hashlib.sha256("|".join(map(str, (seed, *role))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def keyed_noise(shape: tuple[int, ...], device: torch.device, seed: int, *role: str | int) -> Tensor:
    """float32 N(0, 1) of a key, on a device."""
    return torch.randn(shape, generator=keyed(seed, *role)).to(device)


def noise_of(
    positions: Iterable[int], shape: tuple[int, ...], device: torch.device, seed: int, *role: str | int
) -> Tensor:
    """float32 N(0, 1) [B, *shape]: sample b by its own position in the stream alone."""
    return torch.stack([torch.randn(shape, generator=keyed(seed, p, *role)) for p in positions]).to(device)

"""Rotary positions on three axes, from explicit integer positions: any horizon, no table.

Source: spec/worldplay2.md a.4; spec/faults.md F5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that turn with time, row, column: 44, 42, 42 of 128 (22, 21, 21 complex)."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [N, head_dim / 2] fp32 each, of tokens at integer positions [N, 3].

    Angles are made in fp64: at position 1277 an fp32 product is already off by 1e-4 rad.
    """
    angles = []
    for axis, width in enumerate(axis_widths(head_dim)):
        exponent = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
        angles.append(torch.outer(positions[:, axis].double(), theta**-exponent))
    angle = torch.cat(angles, dim=1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [B, N, heads, d] by [N, d / 2]: channels 2i and 2i + 1 are one complex number. fp32 inside."""
    real, imag = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([real * cos - imag * sin, real * sin + imag * cos], dim=-1).flatten(-2).to(x.dtype)

"""What every codec is: between pixels and latents, in one causal stream.

A stream begins with one frame, latent 0; every later latent is 4 frames, so T latents are 4T-3 frames. A
codec is given the stream in parts and carries its cache from part to part: the parts together give what one
call on the whole gives. Caches are values: a call never changes the one it is given, so a stream can be
resumed, or branched, at any part. Every codec has 16 channels, each of about unit variance, and strides
(4, 8, 8).
Source: spec/worldplay2.md a.1, a.3, c.2.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from schemas.latents import CHANNELS as CHANNELS
from schemas.latents import SPACE_STRIDE as SPACE_STRIDE
from schemas.timeline import FRAMES_PER_LATENT

TIME_STRIDE = FRAMES_PER_LATENT

Cache = tuple[Any, ...]
"""What a stream carries: tensors and marks of the codec. None stands for a stream that has not begun."""


class Codec(Protocol):
    """Pixels: float [B, 3, F, H, W] in [-1, 1]. Latents: float32 [B, 16, T, H/8, W/8], normalised.

    identity: names weights, or the frozen record, and precision; equal identities give equal latents.
    device: where pixels and latents are taken and given.
    """

    @property
    def identity(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def encode(self, pixels: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """The next latents of a stream. F = 4T-3 where it begins (cache None), else 4T. Raises ValueError."""

    def decode(self, latents: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """The next pixels of a stream, clamped to [-1, 1]; F as in `encode`. Raises ValueError."""


def latents_in(pixels: Tensor, begins: bool) -> int:
    """T of a part of a stream. Raises ValueError on a shape or number of frames that no part has."""
    if pixels.ndim != 5 or pixels.shape[1] != 3:
        raise ValueError(f"pixels must be [B, 3, F, H, W], not {list(pixels.shape)}")
    _, _, frames, height, width = pixels.shape
    if height % SPACE_STRIDE or width % SPACE_STRIDE:
        raise ValueError(f"height and width must be multiples of {SPACE_STRIDE}, not {height}x{width}")
    groups = frames - 1 if begins else frames
    if frames < 1 or groups % TIME_STRIDE:
        law = "4T-3 frames where the stream begins" if begins else "4T frames"
        raise ValueError(f"a part of a stream has {law}, not {frames}")
    return groups // TIME_STRIDE + begins


def check_latents(latents: Tensor) -> None:
    """Raises ValueError unless latents are [B, 16, T >= 1, h, w]."""
    if latents.ndim != 5 or latents.shape[1] != CHANNELS or latents.shape[2] < 1:
        raise ValueError(f"latents must be [B, {CHANNELS}, T, h, w], not {list(latents.shape)}")


def to_pixels(rgb: Tensor) -> Tensor:
    """uint8 [F, H, W, 3] -> float32 [1, 3, F, H, W] in [-1, 1]."""
    return (rgb.permute(3, 0, 1, 2).to(torch.float32) / 127.5 - 1.0).unsqueeze(0)


def to_rgb(pixels: Tensor) -> Tensor:
    """float [1, 3, F, H, W] in [-1, 1] -> uint8 [F, H, W, 3]."""
    return ((pixels[0].float().clamp(-1, 1) + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)

"""The low-resolution stream: one function for data preparation and rollout.

Of every chunk, each second frame **of that chunk**, at a quarter of height and width, in one causal stream of
its own. Chunk 0 has 13 frames: of 0, 2, .., 12 the stream takes 0 | 2, 4, 6, 8 and leaves out 10 and 12.
Chunk i >= 1 has 16, from frame 16i-3: 13, 15, .., 27 and so on. So from j = 2 on, low-resolution latent j
covers latents 2j and 2j+1. Sampling the whole clip by two, then encoding, would give another stream.
Source: spec/worldplay2.md c.2, n.1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from schemas.timeline import FRAMES_PER_LATENT, GRID_PER_CHUNK, LATENTS_PER_CHUNK
from trainer.codec.base import Cache, Codec

TIME_FACTOR = 2
SPACE_FACTOR = 4
FIRST_CHUNK = GRID_PER_CHUNK - FRAMES_PER_LATENT + 1
"""Frames of chunk 0."""
LATENTS = LATENTS_PER_CHUNK // TIME_FACTOR
"""Low-resolution latents of a chunk."""


def taken(frames: int, begins: bool) -> range:
    """Which frames of a chunk of `frames` frames its low-resolution latents encode, counted in the chunk.
    Raises ValueError unless it has 13 where the stream begins, else 16."""
    expected = FIRST_CHUNK if begins else GRID_PER_CHUNK
    if frames != expected:
        raise ValueError(
            f"a chunk has {expected} frames{' where the stream begins' if begins else ''}, not {frames}"
        )
    used = FRAMES_PER_LATENT * (LATENTS - 1) + 1 if begins else FRAMES_PER_LATENT * LATENTS
    return range(0, TIME_FACTOR * used, TIME_FACTOR)


def shrink(pixels: Tensor) -> Tensor:
    """[B, 3, F, H, W] -> [B, 3, F, H/4, W/4]: bilinear, corners not aligned, no antialiasing; as released."""
    b, c, f, h, w = pixels.shape
    if h % SPACE_FACTOR or w % SPACE_FACTOR:
        raise ValueError(f"height and width must be multiples of {SPACE_FACTOR}, not {h}x{w}")
    flat = pixels.transpose(1, 2).reshape(b * f, c, h, w)
    small = F.interpolate(flat, (h // SPACE_FACTOR, w // SPACE_FACTOR), mode="bilinear", align_corners=False)
    return small.reshape(b, f, c, *small.shape[2:]).transpose(1, 2)


def encode_chunk(codec: Codec, pixels: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
    """The two low-resolution latents of the next chunk, float32 [B, 16, 2, H/32, W/32], and the new cache.

    pixels: every frame of the chunk at full size, [B, 3, 13 or 16, H, W]. Raises ValueError.
    """
    chosen = taken(pixels.shape[2], cache is None)
    return codec.encode(shrink(pixels[:, :, chosen.start : chosen.stop : chosen.step]), cache)

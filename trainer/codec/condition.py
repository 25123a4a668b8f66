"""The image condition y of image-to-video: the latents of the clip [image, 0, 0, ...].

Source: spec/worldplay2.md a.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.codec.base import TIME_STRIDE, Cache, Codec
from trainer.codec.weights import CodecError

MOST = 64
"""A causal VAE of finite reach forgets the image: `wan` after some 20 latents, whatever the weights."""


def image_condition(codec: Codec, image: Tensor) -> Tensor:
    """First latents of y, float32 [B, 16, n, h, w]; every later latent equals the last of them, for any
    horizon (`extend`).

    image: [B, 3, 1, H, W] in [-1, 1]. The zeros behind it (mid-grey) are encoded until the carried cache
    comes back bit for bit: from there on nothing can change any more. The 4-channel mask (ones at latent 0)
    is not part of it: see `mask`.
    Raises CodecError when there is no fixed point within 64 latents.
    """
    latents, cache = codec.encode(image)
    zeros = torch.zeros_like(image).expand(-1, -1, TIME_STRIDE, -1, -1)
    found = [latents]
    while len(found) < MOST:
        latents, after = codec.encode(zeros, cache)
        found.append(latents)
        if _same(cache, after):
            return torch.cat(found[: _settled(found)], 2)
        cache = after
    raise CodecError(
        f"the zero tail of y has no fixed point within {MOST} latents: kernels of the codec are not "
        "deterministic; use float32, or another device"
    )


def extend(head: Tensor, latents: int) -> Tensor:
    """y of `latents` latents from the stored head [B, 16, n, h, w]: cut, or its last latent repeated."""
    if latents <= head.shape[2]:
        return head[:, :, :latents]
    tail = head[:, :, -1:].expand(-1, -1, latents - head.shape[2], -1, -1)
    return torch.cat([head, tail], 2)


def mask(latents: int) -> Tensor:
    """float32 [4, T, 1, 1]: ones at latent 0."""
    out = torch.zeros(4, latents, 1, 1)
    out[:, 0] = 1.0
    return out


def _settled(found: list[Tensor]) -> int:
    """How many latents there are up to the first of those that equal the last."""
    kept = len(found)
    while kept > 2 and torch.equal(found[kept - 2], found[-1]):
        kept -= 1
    return kept


def _same(a: Cache, b: Cache) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )

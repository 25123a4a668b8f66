"""The linear codec: causal 4x8x8 principal components of a corpus, where no VAE weights are at hand.

The frame that begins a stream has a basis of its own; every later latent is its own four frames under
another. So a latent tells its pictures by itself, and an error in one never reaches the next. Predicting a
group from the decoded frame before was measured: at 64x128 it gains 0.26 dB on held-out clips (27.0 to 27.3),
and costs both of these. A decoder that also sees the 8 patches around gains 0.1 dB at 128x256, nothing at
64x128.
Source: DESIGN 2, rule 10; spec/worldplay2.md a.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schemas.latents import Basis, FittedCodec, Matrix
from trainer.codec.base import CHANNELS, SPACE_STRIDE, TIME_STRIDE, Cache, check_latents, latents_in
from trainer.codec.weights import CodecError

MOST_PATCHES = 2048
_BEGUN: Cache = ()
"""A linear stream carries nothing but that it has begun."""


class Linear:
    """A fitted codec on a device, in float32."""

    def __init__(self, record: FittedCodec, device: str = "cpu") -> None:
        self.identity = f"linear-{record.identity()}"
        self.device = torch.device(device)
        self._frame = _Side(record.frame, 1, self.device)
        self._group = _Side(record.group, TIME_STRIDE, self.device)

    def encode(self, pixels: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        latents_in(pixels, cache is None)
        pixels = pixels.to(self.device, torch.float32)
        if cache is not None:
            return self._group.encode(pixels), _BEGUN
        first = self._frame.encode(pixels[:, :, :1])
        rest = [self._group.encode(pixels[:, :, 1:])] if pixels.shape[2] > 1 else []
        return torch.cat([first, *rest], 2), _BEGUN

    def decode(self, latents: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        check_latents(latents)
        latents = latents.to(self.device, torch.float32)
        if cache is not None:
            return self._group.decode(latents), _BEGUN
        first = self._frame.decode(latents[:, :, :1])
        rest = [self._group.decode(latents[:, :, 1:])] if latents.shape[2] > 1 else []
        return torch.cat([first, *rest], 2), _BEGUN


class _Side:
    """One of the two bases, for patches of `frames` frames."""

    def __init__(self, basis: Basis, frames: int, device: torch.device) -> None:
        components, std = (torch.from_numpy(m.array()) for m in (basis.components, basis.std))
        if components.shape != (3 * frames * SPACE_STRIDE**2, CHANNELS):
            raise CodecError(
                f"a basis of {list(components.shape)} for patches of {frames} frames; fit it again"
            )
        self._frames = frames
        self._mean = torch.from_numpy(basis.mean.array()).to(device)
        self._to = (components / std).to(device)
        self._back = (components * std).T.contiguous().to(device)

    def encode(self, pixels: Tensor) -> Tensor:
        return ((patches(pixels, self._frames) - self._mean) @ self._to).permute(0, 4, 1, 2, 3)

    def decode(self, latents: Tensor) -> Tensor:
        values = latents.permute(0, 2, 3, 4, 1) @ self._back + self._mean
        return unpatch(values, self._frames).clamp(-1.0, 1.0)


def patches(pixels: Tensor, frames: int) -> Tensor:
    """[B, 3, n*frames, H, W] -> [B, n, H/8, W/8, 3*frames*64]."""
    b, c, f, h, w = pixels.shape
    s = SPACE_STRIDE
    cut = pixels.reshape(b, c, f // frames, frames, h // s, s, w // s, s)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)


def unpatch(values: Tensor, frames: int) -> Tensor:
    """The inverse of `patches`."""
    b, n, h, w, _ = values.shape
    s = SPACE_STRIDE
    cut = values.reshape(b, n, h, w, 3, frames, s, s).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return cut.reshape(b, 3, n * frames, h * s, w * s)


# --- fitting ----------------------------------------------------------------------------------------------


class Fit:
    """Principal components of pictures that pass by, in memory that does not grow with their number.

    Moments are summed in float64 over products in float32; the same pictures in the same order give the same
    record on the same machine.
    """

    def __init__(self) -> None:
        self._frame = _Moments(3 * SPACE_STRIDE**2)
        self._group = _Moments(3 * TIME_STRIDE * SPACE_STRIDE**2)
        self._groups = 0
        self._size: tuple[int, int] | None = None

    def see(self, group: Tensor) -> None:
        """Four consecutive frames of the grid: float32 [1, 3, 4, H, W] in [-1, 1]. The first of them stands
        for a frame that begins a stream."""
        if group.shape[:3] != (1, 3, TIME_STRIDE):
            raise ValueError(f"a group is [1, 3, {TIME_STRIDE}, H, W], not {list(group.shape)}")
        size = int(group.shape[3]), int(group.shape[4])
        if self._size not in (None, size):
            raise ValueError(f"pictures of {size} among those of {self._size}")
        self._size = size
        self._frame.add(_some(patches(group[:, :, :1], 1)))
        self._group.add(_some(patches(group, TIME_STRIDE)))
        self._groups += 1

    def record(self, clips: tuple[str, ...]) -> FittedCodec:
        """The codec of what was seen. Raises CodecError when that is too little to have 16 components."""
        if self._size is None:
            raise CodecError("no picture was seen, so there is no codec to fit")
        return FittedCodec(
            height=self._size[0],
            width=self._size[1],
            clips=tuple(sorted(clips)),
            groups=self._groups,
            frame=self._frame.basis(),
            group=self._group.basis(),
        )


def _some(found: Tensor) -> Tensor:
    """At most 2,048 patches, evenly spread: at 448x832 products of all 5,824 take three times as long."""
    rows = found.reshape(-1, found.shape[-1])
    return rows[:: -(-len(rows) // MOST_PATCHES)]


class _Moments:
    """First and second moments of patches of `values` values."""

    def __init__(self, values: int) -> None:
        self._count = 0
        self._sum = torch.zeros(values, dtype=torch.float64)
        self._square = torch.zeros(values, values, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        self._count += len(rows)
        self._sum += rows.sum(0, dtype=torch.float64)
        self._square += (rows.T @ rows).double()

    def basis(self) -> Basis:
        mean = self._sum / self._count
        variance, vectors = torch.linalg.eigh(self._square / self._count - torch.outer(mean, mean))
        components = vectors[:, -CHANNELS:].flip(1)
        std = variance[-CHANNELS:].flip(0)
        if not bool((std > 0).all()):
            raise CodecError("the pictures have fewer than 16 components: fit on more, and livelier, clips")
        # An eigenvector has no sign of its own: the largest entry is made positive.
        largest = components.gather(0, components.abs().argmax(0, keepdim=True))
        components = components * largest.sign()
        return Basis(
            mean=Matrix.of(mean.numpy()),
            components=Matrix.of(components.numpy()),
            std=Matrix.of(std.sqrt().numpy()),
        )

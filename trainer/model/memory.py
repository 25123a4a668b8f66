"""The fine branch of the memory compressor: full-resolution history -> 32 times fewer tokens, streamed.

Every convolution looks only back in time, so a chunk needs nothing of the past but the last two inputs of
each of the seven convolutions that span time: the `MemoryState`, a value of constant size. The coarse branch
is the network's own patch embedding of the low-resolution stream (wan.py). Source: spec/worldplay2.md c.1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import LATENTS_PER_PAIR, MemoryConfig

SPACE_FOLD = 8  # three blocks that halve rows and columns


class CompressorError(ValueError):
    """A history that cannot be folded, or that does not continue the state."""


@dataclass(frozen=True)
class MemoryState:
    """What the next chunk needs of the past. latents: how many were seen. tails: [B, C, 2, H, W] of each
    convolution over time, in the order of use."""

    latents: int
    tails: tuple[Tensor, ...]


class Tails:
    """The tails of one pass: gives each convolution its old one, and gathers the new ones."""

    def __init__(self, state: MemoryState | None) -> None:
        self._old = iter(state.tails) if state is not None else None
        self.new: list[Tensor] = []

    def join(self, x: Tensor, frames: int) -> Tensor:
        """x [B, C, T, H, W] with the `frames` inputs before it, zeros at the start of a video."""
        if self._old is None:
            past = x.new_zeros(*x.shape[:2], frames, *x.shape[3:])
        else:
            past = next(self._old)
            if past.shape[:2] != x.shape[:2] or past.shape[3:] != x.shape[3:]:
                raise CompressorError(f"state of shape {tuple(past.shape)} met a history {tuple(x.shape)}")
        joined = torch.cat([past, x], dim=2)
        self.new.append(joined[:, :, -frames:].clone())
        return joined


class CausalConv3d(nn.Conv3d):
    """A convolution that pads time on the left, from the state, and space with zeros."""

    def stream(self, x: Tensor, tails: Tails) -> Tensor:
        joined = tails.join(x, self.kernel_size[0] - 1)
        out: Tensor = self(joined)
        return out


class CompressorBlock(nn.Module):
    """SiLU(conv3), then optionally half the space, then optionally half the time; plus a shortcut.

    Where the grid shrinks the shortcut has no parameters: fold (time, row, column) into channels, order
    (C, t, h, w), and average consecutive groups. Elsewhere it is a 1x1x1 convolution.
    """

    def __init__(self, width: int, out: int, *, halve_space: bool, halve_time: bool) -> None:
        super().__init__()
        self.fold = (2 if halve_time else 1, 2 if halve_space else 1)
        self.out = out
        self.conv = CausalConv3d(width, out, 3, padding=(0, 1, 1))
        self.resample: nn.Module | None = None
        self.time_conv: CausalConv3d | None = None
        self.avg_shortcut: nn.Module | None = None
        if halve_space:
            self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(out, out, 3, stride=2))
            if width * self.fold[0] * 4 % out:
                raise CompressorError(f"{width} channels cannot be folded into {out}")
        else:
            self.avg_shortcut = nn.Conv3d(width, out, 1)
        if halve_time:
            self.time_conv = CausalConv3d(out, out, (3, 1, 1), stride=(2, 1, 1))

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        """[B, C, T, H, W] -> [B, out, T / fold, H / fold, W / fold]."""
        y = functional.silu(self.conv.stream(x, tails))
        if self.resample is not None:
            y = _by_frame(self.resample, y)
        if self.time_conv is not None:
            y = self.time_conv.stream(y, tails)
        return y + (self._folded(x) if self.avg_shortcut is None else self.avg_shortcut(x))

    def _folded(self, x: Tensor) -> Tensor:
        time, space = self.fold
        b, c, t, h, w = x.shape
        x = x.reshape(b, c, t // time, time, h // space, space, w // space, space)
        x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)  # B, C, t, h, w | T, H, W
        return x.reshape(b, self.out, -1, t // time, h // space, w // space).mean(2)


class ChannelNorm(nn.Module):
    """RMS norm over channels of [B, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=1) * math.sqrt(x.shape[1]) * self.gamma


class SpatialAttention(nn.Module):
    """Attention inside each frame, with a residual: time stays causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = ChannelNorm(width)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        q, k, v = (
            part.flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
            for part in self.to_qkv(self.norm(x)).chunk(3, dim=1)
        )  # B, heads, N, d
        out = functional.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(x.shape)
        result: Tensor = x + self.proj(out)
        return result


class MemoryCompressor(nn.Module):
    """[B, 36, T, H, W] of full resolution -> [B, T / 2, H / 8 * W / 8, D], zero at initialisation.

    Compressed latent j depends on latents 2j - 24 .. 2j + 1.
    """

    def __init__(self, in_dim: int, dim: int, config: MemoryConfig) -> None:
        super().__init__()
        self.input_layer = nn.Linear(in_dim, config.stem)
        widths = (config.stem, *config.down, *config.flat)
        down = len(config.down)
        self.blocks = nn.ModuleList(
            CompressorBlock(width, out, halve_space=i < down, halve_time=i == 0)
            for i, (width, out) in enumerate(itertools.pairwise(widths))
        )
        self.attn_blocks = nn.ModuleList(
            SpatialAttention(widths[-1], config.heads) for _ in range(config.attention_blocks)
        )
        self.output_layer = nn.Linear(widths[-1], dim)

    def forward(self, history: Tensor, state: MemoryState | None = None) -> tuple[Tensor, MemoryState]:
        """The tokens of `history`, which continues `state`, and the state after it.

        Raises CompressorError when the history does not fold into whole tokens.
        """
        _, _, latents, rows, cols = history.shape
        if latents % LATENTS_PER_PAIR or rows % SPACE_FOLD or cols % SPACE_FOLD:
            raise CompressorError(
                f"history of {latents} latents of {rows}x{cols}: the compressor folds pairs of latents, and "
                f"rows and columns in multiples of {SPACE_FOLD}"
            )
        tails = Tails(state)
        x: Tensor = self.input_layer(history.movedim(1, -1).to(self.input_layer.weight.dtype)).movedim(-1, 1)
        for block in self.blocks:
            x = block(x, tails)
        for attention in self.attn_blocks:
            x = _by_frame(attention, x)
        tokens: Tensor = self.output_layer(x.movedim(1, -1).flatten(2, 3))
        seen = latents + (0 if state is None else state.latents)
        return tokens, MemoryState(seen, tuple(tails.new))

    def init_weights(self, generator: torch.Generator) -> None:
        """torch's own law for convolutions, Xavier-uniform input, zero output layer."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, ChannelNorm):
                nn.init.ones_(module.gamma)
        nn.init.xavier_uniform_(self.input_layer.weight, generator=generator)
        nn.init.zeros_(self.input_layer.bias)
        nn.init.zeros_(self.output_layer.weight)
        nn.init.zeros_(self.output_layer.bias)


def _by_frame(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module on [B, C, H, W] to each frame of [B, C, T, H, W]."""
    frames = x.transpose(1, 2)
    out: Tensor = module(frames.flatten(0, 1))
    return torch.unflatten(out, 0, frames.shape[:2]).transpose(1, 2)

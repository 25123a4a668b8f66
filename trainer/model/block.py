"""One block: self-attention, cross-attention, action, feed-forward.

Shapes: B batch, L frames (latents) of the sequence, N tokens, D width.
Source: spec/worldplay2.md a.1, a.2, b, n.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import ModelConfig
from trainer.model.action import ActionMlp
from trainer.model.attention import Mask, attend
from trainer.model.frames import over_frames
from trainer.model.layout import Run
from trainer.model.plan import HERE, Attended, InputError, Past, Plan, Spread
from trainer.model.rope import rotate


class RmsNorm(nn.Module):
    """RMS norm over the whole width of queries or keys."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        normed = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Projections of one attention, queries and keys normed."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim, eps), RmsNorm(dim, eps)

    def query(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, heads, d]."""
        out: Tensor = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        return out

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., N, D] -> two of [..., N, heads, d]."""
        shape = (self.heads, -1)
        return self.norm_k(self.k(x)).unflatten(-1, shape), self.v(x).unflatten(-1, shape)

    def out(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(x.flatten(2))
        return out


class SelfAttention(Attention):
    def forward(self, x: Tensor, plan: Plan, past: Past, spread: Spread = HERE) -> Attended:
        """x [B, N, D] over the cached memory and its sequence; also keys (turned) and values for a cache."""
        query = rotate(self.query(x), plan.cos, plan.sin)
        key, value = self.key_value(x)
        key = rotate(key, plan.cos, plan.sin)
        out, key, value = spread.attend(query, key, value, past, plan.mask, plan.whole)
        return Attended(self.out(out), key, value)


class CrossAttention(Attention):
    def forward(self, x: Tensor, plan: Plan, key: Tensor, value: Tensor) -> Tensor:
        """x [B, N, D] over the prompts [B, P, text_len, heads, d]: each stretch over the one it reads.

        Padded text is attended like any other. Source: spec/worldplay2.md a.2, l.7.
        """
        query = self.query(x)
        if not plan.prompt_runs:  # no frame of the sequence is here
            return self.out(query)
        parts = [
            attend(query[:, start:stop], key[:, prompt], value[:, prompt], Mask(stop - start, key.shape[2]))
            for start, stop, prompt in plan.prompt_runs
        ]
        return self.out(torch.cat(parts, dim=1))


@dataclass(frozen=True)
class Shared:
    """What all blocks of a pass read. fp32 stays fp32 (faults F5), so a sharding policy must not cast inputs.

    plan: of the frames that lie here. modulation: [B, L, 6, D] fp32. action: [B, L, D]. text: [B, P,
    text_len, D], None with cached keys. keep: return keys and values.
    """

    plan: Plan
    spread: Spread
    modulation: Tensor
    action: Tensor
    text: Tensor | None
    keep: bool


class Kept(NamedTuple):
    """Keys and values of a block: [B, N, heads, d] of the sequence (see `Attended`), [B, P, text_len, heads,
    d] of prompts."""

    key: Tensor
    value: Tensor
    text_key: Tensor
    text_value: Tensor


class WanBlock(nn.Module):
    """Self-attention, cross-attention, action, feed-forward. Source: spec/worldplay2.md a.1, b."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.dim
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))
        self.self_attn = SelfAttention(dim, config.heads, config.eps)
        self.norm3 = nn.LayerNorm(dim, config.eps)
        self.cross_attn = CrossAttention(dim, config.heads, config.eps)
        self.action_mlp = ActionMlp(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, config.ffn), nn.GELU("tanh"), nn.Linear(config.ffn, dim))

    def forward(
        self,
        x: Tensor,
        shared: Shared,
        past: Past,
        cross: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Kept | None]:
        """x [B, N, D] -> the same, and what caches are made of where it is kept."""
        runs = shared.plan.layout.runs
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation.float() + shared.modulation
        ).unbind(2)  # fmt: skip
        attended, key, value = self.self_attn(
            self._modulated(x, scale1, shift1, runs), shared.plan, past, shared.spread
        )
        x = over_frames(attended, runs, lambda h, g: h * g, gate1).add(x).to(x.dtype)
        text_key, text_value = self._cross(shared) if cross is None else cross
        x = x + self.cross_attn(_layer_norm(x, self.eps, self.norm3), shared.plan, text_key, text_value)
        x = self.action_mlp.inject(x, shared.action, runs)
        fed = self.ffn(self._modulated(x, scale2, shift2, runs))
        x = over_frames(fed, runs, lambda h, g: h * g, gate2).add(x).to(x.dtype)
        return x, Kept(key, value, text_key, text_value) if shared.keep else None

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor, runs: tuple[Run, ...]) -> Tensor:
        normed = _layer_norm(x.float(), self.eps)
        return over_frames(normed, runs, lambda h, a, b: h * (1 + a) + b, scale, shift).to(x.dtype)

    def _cross(self, shared: Shared) -> tuple[Tensor, Tensor]:
        if shared.text is None:
            raise InputError("neither text nor its cached keys were given")
        return self.cross_attn.key_value(shared.text)


def _layer_norm(x: Tensor, eps: float, affine: nn.LayerNorm | None = None) -> Tensor:
    """Layer norm in fp32, back in the dtype of x."""
    weight = None if affine is None else affine.weight.float()
    bias = None if affine is None else affine.bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

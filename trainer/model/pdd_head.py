"""The head of the network: one velocity, a bank of one velocity an interval, or the compact few-step head.

All three are K linear layers over the same modulated tokens, mixed by rows of coefficients: a row [K] gives
one output. For a block of the few-step schedule row 0 gives the displacement, row 1 the endpoint velocity.
Source: spec/worldplay2.md a.1, f.1, f.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.model.frames import over_frames
from trainer.model.layout import Run
from trainer.schedule import Block


class HeadError(ValueError):
    """Coefficients, or a bank, of another number of heads."""


class Head(nn.Module):
    """Modulated norm shared by all kinds; a kind adds its weights as `bank()`: [K, out, D] and [K, out]."""

    heads: int

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = nn.Parameter(torch.empty(1, 2, dim))

    def bank(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def rows(self, block: Block) -> Tensor:
        """[2, K] fp64: displacement and endpoint velocity of a block of the few-step schedule."""
        raise NotImplementedError

    def forward(self, x: Tensor, time: Tensor, runs: tuple[Run, ...], rows: Tensor | None) -> Tensor:
        """x: [B, N, D] tokens of the predicted frames. time: [B, P, D] fp32 time embedding of each.

        rows: [B, P, R, K] coefficients, or None for the only head there is.
        Returns [B, P, R, n, out] in fp32.
        """
        shift, scale = (self.modulation.float() + time[:, :, None]).unbind(2)  # B, P, D each
        x = functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        x = over_frames(x, runs, lambda h, a, b: h * (1 + a) + b, scale, shift)
        x = torch.unflatten(x, 1, (time.shape[1], -1))
        weight, bias = (part.float() for part in self.bank())
        if rows is None:
            if self.heads != 1:
                raise HeadError(f"{self.heads} heads: say by rows of coefficients which one is asked for")
            return functional.linear(x, weight[0], bias[0])[:, :, None]
        if rows.shape[-1] != self.heads:
            raise HeadError(f"rows of {rows.shape[-1]} coefficients for {self.heads} heads")
        rows = rows.float()
        mixed = torch.einsum("bprk,kod->bprod", rows, weight)
        offset = torch.einsum("bprk,ko->bpro", rows, bias)
        return torch.einsum("bpnd,bprod->bprno", x, mixed) + offset[:, :, :, None]


class VelocityHead(Head):
    """One velocity: the head of the base model and of stages 1 to 3."""

    heads = 1

    def __init__(self, dim: int, out: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.head = nn.Linear(dim, out)

    def bank(self) -> tuple[Tensor, Tensor]:
        return self.head.weight[None], self.head.bias[None]

    def rows(self, block: Block) -> Tensor:
        raise HeadError("a velocity head has no blocks: make a bank or a compact head of it first")


class IntervalHead(Head):
    """One velocity for each interval of an expert: what few-step training learns."""

    def __init__(self, dim: int, out: int, eps: float, heads: int) -> None:
        super().__init__(dim, eps)
        self.heads = heads
        self.bank_weight = nn.Parameter(torch.empty(heads, out, dim))
        self.bank_bias = nn.Parameter(torch.empty(heads, out))

    def bank(self) -> tuple[Tensor, Tensor]:
        return self.bank_weight, self.bank_bias

    def rows(self, block: Block) -> Tensor:
        if block.heads.stop > self.heads:
            raise HeadError(f"block {block.index} needs heads {block.heads} of a bank of {self.heads}")
        rows = torch.zeros(2, self.heads, dtype=torch.float64)
        rows[0, block.heads.start : block.heads.stop - 1] = torch.tensor(
            block.steps[:-1], dtype=torch.float64
        )
        rows[1, block.heads.stop - 1] = 1.0
        return rows


class CompactHead(Head):
    """The heads of each block fused into two: what a few-step model is shipped with.

    block_weight: [blocks, 2 out, D], displacement first; block_bias: [blocks, 2 out].
    """

    def __init__(self, dim: int, out: int, eps: float, blocks: int) -> None:
        super().__init__(dim, eps)
        self.heads = 2 * blocks
        self.block_weight = nn.Parameter(torch.empty(blocks, 2 * out, dim))
        self.block_bias = nn.Parameter(torch.empty(blocks, 2 * out))

    def bank(self) -> tuple[Tensor, Tensor]:
        shape = (self.heads, -1)
        return torch.unflatten(self.block_weight, 1, (2, -1)).flatten(0, 1), self.block_bias.reshape(shape)

    def rows(self, block: Block) -> Tensor:
        if 2 * block.local + 1 >= self.heads:
            raise HeadError(f"block {block.local} of an expert with {self.heads // 2} blocks")
        return torch.eye(self.heads, dtype=torch.float64)[2 * block.local : 2 * block.local + 2]


def bank_from_velocity(head: VelocityHead, heads: int) -> IntervalHead:
    """The start of few-step training: the teacher's head, copied for every interval."""
    out, dim = head.head.weight.shape
    weight = head.head.weight.detach()
    bank = IntervalHead(dim, out, head.eps, heads).to(device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        bank.modulation.copy_(head.modulation)
        bank.bank_weight.copy_(head.head.weight)
        bank.bank_bias.copy_(head.head.bias)
    return bank


def compact_from_bank(bank: IntervalHead, blocks: tuple[Block, ...]) -> CompactHead:
    """Fuse a bank for export: displacement rows are sums over (sigma_{k+1} - sigma_k) W_k of all intervals
    of a block but the last, endpoint rows are the last. Summed in fp64, kept in the bank's dtype."""
    if [k for block in blocks for k in block.heads] != list(range(bank.heads)):
        raise HeadError(f"blocks {[b.index for b in blocks]} do not cover a bank of {bank.heads} heads")
    weight, bias = bank.bank_weight.detach(), bank.bank_bias.detach()
    out, dim = weight.shape[1:]
    compact = CompactHead(dim, out, bank.eps, len(blocks)).to(device=weight.device, dtype=weight.dtype)
    rows = torch.stack([bank.rows(block) for block in blocks]).to(weight.device)  # blocks, 2, K
    with torch.no_grad():
        compact.modulation.copy_(bank.modulation)
        compact.block_weight.copy_(torch.einsum("brk,kod->brod", rows, weight.double()).flatten(1, 2))
        compact.block_bias.copy_(torch.einsum("brk,ko->bro", rows, bias.double()).flatten(1, 2))
    return compact


def unpatchify(x: Tensor, rows: int, patch: tuple[int, int, int]) -> Tensor:
    """[B, P, R, n, out] -> [B, R, C, P, H, W]; `out` holds the patch first, then the channels."""
    _, ph, pw = patch
    x = torch.unflatten(torch.unflatten(x, -1, (ph, pw, -1)), 3, (rows, -1))  # B, P, R, h, w, ph, pw, C
    x = x.permute(0, 2, 7, 1, 3, 5, 4, 6)  # B, R, C, P, h, ph, w, pw
    return x.reshape(*x.shape[:4], x.shape[4] * x.shape[5], -1)

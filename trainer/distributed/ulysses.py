"""Sequence parallelism (Ulysses): each rank has a stretch of whole frames, and in attention a share of heads.

Frames differ in tokens, so stretches do too; they are cut at frames because modulation and actions are
values of a frame. Around self-attention tokens are exchanged for heads and back; everything else is local.
Cached memory lies as attention wants it: each rank has all of its tokens, of its own heads. Before the head
the predicted tokens are gathered, so every rank of a sequence has the whole prediction and the same loss.

Gradients. Let S ranks share a sequence. The sharding averages over all ranks, so over a sequence it takes the
sum of the S gradients divided by S. Behind the gather (head, loss) each rank has the whole gradient: right.
Before it each has the part that goes through its own frames, so those parts must be S times as large: the
backward of the gather multiplies by S, once, and the exchanges carry it as they are.
Source: spec/worldplay2.md n.4.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.model.attention import Mask
from trainer.model.layout import Kind, Layout, LayoutError
from trainer.model.plan import Attended, Past, over_memory


@functools.lru_cache(maxsize=256)
def cut(tokens: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """First frame of each part, then the number of frames: stretches whose largest has the fewest tokens.

    tokens: of each frame. With fewer frames than parts the last parts are empty.
    """
    low, high = max(tokens), sum(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(tokens, parts, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    starts = _filled(tokens, parts, low)
    # A part that no frame needed takes the last frame of the stretch before it that has two.
    while len(starts) < parts:
        ends = [*starts[1:], len(tokens)]
        longest = max(range(len(starts)), key=lambda i: ends[i] - starts[i])
        if ends[longest] - starts[longest] < 2:
            starts.append(len(tokens))
        else:
            starts.insert(longest + 1, ends[longest] - 1)
    return (*starts, len(tokens))


def _filled(tokens: tuple[int, ...], parts: int, limit: int) -> list[int]:
    """Starts of stretches of at most `limit` tokens each, filled from the front."""
    starts, load = [0], 0
    for frame, count in enumerate(tokens):
        if load + count > limit:
            starts.append(frame)
            load = 0
        load += count
    return starts


class Ulysses:
    """The `spread` of a network whose sequences are shared by the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, layout: Layout) -> tuple[int, int]:
        """Raises LayoutError where a rank would have no frame and its weights no gradient."""
        if torch.is_grad_enabled() and len(layout) < self.size:
            raise LayoutError(f"a sequence of {len(layout)} frames cannot be shared by {self.size} ranks")
        cuts = self._cuts(layout)
        return cuts[self.rank], cuts[self.rank + 1]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, past: Past, mask: Mask, layout: Layout
    ) -> Attended:
        own = query.shape[1]
        sizes = self._tokens(layout)
        heads = torch.stack([query, key, value])
        sent = torch.unflatten(heads, 3, (self.size, -1))  # 3, B, n, S, h, d
        sent = sent.permute(3, 2, 0, 1, 4, 5).flatten(0, 1)  # S n, 3, B, h, d
        q, k, v = self._exchange(sent, [own] * self.size, sizes).movedim(0, 2).unbind(0)  # B, N, h, d
        out, k, v = over_memory(q, k, v, past, mask)
        back = self._exchange(out.movedim(1, 0), sizes, [own] * self.size)  # S n, B, h, d
        back = torch.unflatten(back, 0, (self.size, own)).permute(2, 1, 0, 3, 4).flatten(2, 3)
        return Attended(back, k, v)

    def gather(self, predicted: Tensor, layout: Layout) -> Tensor:
        sizes = [part.only(Kind.PRED).tokens for part in self._parts(layout)]
        return cast(Tensor, _Gather.apply(predicted, self.group, self.rank, sizes))  # type: ignore[no-untyped-call]

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return cast(Tensor, _Exchange.apply(x, self.group, sent, received))  # type: ignore[no-untyped-call]

    def _cuts(self, layout: Layout) -> tuple[int, ...]:
        return cut(tuple(frame.grid.tokens for frame in layout.frames), self.size)

    def _parts(self, layout: Layout) -> list[Layout]:
        cuts = self._cuts(layout)
        return [Layout(layout.frames[a:b]) for a, b in itertools.pairwise(cuts)]

    def _tokens(self, layout: Layout) -> list[int]:
        return [part.tokens for part in self._parts(layout)]


class _Exchange(torch.autograd.Function):
    """Rows of each rank to the others; the gradient takes the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


class _Gather(torch.autograd.Function):
    """[B, own, D] of every rank, joined; the gradient of the own part, times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, rank: int, sizes: list[int]) -> Tensor:
        ctx.start, ctx.size, ctx.ranks = sum(sizes[:rank]), sizes[rank], len(sizes)
        rows = x.transpose(0, 1).contiguous()  # own, B, D
        copies = rows.repeat(len(sizes), 1, 1)
        return _all_to_all(copies, group, [sizes[rank]] * len(sizes), sizes).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][:, ctx.start : ctx.start + ctx.size] * ctx.ranks, None, None, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out

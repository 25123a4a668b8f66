"""One attention function, two backends that are proved equal, and masks that know their lengths.

A mask is built from layouts (`layout.visible`: a table of frames by frames). Dense: the table spread over
tokens, for SDPA. Blocks: a FlexAttention `mask_mod` that reads the table, with the block structure computed
from the frames, so that the full square of tokens never exists (34,034 tokens: 1.2 GB).
Source: spec/worldplay2.md d; spec/faults.md F8, F9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trainer.model.layout import Layout, Rule, visible

BLOCK = 128


class MaskError(ValueError):
    """A mask that does not belong to the tensors, or that leaves a query with nothing to see."""


class Backend(StrEnum):
    DENSE = "dense"
    FLEX = "flex"


@dataclass(frozen=True)
class Mask:
    """Which of `keys` tokens each of `queries` tokens sees; `dense` and `blocks` both None: all of them."""

    queries: int
    keys: int
    dense: Tensor | None = None
    blocks: BlockMask | None = None


def make_mask(queries: Layout, keys: Layout, rule: Rule, backend: Backend, device: torch.device) -> Mask:
    """The mask of a sequence over what it sees. `keys` ends with `queries`.

    Raises MaskError when a query would see nothing.
    """
    table = visible(queries, keys, rule)
    if not bool(table.any(dim=1).all()):
        raise MaskError(f"{int((~table.any(dim=1)).sum())} frames of the sequence see no key")
    if bool(table.all()):
        return Mask(queries.tokens, keys.tokens)
    frame_q, frame_k = queries.frame_of_token(), keys.frame_of_token()
    if backend is Backend.DENSE:
        dense = table[frame_q][:, frame_k].to(device)
        return Mask(queries.tokens, keys.tokens, dense=dense)
    blocks = _blocks(table, frame_q, frame_k, device)
    return Mask(queries.tokens, keys.tokens, blocks=blocks)


def _blocks(table: Tensor, frame_q: Tensor, frame_k: Tensor, device: torch.device) -> BlockMask:
    """A BlockMask from the frames that each block of tokens touches, by sums over rectangles of the table."""
    first_q, last_q = _spans(frame_q)
    first_k, last_k = _spans(frame_k)
    total = torch.nn.functional.pad(table.long().cumsum(0).cumsum(1), (1, 0, 1, 0))
    seen = (
        total[last_q + 1][:, last_k + 1]
        - total[first_q][:, last_k + 1]
        - total[last_q + 1][:, first_k]
        + total[first_q][:, first_k]
    )
    area = (last_q + 1 - first_q)[:, None] * (last_k + 1 - first_k)[None]
    whole = seen == area
    # A block that hangs over the end of the sequence is masked token by token.
    whole[-1] &= len(frame_q) % BLOCK == 0
    whole[:, -1] &= len(frame_k) % BLOCK == 0
    partial = (seen > 0) & ~whole
    sees, of_query, of_key = table.to(device), frame_q.to(device), frame_k.to(device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees[of_query[q], of_key[k]]

    partial_count, partial_index = _ordered(partial.to(device))
    whole_count, whole_index = _ordered(whole.to(device))
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        whole_count,
        whole_index,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(len(frame_q), len(frame_k)),
    )


def _spans(frame_of_token: Tensor) -> tuple[Tensor, Tensor]:
    """First and last frame that each block of tokens touches."""
    starts = torch.arange(0, len(frame_of_token), BLOCK)
    ends = (starts + BLOCK).clamp(max=len(frame_of_token)) - 1
    return frame_of_token[starts], frame_of_token[ends]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, Q] counts and [1, 1, Q, K] indices, the chosen blocks of a row first."""
    index = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], index.to(torch.int32)[None, None].contiguous()


COMPILATIONS = 64
"""Of FlexAttention in a process, at most; torch's own limit is 8. Stage 3 of `a14b` has 8 pairs of lengths in
training (6 with compressed memory, 2 of `memory_drop`), and stage 4 the same 6, each with and without
gradient; their gates have 2 more, of one chunk, for two sizes of a batch: 20. Stages without a mask have
none. Where only parts are trained, some inputs of blocks have no gradient: up to twice as many."""


def compiled(backend: Any = "inductor") -> Callable[..., Tensor]:
    """FlexAttention compiled once for each pair of lengths (and kind of input): see `COMPILATIONS`.

    fullgraph: past the limit it raises, where it would otherwise go on eagerly, with the full square in
    memory.
    """
    made = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=backend)

    def run(query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask) -> Tensor:
        # At the call, because torch's settings are those of a thread, and backward has threads of its own.
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            return made(query, key, value, block_mask=block_mask)

    return run


_compiled_flex = compiled()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Attention of [B, N, heads, d] over [B, M, heads, d].

    FlexAttention is compiled on CUDA; on the CPU it runs eagerly and forward only.
    Raises MaskError when the mask was built for other lengths.
    """
    if (query.shape[1], key.shape[1]) != (mask.queries, mask.keys):
        raise MaskError(
            f"mask for {mask.queries} queries and {mask.keys} keys met {query.shape[1]} and {key.shape[1]}: "
            "build the plan from the layout that the tensors have"
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if mask.blocks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask.dense)
    else:
        # A block that is compiled itself has it in its own graph.
        alone = q.is_cuda and not torch.compiler.is_compiling()
        flex: Any = _compiled_flex if alone else flex_attention
        out = cast(Tensor, flex(q, k, v, block_mask=mask.blocks))
    return out.transpose(1, 2)

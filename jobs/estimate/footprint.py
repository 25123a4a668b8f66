"""Bytes of the network and of its passes, from the real modules on the meta device: shapes without numbers.

Nothing is computed and nothing is allocated, so full size takes a second. A pass is run with few blocks; all
blocks are the same, so those of a deeper network follow.
Source: spec/worldplay2.md g.4, n.3, n.4.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from jobs.estimate.work import Pass
from trainer.config import LATENTS_PER_PAIR, ModelConfig
from trainer.distributed.ulysses import Ulysses
from trainer.model.attention import Backend, Mask
from trainer.model.kvcache import KvCache, RawText, Segment
from trainer.model.layout import Kind, Layout, Rule
from trainer.model.memory import SPACE_FOLD
from trainer.model.pdd_head import IntervalHead
from trainer.model.plan import Plan, make_plan
from trainer.model.wan import History, Inputs, WanModel

META = torch.device("meta")


@dataclass(frozen=True)
class Parameters:
    """How many there are. block: of one block; root: outside the blocks. adapters: of rank 1, beside every
    matrix of the blocks. parts: by what they do."""

    total: int
    block: int
    root: int
    adapters: int
    parts: Mapping[str, int]


@functools.lru_cache(maxsize=16)
def parameters(config: ModelConfig) -> Parameters:
    """Of one expert."""
    with META:
        model = WanModel(config)
    parts: Counter[str] = Counter()
    for name, value in model.named_parameters():
        outer, _, inner = name.partition(".")
        part = inner.split(".")[1] if outer == "blocks" else outer
        parts[_PARTS.get(part, part)] += value.numel()
    inside = list(model.blocks[0].parameters())
    block, total = sum(value.numel() for value in inside), sum(parts.values())
    adapters = config.layers * sum(sum(value.shape) for value in inside if value.dim() == 2)
    return Parameters(total, block, total - block * config.layers, adapters, dict(parts.most_common()))


_PARTS = {
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "norm3": "cross-attention",
    "ffn": "feed-forward",
    "action_mlp": "action",
    "modulation": "time and modulation",
    "time_embedding": "time and modulation",
    "time_projection": "time and modulation",
    "text_embedding": "text",
    "patch_embedding": "patches and head",
    "head": "patches and head",
    "memory": "compressor",
}


@dataclass(frozen=True)
class Activations:
    """Bytes of one sample on one rank, beside parameters and their gradients.

    saved: what the backward pass reads, kept at the end of the forward pass. peak: most that is alive at
    once, in forward and backward.
    """

    saved: int
    peak: int


@functools.lru_cache(maxsize=256)
def activations(
    config: ModelConfig,
    run: Pass,
    *,
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
    gradient: bool = True,
    sequence: int = 1,
    backend: Backend = Backend.FLEX,
) -> Activations:
    """Of one sample in a pass, on the rank with the longest stretch of its sequence.

    gradient: False for a pass that is only read. backend: DENSE keeps its mask in every layer, as the CPU
    does. Raises LayoutError when there are fewer frames than ranks.
    """
    layers = config.layers if config.layers <= MEASURED else MEASURED
    most, fewer = (
        _measure(replace(config, layers=n), run, dtype, checkpointing, gradient, sequence, backend)
        for n in (layers, layers - 1)
    )
    more = config.layers - layers
    saved, peak = (a + more * (a - b) for a, b in zip(most, fewer))
    return Activations(saved, peak)


MEASURED = 2
"""Blocks that are run at most. From 1 and 2 blocks of `a14b` follow the bytes of 40, to the byte."""


def kv_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Keys and values of cached tokens, of one expert. Source: spec/worldplay2.md a.5."""
    return 2 * config.layers * config.dim * dtype.itemsize * tokens


def _measure(
    config: ModelConfig,
    run: Pass,
    dtype: torch.dtype,
    checkpointing: bool,
    gradient: bool,
    sequence: int,
    backend: Backend,
) -> tuple[int, int]:
    """(saved, peak) of a network as deep as `config` says."""
    with META:
        head = (
            None if run.bank is None else IntervalHead(config.dim, config.patch_out, config.eps, run.bank[1])
        )
        model = WanModel(config, head).to(dtype).requires_grad_(gradient)
    inputs = empty_inputs(config, run, dtype, backend, sequence)
    if sequence > 1:
        model.spread = _Longest(run.layout, sequence)
    if checkpointing:
        for block in model.blocks:
            block.forward = functools.partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), _FusedAttention()),
            )
    if gradient:  # as sharded training does: a gradient is reduced and gone
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    with _FusedAttention():
        return live_bytes(model, inputs, gradient=gradient)


def live_bytes(model: WanModel, inputs: Inputs, *, gradient: bool = True) -> tuple[int, int]:
    """(saved, peak): bytes kept for backward after a forward pass, and most bytes alive at once in both.

    Parameters and what the pass is given do not count. Any device: tensors are followed, not an allocator.
    """
    known = {value.untyped_storage()._cdata for value in [*model.parameters(), *tensors_of(inputs)]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with _Live(known) as live, torch.set_grad_enabled(gradient):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(inputs)
        saved = sum(kept.values())
        if gradient and out.prediction is not None:
            out.prediction.float().square().mean().backward()
    return saved, live.peak


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor that a pass is given."""
    plan, history = inputs.plan, inputs.history
    found = [inputs.latents, inputs.sigma, inputs.actions, plan.times, plan.cos, plan.sin]
    found += [t for segment in inputs.cache.segments for t in segment.keys + segment.values]
    found += [inputs.text.embeddings] if isinstance(inputs.text, RawText) else []
    found += [] if history is None else [history.full, history.low]
    found += [] if plan.mask.dense is None else [plan.mask.dense]
    return found + ([] if inputs.rows is None else [inputs.rows])


def empty_inputs(
    config: ModelConfig,
    run: Pass,
    dtype: torch.dtype,
    backend: Backend,
    sequence: int = 1,
    device: torch.device = META,
) -> Inputs:
    """What a pass over one sample is given: its shapes, without values. sequence: ranks that share it, each
    with its heads of cached memory."""
    layout, context = run.layout, run.context
    grid = next(f.grid for f in layout.frames if f.kind not in (Kind.CMP, Kind.PAD))
    height, width = grid.rows * config.patch[1], grid.cols * config.patch[2]
    compressed, predicted = layout.count(Kind.CMP), layout.count(Kind.PRED)
    frames = len(layout) - compressed - layout.count(Kind.PAD)
    prompts = tuple(frame * run.prompts // len(layout) for frame in range(len(layout)))
    plan = _empty_plan(config.head_dim, layout, context, run.rule, prompts, backend, device)
    history = None
    memory = KvCache()
    with device:
        if compressed:
            low = layout.only(Kind.CMP).frames[0].grid
            rows, cols = low.rows * SPACE_FOLD, low.cols * SPACE_FOLD
            small = (low.rows * config.patch[1], low.cols * config.patch[2])
            history = History(
                torch.empty(1, config.in_dim, LATENTS_PER_PAIR * compressed, rows, cols),
                torch.empty(1, config.in_dim, compressed, *small),
            )
        if len(context):
            shape = (1, context.tokens, config.heads // sequence, config.head_dim)
            keys, values = (
                tuple(torch.empty(shape, dtype=dtype) for _ in range(config.layers)) for _ in range(2)
            )
            memory = KvCache((Segment(context, keys, values),))
        return Inputs(
            plan,
            torch.empty(1, config.in_dim, frames, height, width),
            torch.empty(1, predicted, dtype=torch.float64),
            torch.empty(1, max(layout.times) + 1, 6),
            RawText(torch.empty(1, run.prompts, config.text_len, config.text_dim)),
            history,
            memory,
            None if run.bank is None else torch.empty(1, predicted, *run.bank),
        )


@functools.lru_cache(maxsize=16)
def _empty_plan(
    head_dim: int,
    layout: Layout,
    context: Layout,
    rule: Rule,
    prompts: tuple[int, ...],
    backend: Backend,
    device: torch.device,
) -> Plan:
    """The plan of a pass. Of the network it depends on the width of a head alone."""
    config = ModelConfig(dim=head_dim, ffn=1, heads=1, layers=1)
    plan = make_plan(config, layout, context=context, rule=rule, prompts=prompts, backend=backend)
    mask = plan.mask if plan.mask.dense is None else replace(plan.mask, dense=plan.mask.dense.to(device))
    if mask.blocks is not None:  # they weigh nothing beside the tokens
        mask = Mask(mask.queries, mask.keys)
    moved = {name: getattr(plan, name).to(device) for name in ("times", "cos", "sin")}
    return replace(plan, mask=mask, **moved)


class _Fused(torch.autograd.Function):
    """The bytes of a fused attention: it keeps queries, keys, values, output and a sum a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # SDPA makes numbers of a mask, anew in every layer.
        dense = () if mask is None else (mask.to(query.dtype),)
        ctx.save_for_backward(query, key, value, out, sums, *dense)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _FusedAttention(TorchFunctionMode):
    """On the meta device torch would spread attention into its matrices; no other device does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            mask = None if kwargs is None else kwargs.get("attn_mask")
            return _Fused.apply(*args, mask)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Longest(Ulysses):
    """The rank with the longest stretch, without the others: what it would receive has a shape alone."""

    def __init__(self, layout: Layout, ranks: int) -> None:
        self.size = ranks
        tokens = self._tokens(layout)
        self.rank = tokens.index(max(tokens))

    def gather(self, predicted: Tensor, layout: Layout) -> Tensor:
        rows = layout.only(Kind.PRED).tokens
        return self._exchange(predicted.transpose(0, 1), [predicted.shape[1]], [rows]).transpose(0, 1)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out: Tensor = _Sent.apply(x.contiguous(), sum(sent), sum(received))  # type: ignore[no-untyped-call]
        return out


class _Sent(torch.autograd.Function):
    """[sent, ...] -> [received, ...], and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: int, received: int) -> Tensor:
        ctx.sent = sent
        return x.new_empty(received, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].new_empty(ctx.sent, *gradients[0].shape[1:]), None, None


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that comes to be, until it is gone."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = dict.fromkeys(known, 0)
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._born, out)
        return out

    def _born(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)
        return tensor

    def _gone(self, which: int) -> None:
        self.now -= self._alive.pop(which)

"""One expert: the Wan2.2 image-to-video transformer with actions and memory, as single-device code.

`WanModel.forward` is the only way in (a sharded module gathers its weights there), for every use: a masked
training pass, a bidirectional clip, the prefill of the cache, a denoising step. What a pass is made of is
said by its `Plan`; everything carried between passes is a value that comes in and goes out.
Shapes: B batch, L frames (latents) of the sequence, N tokens, D width, P predicted frames.
Source: spec/worldplay2.md a, b, c.1, n.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import LATENTS_PER_PAIR, ModelConfig
from trainer.model.action import ActionEncoder, ActionMlp
from trainer.model.attention import Backend, Mask, attend, make_mask
from trainer.model.frames import over_frames
from trainer.model.kvcache import (
    EMPTY,
    CacheError,
    CrossCache,
    KvCache,
    ProjectedText,
    RawText,
    Segment,
    Text,
    check_horizon,
)
from trainer.model.layout import NOTHING, Kind, Layout, Rule, Run
from trainer.model.memory import MemoryCompressor, MemoryState
from trainer.model.pdd_head import Head, VelocityHead, unpatchify
from trainer.model.rope import rotate, rotations

TIMESTEPS = 1000.0


class InputError(ValueError):
    """Tensors that do not fit the plan of the pass."""


@dataclass(frozen=True)
class Plan:
    """Everything about a pass that is known before its tensors.

    layout: the sequence. context: the cached memory before it. prompts: which of the sample's prompts each
    frame reads. prompt_runs: (start, stop, prompt) in tokens. times: [L] int64, rows of the action table.
    cos, sin: [N, d / 2] fp32.
    """

    layout: Layout
    context: Layout
    prompts: tuple[int, ...]
    prompt_runs: tuple[tuple[int, int, int], ...]
    times: Tensor
    cos: Tensor
    sin: Tensor
    mask: Mask


def make_plan(
    config: ModelConfig,
    layout: Layout,
    *,
    context: Layout = NOTHING,
    rule: Rule = Rule.CAUSAL,
    prompts: tuple[int, ...] | None = None,
    backend: Backend = Backend.DENSE,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a sequence after cached memory. prompts: one for each frame; all read prompt 0 if None.

    Raises HorizonError when a frame lies beyond what the weights can place.
    """
    check_horizon(max(layout.times) + 1, config.max_latents)
    chosen = (0,) * len(layout) if prompts is None else prompts
    if len(chosen) != len(layout):
        raise InputError(f"{len(chosen)} prompts for {len(layout)} frames")
    device = torch.device(device)
    cos, sin = rotations(layout.positions().to(device), config.head_dim, config.theta)
    mask = make_mask(layout, context + layout, rule, backend, device)
    times = torch.tensor(layout.times, device=device)
    return Plan(layout, context, chosen, _prompt_runs(layout, chosen), times, cos, sin, mask)


def _prompt_runs(layout: Layout, prompts: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    token = 0
    for frame, prompt in zip(layout.frames, prompts):
        end = token + frame.grid.tokens
        if runs and runs[-1][2] == prompt:
            runs[-1] = (runs[-1][0], end, prompt)
        else:
            runs.append((token, end, prompt))
        token = end
    return tuple(runs)


@dataclass(frozen=True)
class History:
    """The chunks behind the compressed frames of a sequence, whole or since `state`.

    full: [B, 36, 2c, H, W]; low: [B, 36, c, H / 4, W / 4], for c compressed frames.
    """

    full: Tensor
    low: Tensor
    state: MemoryState | None = None


@dataclass(frozen=True)
class Inputs:
    """The tensors of a pass.

    latents: [B, 36, F, H, W], the full-resolution frames of the layout in its order (noisy or clean 16
    channels, then the 20 of the image condition). sigma: [B, P] noise level of each predicted frame; memory
    is always at 0. actions: [B, T, 6], rows of the whole video from latent 0: a frame takes the row of its
    own time. rows: [B, P, R, K] coefficients of a bank or compact head. keep: return what caches are made of.
    """

    plan: Plan
    latents: Tensor
    sigma: Tensor
    actions: Tensor
    text: Text
    history: History | None = None
    cache: KvCache = EMPTY
    rows: Tensor | None = None
    keep: bool = False


class Outputs(NamedTuple):
    """prediction: [B, R, 16, P, H, W] fp32 (R = 1: the velocity), None without predicted frames.

    memory: state of the compressor after `history`. segment, text: with `keep`, the keys and values of the
    sequence and of its prompts.
    """

    prediction: Tensor | None
    memory: MemoryState | None = None
    segment: Segment | None = None
    text: CrossCache | None = None

    @property
    def velocity(self) -> Tensor:
        """[B, 16, P, H, W]; InputError when there is none, or more than one."""
        if self.prediction is None or self.prediction.shape[1] != 1:
            raise InputError("this pass does not predict one velocity")
        return self.prediction[:, 0]


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
    """Projections of one attention, queries and keys normed. `attend` is a hook for sequence parallelism."""

    def __init__(self, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RmsNorm(dim, eps), RmsNorm(dim, eps)
        self.attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor] = attend

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
    def forward(
        self, x: Tensor, plan: Plan, past: tuple[list[Tensor], list[Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, D] over the cached memory and itself; also its own turned keys, and its values."""
        query = rotate(self.query(x), plan.cos, plan.sin)
        key, value = self.key_value(x)
        key = rotate(key, plan.cos, plan.sin)
        keys, values = torch.cat([*past[0], key], dim=1), torch.cat([*past[1], value], dim=1)
        return self.out(self.attend(query, keys, values, plan.mask)), key, value


class CrossAttention(Attention):
    def forward(self, x: Tensor, plan: Plan, key: Tensor, value: Tensor) -> Tensor:
        """x [B, N, D] over the prompts [B, P, text_len, heads, d]: each stretch over the one it reads.

        Padded text is attended like any other. Source: spec/worldplay2.md a.2, l.7.
        """
        query = self.query(x)
        parts = [
            self.attend(
                query[:, start:stop], key[:, prompt], value[:, prompt], Mask(stop - start, key.shape[2])
            )
            for start, stop, prompt in plan.prompt_runs
        ]
        return self.out(torch.cat(parts, dim=1))


@dataclass(frozen=True)
class Shared:
    """What all blocks of a pass read. Opaque to a sharding policy, so that fp32 stays fp32 (faults F5).

    modulation: [B, L, 6, D] fp32. action: [B, L, D]. text: [B, P, text_len, D], None with cached keys.
    """

    plan: Plan
    modulation: Tensor
    action: Tensor
    text: Tensor | None


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
        past: tuple[list[Tensor], list[Tensor]],
        cross: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x [B, N, D] -> the same, then keys and values of the sequence and of the prompts."""
        runs = shared.plan.layout.runs
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation.float() + shared.modulation
        ).unbind(2)  # fmt: skip
        attended, key, value = self.self_attn(self._modulated(x, scale1, shift1, runs), shared.plan, past)
        x = over_frames(attended, runs, lambda h, g: h * g, gate1).add(x).to(x.dtype)
        text_key, text_value = self._cross(shared) if cross is None else cross
        x = x + self.cross_attn(_layer_norm(x, self.eps, self.norm3), shared.plan, text_key, text_value)
        x = self.action_mlp.inject(x, shared.action, runs)
        fed = self.ffn(self._modulated(x, scale2, shift2, runs))
        x = over_frames(fed, runs, lambda h, g: h * g, gate2).add(x).to(x.dtype)
        return x, key, value, text_key, text_value

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor, runs: tuple[Run, ...]) -> Tensor:
        normed = _layer_norm(x.float(), self.eps)
        return over_frames(normed, runs, lambda h, a, b: h * (1 + a) + b, scale, shift).to(x.dtype)

    def _cross(self, shared: Shared) -> tuple[Tensor, Tensor]:
        if shared.text is None:
            raise InputError("neither text nor its cached keys were given")
        return self.cross_attn.key_value(shared.text)


class WanModel(nn.Module):
    """One expert. Parameter names follow native Wan where Wan has them; `action`, `action_mlp`, `memory` and
    the head's banks are this project's. `adapters.py` owns every other name.
    """

    def __init__(self, config: ModelConfig, head: Head | None = None) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch, stride=config.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.action = ActionEncoder(dim, config.action_hidden)
        self.memory = MemoryCompressor(config.in_dim, dim, config.memory)
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.layers))
        self.head = VelocityHead(dim, config.patch_out, config.eps) if head is None else head

    def forward(self, inputs: Inputs) -> Outputs:
        plan, layout = inputs.plan, inputs.plan.layout
        _check(inputs, self.config.in_dim)
        x, memory = self._tokens(inputs)
        time, modulation = self._time(inputs)
        action = self.action(inputs.actions[:, plan.times])
        text = self._text(inputs.text)
        shared = Shared(plan, modulation, action, text)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        text_keys: list[Tensor] = []
        text_values: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            cross = _cross_layer(inputs.text, index)
            x, key, value, text_key, text_value = block(x, shared, inputs.cache.layer(index), cross)
            if inputs.keep:
                keys.append(key)
                values.append(value)
                text_keys.append(text_key)
                text_values.append(text_value)
        return Outputs(
            self._predict(x, time, inputs),
            memory,
            Segment(layout, tuple(keys), tuple(values)) if inputs.keep else None,
            CrossCache(tuple(text_keys), tuple(text_values)) if inputs.keep else None,
        )

    def _tokens(self, inputs: Inputs) -> tuple[Tensor, MemoryState | None]:
        """[B, N, D]: patches of the full-resolution frames, compressed frames and padding, in order."""
        layout = inputs.plan.layout
        dtype = self.patch_embedding.weight.dtype
        full = _frames(self.patch_embedding(inputs.latents.to(dtype)))  # B, F, n, D
        compressed, memory = full[:, :0], None
        if inputs.history is not None:
            fine, memory = self.memory(inputs.history.full, inputs.history.state)
            compressed = _frames(self.patch_embedding(inputs.history.low.to(dtype))) + fine
        parts: list[Tensor] = []
        taken = {False: 0, True: 0}
        for run in layout.runs:
            for first, kind, count in _same_source(layout, run.first, run.last):
                if kind is Kind.PAD:
                    n = layout.frames[first].grid.tokens * count
                    parts.append(full.new_zeros(full.shape[0], n, full.shape[-1]))
                    continue
                source = compressed if kind is Kind.CMP else full
                at = taken[kind is Kind.CMP]
                parts.append(source[:, at : at + count].flatten(1, 2))
                taken[kind is Kind.CMP] = at + count
        return torch.cat(parts, dim=1), memory

    def _time(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Time embedding [B, L, D] and modulation [B, L, 6, D] of every frame, fp32; memory is at sigma 0."""
        sigma = inputs.sigma.double()
        known = len(inputs.plan.layout) - sigma.shape[1]
        sigma = torch.cat([sigma.new_zeros(sigma.shape[0], known), sigma], dim=1)
        time = sinusoid(sigma * TIMESTEPS, self.config.freq_dim)
        time = _linear_fp32(
            self.time_embedding[2], functional.silu(_linear_fp32(self.time_embedding[0], time))
        )
        modulation = _linear_fp32(self.time_projection[1], functional.silu(time))
        return time, torch.unflatten(modulation, -1, (6, -1))

    def _text(self, text: Text) -> Tensor | None:
        """[B, P, text_len, D]; None where the keys are cached. Zero rows pad the text before its MLP."""
        if isinstance(text, CrossCache):
            return None
        return text.tokens if isinstance(text, ProjectedText) else self._project(text)

    def _project(self, text: RawText) -> Tensor:
        missing = self.config.text_len - text.embeddings.shape[2]
        if missing < 0:
            raise InputError(f"prompt of {text.embeddings.shape[2]} tokens, at most {self.config.text_len}")
        weight = self.text_embedding[0].weight
        assert isinstance(weight, Tensor)
        padded = functional.pad(text.embeddings.to(weight.dtype), (0, 0, 0, missing))
        out: Tensor = self.text_embedding(padded)
        return out

    def _predict(self, x: Tensor, time: Tensor, inputs: Inputs) -> Tensor | None:
        predicted = inputs.plan.layout.only(Kind.PRED)
        if not len(predicted):
            return None
        tail = x[:, x.shape[1] - predicted.tokens :]
        out = self.head(tail, time[:, time.shape[1] - len(predicted) :], predicted.runs, inputs.rows)
        return unpatchify(out, predicted.frames[0].grid.rows, self.config.patch)

    def init_weights(self, generator: torch.Generator) -> None:
        """Wan's start for the base, sections b and c.1 of the spec for actions and memory; heads are zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, RmsNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, WanBlock | Head):
                nn.init.normal_(module.modulation, std=self.config.dim**-0.5, generator=generator)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1), generator=generator)
        if self.patch_embedding.bias is not None:
            nn.init.zeros_(self.patch_embedding.bias)
        for name in ("text_embedding", "time_embedding"):
            for module in getattr(self, name):
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02, generator=generator)
        self.action.init_weights(generator)
        self.memory.init_weights(generator)
        for module in self.modules():
            if isinstance(module, ActionMlp):
                module.init_weights()
        for weight in self.head.bank():
            nn.init.zeros_(weight)


def build(config: ModelConfig, seed: int, *, head: Head | None = None, device: str = "cpu") -> WanModel:
    """A network with weights drawn from `seed` alone; the global generator is not touched."""
    with torch.device("meta"):
        model = WanModel(config, head)
    model = model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(torch.Generator(device).manual_seed(seed))
    return model


def sinusoid(timesteps: Tensor, width: int) -> Tensor:
    """[...] -> [..., width]: cosines, then sines, in fp64. Source: spec/worldplay2.md a.1."""
    exponent = torch.arange(width // 2, dtype=torch.float64, device=timesteps.device) / (width // 2)
    angle = timesteps.double()[..., None] * 10000.0**-exponent
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _linear_fp32(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return functional.linear(x.float(), layer.weight.float(), layer.bias.float())


def _layer_norm(x: Tensor, eps: float, affine: nn.LayerNorm | None = None) -> Tensor:
    """Layer norm in fp32, back in the dtype of x."""
    weight = None if affine is None else affine.weight.float()
    bias = None if affine is None else affine.bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _frames(patches: Tensor) -> Tensor:
    """[B, D, F, h, w] -> [B, F, h w, D]."""
    return patches.flatten(3).permute(0, 2, 3, 1)


def _same_source(layout: Layout, first: int, last: int) -> list[tuple[int, Kind, int]]:
    """Frames [first, last) as (first, kind, count), one for each stretch of compressed, padding or full."""
    stretches: list[tuple[int, Kind, int]] = []
    for index in range(first, last):
        kind = layout.frames[index].kind
        source = kind if kind in (Kind.CMP, Kind.PAD) else Kind.PRED
        if stretches and stretches[-1][1] is source:
            stretches[-1] = (stretches[-1][0], source, stretches[-1][2] + 1)
        else:
            stretches.append((index, source, 1))
    return stretches


def _cross_layer(text: Text, index: int) -> tuple[Tensor, Tensor] | None:
    return (text.keys[index], text.values[index]) if isinstance(text, CrossCache) else None


def _check(inputs: Inputs, channels: int) -> None:
    """Lengths of the tensors against the plan, by name, before anything is computed."""
    plan, layout = inputs.plan, inputs.plan.layout
    if inputs.cache.layout != plan.context:
        raise CacheError(
            f"the plan was made for a cache of {plan.context.tokens} tokens, the cache has "
            f"{inputs.cache.layout.tokens}, or other frames: make the plan from cache.layout"
        )
    full = len(layout) - layout.count(Kind.CMP) - layout.count(Kind.PAD)
    pairs = 0 if inputs.history is None else inputs.history.low.shape[2]
    expected = {
        "channels of latents": (inputs.latents.shape[1], channels),
        "full-resolution frames": (inputs.latents.shape[2], full),
        "predicted frames": (inputs.sigma.shape[1], layout.count(Kind.PRED)),
        "compressed frames": (pairs, layout.count(Kind.CMP)),
    }
    if inputs.history is not None:
        expected["latents of history"] = (inputs.history.full.shape[2], LATENTS_PER_PAIR * pairs)
        seen = 0 if inputs.history.state is None else inputs.history.state.latents
        first = layout.only(Kind.CMP).times
        if first:
            expected["latents before the history"] = (seen, first[0])
    for what, (given, wanted) in expected.items():
        if given != wanted:
            raise InputError(f"{what}: {given} given, the layout has {wanted}")
    if max(layout.times) >= inputs.actions.shape[1]:
        raise InputError(
            f"{inputs.actions.shape[1]} action rows, but the sequence reaches latent {max(layout.times)}"
        )

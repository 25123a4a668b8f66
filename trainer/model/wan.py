"""One expert: the Wan2.2 image-to-video transformer with actions and memory, as single-device code.

`WanModel.forward` is the only way in (a sharded module gathers its weights there), for every use: a masked
training pass, a bidirectional clip, the prefill of the cache, a denoising step. What a pass is made of is
said by its `Plan`; everything carried between passes is a value that comes in and goes out.
Shapes: B batch, L frames (latents) of the sequence, N tokens, D width, P predicted frames.
Source: spec/worldplay2.md a, b, c.1, n.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import LATENTS_PER_PAIR, ModelConfig
from trainer.model.action import ActionEncoder, ActionMlp
from trainer.model.block import Kept, RmsNorm, Shared, WanBlock
from trainer.model.kvcache import (
    EMPTY,
    CacheError,
    CrossCache,
    KvCache,
    ProjectedText,
    RawText,
    Segment,
    Text,
)
from trainer.model.layout import Kind, Layout
from trainer.model.memory import MemoryCompressor, MemoryState
from trainer.model.pdd_head import Head, VelocityHead, unpatchify
from trainer.model.plan import HERE, InputError, Plan, Spread, make_plan

# With what they are called by, so that a pass needs one import.
__all__ = ["History", "InputError", "Inputs", "Outputs", "Plan", "Shared", "WanModel", "build", "make_plan"]

TIMESTEPS = 1000.0


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


class WanModel(nn.Module):
    """One expert. Parameter names follow native Wan where Wan has them; `action`, `action_mlp`, `memory` and
    the head's banks are this project's. `adapters.py` owns every other name. `spread` is set from outside.
    """

    def __init__(self, config: ModelConfig, head: Head | None = None) -> None:
        super().__init__()
        self.config = config
        self.spread: Spread = HERE
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
        first, stop = self.spread.share(layout)
        part = plan.part(first, stop)
        x, memory = self._tokens(inputs)
        time, modulation = self._time(inputs)
        action = self.action(inputs.actions[:, plan.times])
        text = self._text(inputs.text)
        if part is not plan:
            start = Layout(layout.frames[:first]).tokens
            x = x[:, start : start + part.layout.tokens]
            modulation, action = modulation[:, first:stop], action[:, first:stop]
        shared = Shared(part, self.spread, modulation, action, text, inputs.keep)
        kept: list[Kept] = []
        for index, block in enumerate(self.blocks):
            x, fresh = block(x, shared, inputs.cache.layer(index), _cross_layer(inputs.text, index))
            kept += [] if fresh is None else [fresh]
        return Outputs(
            self._predict(x, part, time, inputs),
            memory,
            Segment(layout, tuple(k.key for k in kept), tuple(k.value for k in kept)) if kept else None,
            CrossCache(tuple(k.text_key for k in kept), tuple(k.text_value for k in kept)) if kept else None,
        )

    def _tokens(self, inputs: Inputs) -> tuple[Tensor, MemoryState | None]:
        """[B, N, D]: patches of the full-resolution frames, compressed frames and padding, in order."""
        layout = inputs.plan.layout
        dtype = self.patch_embedding.weight.dtype
        full = self._patches(inputs.latents.to(dtype))  # B, F, n, D
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

    def _patches(self, latents: Tensor) -> Tensor:
        """[B, 36, F, H, W] -> [B, F, n, D]; a convolution does not take F = 0."""
        if latents.shape[2]:
            return _frames(self.patch_embedding(latents))
        return latents.new_zeros(len(latents), 0, 0, self.config.dim)

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

    def _predict(self, x: Tensor, part: Plan, time: Tensor, inputs: Inputs) -> Tensor | None:
        """x: [B, N, D] of the frames of `part`; the prediction is that of the whole sequence."""
        predicted = inputs.plan.layout.only(Kind.PRED)
        if not len(predicted):
            return None
        own = x[:, x.shape[1] - part.layout.only(Kind.PRED).tokens :]
        tail = self.spread.gather(own, inputs.plan.layout)
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

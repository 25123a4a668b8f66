"""Networks, tensors and a brute-force mask shared by the tests of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import TINY, Preset
from trainer.model.kvcache import RawText
from trainer.model.layout import Frame, Kind, Layout, Rule
from trainer.model.wan import History, Inputs, WanModel, build, make_plan

PRESET: Preset = TINY
SEEDS = {"high": 11, "low": 12}  # the two experts are two networks


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def noisy_expert(expert: str = "high", preset: Preset = PRESET) -> WanModel:
    """An expert whose zero-initialised tensors, and zero biases, hold noise."""
    model = build(preset.model, SEEDS[expert])
    generator = torch.Generator().manual_seed(SEEDS[expert])
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05, generator=generator)
    return model.eval()


def action_rows(seed: int, latents: int) -> Tensor:
    """[1, T, 6] with every value that a row can have."""
    generator = torch.Generator().manual_seed(seed)
    turn = 3 * torch.randn(1, latents, 2, generator=generator)
    move = torch.randint(-1, 2, (1, latents, 2), generator=generator)
    bits = torch.randint(0, 2, (1, latents, 2), generator=generator)
    return torch.cat([turn, move, bits], dim=2).float()


class Video:
    """One sample: clean latents with image condition, its low-resolution stream, actions and prompts."""

    def __init__(self, chunks: int, seed: int = 0, preset: Preset = PRESET) -> None:
        latents = chunks * preset.chunk
        self.preset = preset
        self.clean = draw(seed, 1, 16, latents, *preset.geometry.latent)
        self.noisy = draw(seed + 1, *self.clean.shape)
        self.condition = draw(seed + 2, 1, 20, latents, *preset.geometry.latent)
        self.condition[:, :4] = 0.0
        self.condition[:, :4, 0] = 1.0
        self.low = draw(seed + 3, 1, 36, latents // 2, *preset.geometry.low_latent)
        self.actions = action_rows(seed + 4, latents)
        self.prompts = draw(seed + 5, 1, chunks, 7, preset.model.text_dim)  # one for each chunk
        self.text = self.prompt(0)
        self.sigma = torch.rand(1, latents, generator=torch.Generator().manual_seed(seed + 6))

    def prompt(self, chunk: int) -> RawText:
        return RawText(self.prompts[:, chunk : chunk + 1])

    def latents(self, layout: Layout) -> Tensor:
        """[1, 36, F, H, W] for the full-resolution frames of a layout."""
        parts = []
        for frame in layout.frames:
            if frame.kind not in (Kind.CMP, Kind.PAD):
                source = self.noisy if frame.kind is Kind.PRED else self.clean
                parts.append(torch.cat([source[:, :, frame.time], self.condition[:, :, frame.time]], dim=1))
        return torch.stack(parts, dim=2)

    def history(self, layout: Layout, state: object = None) -> History | None:
        times = layout.only(Kind.CMP).times
        if not times:
            return None
        first, stop = times[0], times[-1] + 2
        full = torch.cat([self.clean, self.condition], dim=1)[:, :, first:stop]
        return History(full, self.low[:, :, first // 2 : stop // 2], state)  # type: ignore[arg-type]

    def inputs(self, layout: Layout, rule: Rule = Rule.CAUSAL, **more: object) -> Inputs:
        """One pass without a cache, memory from the whole history."""
        plan = make_plan(self.preset.model, layout, rule=rule)
        values: dict[str, object] = {
            "plan": plan,
            "latents": self.latents(layout),
            "sigma": self.sigma[:, list(layout.only(Kind.PRED).times)],
            "actions": self.actions,
            "text": self.text,
            "history": self.history(layout),
        }
        return Inputs(**{**values, **more})  # type: ignore[arg-type]


def oracle(query: Frame, key: Frame, rule: Rule) -> bool:
    """Section d and a.5 of the spec, one pair of frames at a time."""
    if query.kind is Kind.PAD or key.kind is Kind.PAD:
        return query.kind is key.kind
    if rule is Rule.FULL:
        return True
    if query.kind is Kind.SINK:
        return key.kind is Kind.SINK
    if query.kind is Kind.CMP:
        return key.kind is Kind.SINK or (key.kind is Kind.CMP and key.chunk <= query.chunk)
    if query.chunk == 0:
        return key.kind is query.kind and key.chunk == 0
    if key.kind is Kind.SINK:
        return True
    if key.kind is Kind.CMP:
        return key.chunk <= query.chunk - 1
    if key.kind is Kind.TMP:
        return key.chunk == query.chunk
    return query.kind is Kind.PRED and key.chunk == query.chunk

"""Replay: one recorded step of a chunk again, with gradient, over the memory that it had.

The memory of chunk i is a prefix of the final cache; only the anchor, the last latent before the chunk, is
filled in anew, without gradient. So the peak of memory is that of one chunk, however long the video.
Source: spec/worldplay2.md d (prefix property), g.2 step 4, g.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import Preset
from trainer.model.attention import Backend
from trainer.model.kvcache import KvCache, RawText
from trainer.model.layout import Layout, anchor, target
from trainer.model.wan import Inputs, Plan, WanModel, make_plan
from trainer.schedule import clean_estimate
from trainer.stable.played import Played, Snapshot


@dataclass(frozen=True)
class Replay:
    """Of one played batch. Models are the students that played it, each for the blocks of its expert."""

    preset: Preset
    played: Played
    backend: Backend = Backend.DENSE

    def estimate(self, model: WanModel, snapshot: Snapshot) -> Tensor:
        """x0 [B, 16, 4, H, W] of the recorded step, with gradient to every weight that predicts it; memory is
        without. Of the last step it is the chunk itself."""
        preset, state, chunk, block = self.preset, snapshot.state, snapshot.chunk, snapshot.block
        size, cache = preset.chunk, self._memory(model, block.expert, chunk)
        condition = self.played.full[:, 16:, chunk * size : (chunk + 1) * size]
        rows = model.head.rows(block).to(state.device)
        out = model(
            Inputs(
                self._plan(model, target(preset, chunk, chunk + 1), cache),
                torch.cat([state, condition], 1),
                torch.full((len(state), size), block.sigma_start, dtype=torch.float64, device=state.device),
                self.played.scene.actions.to(state.device),
                self._text(chunk),
                cache=cache,
                rows=rows[None, None].expand(len(state), size, -1, -1),
            )
        )
        assert out.prediction is not None
        return clean_estimate(state, out.prediction[:, 0], out.prediction[:, 1], block)

    @torch.no_grad()
    def _memory(self, model: WanModel, expert: str, chunk: int) -> KvCache:
        """[sink | compressed] before the chunk from the final cache, and its anchor filled in anew."""
        prefix = self.played.caches[expert].at(chunk)
        layout = anchor(self.preset, chunk)
        if not len(layout):
            return prefix
        full, stop = self.played.full, chunk * self.preset.chunk
        out = model(
            Inputs(
                self._plan(model, layout, prefix),
                full[:, :, stop - self.preset.temporal : stop],
                torch.zeros((len(full), 0), dtype=torch.float64, device=full.device),
                self.played.scene.actions.to(full.device),
                self._text(chunk - 1),
                cache=prefix,
                keep=True,
            )
        )
        assert out.segment is not None
        return prefix.extend(out.segment)

    def _plan(self, model: WanModel, layout: Layout, cache: KvCache) -> Plan:
        device = self.played.full.device
        return make_plan(model.config, layout, context=cache.layout, backend=self.backend, device=device)

    def _text(self, chunk: int) -> RawText:
        return self.played.scene.text(self.played.scene.prompts[chunk], self.played.full.device)

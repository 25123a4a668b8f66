"""The batch: B samples of one layout, from the first latent of their encode to the end of the target.

All samples of a batch have the same history, so that every rank runs the same branches on the same lengths.
Source: DESIGN 2, rule 9; spec/faults.md S5, F9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What one forward pass of training reads.

    positions: of the samples in the stream; their random draws are keyed by these. samples: their ids.
    history: chunks before the target (0: the target begins the encode). T: latents of history and target.
    latents: [B, 16, T, H, W], clean. condition: [B, 20, T, H, W], mask and image latents of image-to-video.
    low: [B, 36, T / 2, H / 4, W / 4], low-resolution latents with the condition of their own size.
    actions: [B, T, 6], every value known. text: [B, P, n, text_dim], prompts padded with zeros to the
    longest. prompts: which of the P prompts each chunk of the encode reads, T / chunk of them.
    negative: [n', text_dim], what guidance leads away from.
    All float32. Source: spec/worldplay2.md a.3, a.6, c.2, k, l.7, n.2.
    """

    positions: tuple[int, ...]
    samples: tuple[str, ...]
    history: int
    latents: Tensor
    condition: Tensor
    low: Tensor
    actions: Tensor
    text: Tensor
    prompts: tuple[int, ...]
    negative: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        names = ("latents", "condition", "low", "actions", "text", "negative")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return Batch(self.positions, self.samples, self.history, prompts=self.prompts, **moved)

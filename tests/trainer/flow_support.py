"""Batches of random tensors, and networks made by hand, for the tests of objectives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.trainer.model_support import PRESET, Video, action_rows, draw
from trainer.config import ModelConfig
from trainer.data.batch import Batch
from trainer.model.wan import Inputs, Outputs


def batch_of(positions: tuple[int, ...], history: int, chunks: int, prompts: int = 1) -> Batch:
    """Samples whose tensors depend on their position alone. prompts: chunks read them in turn."""
    latents = PRESET.chunk * (history + chunks)
    videos = [Video(history + chunks, seed=100 + 10 * p) for p in positions]
    text = torch.cat([draw(7 + p, 1, prompts, 5, PRESET.model.text_dim) for p in positions])
    return Batch(
        positions,
        tuple(f"sample{p}" for p in positions),
        history,
        torch.cat([v.clean for v in videos]),
        torch.cat([v.condition for v in videos]),
        torch.cat([v.low for v in videos]),
        torch.cat([action_rows(p, latents) for p in positions]),
        text,
        tuple(c * prompts // (history + chunks) for c in range(history + chunks)),
        draw(1, 4, PRESET.model.text_dim),
    )


class ByHand(nn.Module):
    """A network that answers by a function of what it is given, and keeps what that was."""

    def __init__(self, answer: Callable[[Inputs], Tensor], config: ModelConfig = PRESET.model) -> None:
        super().__init__()
        self.config, self.answer = config, answer
        self.seen: list[Inputs] = []

    def forward(self, inputs: Inputs) -> Outputs:
        self.seen.append(inputs)
        return Outputs(self.answer(inputs)[:, None])


def predicted(inputs: Inputs) -> Tensor:
    """[B, 16, P, H, W]: the noisy latents of a pass."""
    return inputs.latents[:, :16, -inputs.sigma.shape[1] :]

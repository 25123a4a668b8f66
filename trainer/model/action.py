"""The action of a latent as one embedding, and its way into every block.

A row is [pitch, yaw, forward, lateral, perspective, jump], angles in degrees per latent.
Source: spec/worldplay2.md a.6, b.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.model.frames import over_frames
from trainer.model.layout import Run

ROW = 6
CONTINUOUS = 2
LOWEST = (-1, -1, 0, 0)  # smallest value of forward, lateral, perspective, jump
SIZES = (3, 3, 2, 2)


class ActionError(ValueError):
    """An action row outside its domain."""


def check_rows(rows: Tensor) -> None:
    """Raises ActionError when a row [..., 6] is not finite or has a discrete value that does not exist.

    For the loader: on the device an embedding of a wrong index is an assertion without a name.
    """
    if rows.shape[-1] != ROW:
        raise ActionError(f"action rows have {ROW} values, not {rows.shape[-1]}")
    if not bool(torch.isfinite(rows).all()):
        raise ActionError("action rows hold values that are not finite")
    for column, (low, size) in enumerate(zip(LOWEST, SIZES), start=CONTINUOUS):
        values = rows[..., column]
        if bool(((values != values.round()) | (values < low) | (values >= low + size)).any()):
            raise ActionError(f"column {column} of an action row must be one of {low}..{low + size - 1}")


class ActionEncoder(nn.Module):
    """[B, L, 6] rows -> [B, L, D]: an MLP of pitch and yaw plus one embedding each of the other four."""

    def __init__(self, dim: int, hidden: tuple[int, int]) -> None:
        super().__init__()
        self.cont = nn.Sequential(
            nn.Linear(CONTINUOUS, hidden[0]),
            nn.SiLU(),
            nn.Linear(hidden[0], hidden[1]),
            nn.SiLU(),
            nn.Linear(hidden[1], dim),
        )
        self.disc = nn.ModuleList([nn.Embedding(size, dim) for size in SIZES])
        # Each of the six values then adds about the same variance.
        self.embedding_std = math.sqrt(2.0 / (hidden[1] + dim)) / math.sqrt(2.0)

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.cont[0].weight
        assert isinstance(weight, Tensor)
        out: Tensor = self.cont(rows[..., :CONTINUOUS].to(weight.dtype))
        for column, (low, embedding) in enumerate(zip(LOWEST, self.disc), start=CONTINUOUS):
            out = out + embedding(rows[..., column].round().long() - low)
        return out

    def init_weights(self, generator: torch.Generator) -> None:
        """Xavier-uniform MLP without bias; embeddings N(0, embedding_std)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.embedding_std, generator=generator)


class ActionMlp(nn.Sequential):
    """h + W2 SiLU(W1 [h ; e]): zero W2 at the start, so that step 0 is the base model."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def init_weights(self) -> None:
        last = self[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def inject(self, x: Tensor, action: Tensor, runs: tuple[Run, ...]) -> Tensor:
        """x: [B, N, D] tokens; action: [B, L, D], one for each latent.

        W1 e is made once a latent: W1 [h ; e] = W1_h h + W1_e e, so e is never spread over tokens.
        """
        dim = x.shape[-1]
        first, last = self[0], self[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        shared = nn.functional.linear(action, first.weight[:, dim:], first.bias)
        hidden = over_frames(
            nn.functional.linear(x, first.weight[:, :dim]),
            runs,
            lambda h, e: nn.functional.silu(h + e),
            shared,
        )
        out: Tensor = x + last(hidden)
        return out

"""Values of a latent applied to its tokens, without a copy a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.model.layout import Run


def over_frames(x: Tensor, runs: tuple[Run, ...], apply: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """apply(tokens [B, F, n, D], value [B, F, 1, D]...) over each stretch of frames of one grid.

    x: [B, N, D]; values: [B, L, D]. The values are broadcast: spread over 46,592 tokens in fp32 the six of a
    block would be 5.7 GB, and autograd would keep them. Source: spec/worldplay2.md n.3.
    """
    if not runs:  # no frame of the sequence is here
        return x
    parts = [
        apply(
            torch.unflatten(x[:, run.start : run.stop], 1, (run.frames, -1)),
            *(value[:, run.first : run.last, None] for value in values),
        ).flatten(1, 2)
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

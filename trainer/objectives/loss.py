"""What every objective returns: one number to minimise, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """total: scalar, the mean over the samples of the micro-batch. For the log, without gradient, on the
    device: sigma, value: [B, G] noise level and loss of each group of latents that share a noise level (a
    chunk, or the whole target). history: chunks of memory behind them."""

    total: Tensor
    sigma: Tensor
    value: Tensor
    history: int

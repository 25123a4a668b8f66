"""The average of the weights that sampling, gates and export use.

average <- decay average + (1 - decay) weight, in fp32: a bf16 average of decay 0.999 never moves, because one
step is under half of its last bit. Each rank averages its own piece, so no rank talks to another.
Source: spec/faults.md F5; spec/worldplay2.md g.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.parameters import local, named_parameters


class Ema:
    """The average of the parameters that are trained when it is made; all others are their own average.

    decay: 0 to below 1. first_step: steps before it leave the average equal to the weights. host: keep it in
    host memory, where it takes 4 bytes a parameter and a copy of the weights a step.
    Raises ConfigError on parameters that are not fp32.
    """

    def __init__(self, model: nn.Module, decay: float, first_step: int = 0, host: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay {decay} of the average: from 0 to below 1")
        self.decay, self.first_step = decay, first_step
        self.shadow: dict[str, Tensor] = {}
        for name, parameter in named_parameters(model).items():
            if parameter.requires_grad:
                if parameter.dtype != torch.float32:
                    raise ConfigError(f"{name} is {parameter.dtype}: averages are made of fp32 weights")
                value = parameter.detach()
                self.shadow[name] = value.to("cpu", copy=True) if host else value.clone()

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after optimizer step `step`, counted from 0."""
        for weight, average in self._pairs(model):
            if step < self.first_step:
                average.copy_(weight)
            else:
                average.lerp_(weight.to(average.device), 1.0 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Give a model the averages."""
        for weight, average in self._pairs(model):
            weight.copy_(average)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averages; after it, its own weights, exactly. Nothing is held twice."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for weight, average in self._pairs(model):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's piece of each weight and of its average."""
        parameters = named_parameters(model)
        for name, average in self.shadow.items():
            yield local(parameters[name]), local(average)

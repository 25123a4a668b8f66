"""Low-rank additions to a frozen network: a critic for 3 % of the memory of a second one.

    y = W x + B A x,   A [r, in] from N(0, 1/in), B [out, r] zero at the start: the network begins as it was.

So alpha is the rank, and the rate is one of their own (`curriculum.ADDITIONS_LR`), whatever the rank.

Added to the linear layers of attention and feed-forward, where a layer is called as a whole. `Plain` is
the network without them, so one frozen copy is the real score and, with them, the fake one.
Source: spec/worldplay2.md n.4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.model.wan import Inputs, Outputs, WanModel
from trainer.noise import keyed

WHERE = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "cross_attn.q", "cross_attn.o")
FEED = ("ffn.0", "ffn.2")


class Addition(nn.Module):
    """B A x. A module of its own, so that it is sharded apart from the frozen weights beside it."""

    def __init__(self, layer: nn.Linear, rank: int, seed: int, name: str) -> None:
        super().__init__()
        device = layer.weight.device
        down = torch.randn(rank, layer.in_features, generator=keyed(seed, "lora", name))
        self.down = nn.Parameter((down / math.sqrt(layer.in_features)).to(device))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(x, self.down.to(x.dtype))
        return nn.functional.linear(low, self.up.to(x.dtype))


class LowRank(nn.Linear):
    """A linear layer with an addition. Its own weight and bias keep their names."""

    def __init__(self, layer: nn.Linear, addition: Addition) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.addition, self.on = addition, True

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        return out + self.addition(x) if self.on else out


def add_low_rank(model: WanModel, rank: int, seed: int) -> WanModel:
    """Freeze a network and add to every block, in place; the additions are fp32 and all that is trained.

    Raises ConfigError on a rank that is no rank.
    """
    if rank < 1:
        raise ConfigError(f"rank {rank} of low-rank additions: at least 1 needed")
    model.requires_grad_(False)
    for index, block in enumerate(model.blocks):
        for path in (*WHERE, *FEED):
            parent_name, _, last = path.rpartition(".")
            parent = block.get_submodule(parent_name)
            layer = parent.get_submodule(last)
            assert isinstance(layer, nn.Linear)
            addition = Addition(layer, rank, seed, f"blocks.{index}.{path}")
            setattr(parent, last, LowRank(layer, addition))
    return model


def additions(model: WanModel) -> nn.Module:
    """The additions of a network alone, as a module whose parameters they are."""
    found = {
        f"{name}.{part}".replace(".", "-"): parameter
        for name, layer in model.named_modules()
        if isinstance(layer, LowRank)
        for part, parameter in layer.addition.named_parameters()
    }
    return nn.ParameterDict(found)


class Plain:
    """A network without its additions, to be called like one."""

    def __init__(self, model: WanModel) -> None:
        self.config, self._model = model.config, model
        self._layers = [m for m in model.modules() if isinstance(m, LowRank)]

    def __call__(self, inputs: Inputs, /) -> Outputs:
        for layer in self._layers:
            layer.on = False
        try:
            out: Outputs = self._model(inputs)
        finally:
            for layer in self._layers:
                layer.on = True
        return out

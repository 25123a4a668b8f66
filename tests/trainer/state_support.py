"""A small training run for the tests of its state: the same steps whatever holds the network."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.trainer.model_support import PRESET, Video, noisy_expert
from trainer.checkpoint import Checkpoints, Saved
from trainer.curriculum import OptimConfig
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.parallelize import parallelize, train_only
from trainer.ema import Ema
from trainer.model.layout import clip
from trainer.moments import new_moment
from trainer.optim import make_optimizer
from trainer.parameters import local
from trainer.state import TrainState

EVERYTHING = ("",)
COMPRESSOR = ("memory.",)


def begin(
    trained: tuple[str, ...] = EVERYTHING,
    expert: str = "high",
    mesh: Mesh | None = None,
    config: OptimConfig | None = None,
) -> TrainState:
    """A run before its first step, sharded where there is a mesh."""
    model = noisy_expert(expert).train()
    train_only(model, trained)
    if mesh is not None:
        model = parallelize(model, mesh, Parallel())
    optimizer = make_optimizer(model.named_parameters(), config or OptimConfig(lr=1e-3))
    return TrainState(model, optimizer, Ema(model, 0.9))


def in_eight_bits(state: TrainState, seed: int | None) -> TrainState:
    """The same with 8-bit moments, which hold noise where there is a seed: of whole tensors, so that it does
    not depend on the shards. No step is made: torchao compiles its own, which takes half a minute."""
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit(list(state.model.parameters()), lr=1e-3)
    if seed is not None:
        for parameter in state.model.parameters():
            kept = {"step": torch.tensor(3.0)}
            for key, noise in noise_moments(parameter, seed).items():
                kept[key] = new_moment(optimizer, parameter, key)
                if isinstance(parameter, DTensor):
                    noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
                local(kept[key]).copy_(local(noise))
            optimizer.state[parameter] = kept
    return TrainState(state.model, optimizer, state.ema)


def noise_moments(parameter: Tensor, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(parameter.shape, generator=generator) * 1e-3 for _ in range(2))
    return {"exp_avg": first, "exp_avg_sq": second.square()}


def gradients(state: TrainState, step: int) -> float:
    """The loss of a step; it has a history, so that every part of the network has a gradient."""
    video = Video(3, seed=step)
    loss = state.model(video.inputs(clip(PRESET, 2, 1))).velocity.square().mean()
    loss.backward()
    return float(loss.detach())


def run(state: TrainState, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        losses.append(gradients(state, step))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.ema.update(state.model, step)
    return losses


def save(state: TrainState, place: Checkpoints, step: int) -> Saved:
    place.save(step, state.tensors(), {"state": state.note()})
    saved = place.newest()
    assert saved is not None
    return saved


def whole(state: TrainState) -> dict[str, Tensor]:
    """This rank's piece of everything, copied."""
    return {name: local(value).clone() for name, value in state.tensors().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(v, right[n]) for n, v in left.items())

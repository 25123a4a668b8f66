"""Low-rank additions: nothing at the start, all that is trained, and off for the real score."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.trainer.model_support import PRESET, Video, draw, noisy_expert
from trainer.config import ConfigError
from trainer.curriculum import ADDITIONS_LR, curriculum
from trainer.lora import LowRank, Plain, add_low_rank, additions
from trainer.model.layout import Rule, clip
from trainer.optim import make_optimizer


def test_additions_change_nothing_until_they_are_trained_and_nothing_when_off() -> None:
    torch.set_num_threads(1)
    inputs = Video(2).inputs(clip(PRESET, 1, 1), Rule.FULL)
    with torch.no_grad():
        before = noisy_expert("low")(inputs).velocity
        model = add_low_rank(noisy_expert("low"), 4, seed=1)
        assert torch.equal(model(inputs).velocity, before)
        for part in additions(model).parameters():
            part.add_(0.1)
        assert not torch.allclose(model(inputs).velocity, before)
        assert torch.equal(Plain(model)(inputs).velocity, before)
        assert not torch.allclose(model(inputs).velocity, before)  # on again


def test_at_their_own_rate_additions_learn_a_fixed_clip() -> None:
    """In bf16, as a real score is. At the rate of whole weights the loss falls by 0.01 % in 50 updates."""
    torch.set_num_threads(1)
    inputs = Video(2).inputs(clip(PRESET, 1, 1), Rule.FULL)
    model = add_low_rank(noisy_expert("low").to(torch.bfloat16), 128, seed=1)
    config = replace(curriculum("a14b")[-1].optim, lr=ADDITIONS_LR)
    optimizer, losses = make_optimizer(additions(model).named_parameters(), config), []
    wanted = draw(3, *inputs.latents[:, :16, -PRESET.chunk :].shape)
    for _ in range(26):
        loss = (model(inputs).velocity.float() - wanted).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.99 * losses[0]


def test_a_rate_at_which_additions_would_not_move_is_refused() -> None:
    stage = curriculum("a14b")[-1]
    replace(stage, stable=replace(stage.stable, critic_rank=128, critic_lr=ADDITIONS_LR))
    with pytest.raises(ConfigError, match=r"critic_rank 128 with critic_lr 4e-07 would not move: .* 0.0001"):
        replace(stage, stable=replace(stage.stable, critic_rank=128))


def test_only_the_additions_are_trained_and_the_rest_keeps_its_names() -> None:
    model = add_low_rank(noisy_expert("low"), 4, seed=1)
    names = set(noisy_expert("low").state_dict())
    assert names < set(model.state_dict())
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(model.state_dict()) - names
    assert len(trained) == len(list(additions(model).parameters())) == 2 * 8 * PRESET.model.layers
    model(Video(1).inputs(clip(PRESET, 0, 1), Rule.FULL)).velocity.square().mean().backward()
    layers = [m for m in model.modules() if isinstance(m, LowRank)]
    assert all(layer.addition.up.grad is not None and layer.addition.up.grad.any() for layer in layers)
    assert all(layer.weight.grad is None for layer in layers)


def test_additions_depend_on_the_seed_alone_and_a_rank_is_at_least_one() -> None:
    a, b, c = (add_low_rank(noisy_expert("low"), 4, seed=s) for s in (1, 1, 2))
    equal = [torch.equal(x, y) for x, y in zip(additions(a).parameters(), additions(b).parameters())]
    assert all(equal)
    assert not all(torch.equal(x, y) for x, y in zip(additions(a).parameters(), additions(c).parameters()))
    with pytest.raises(ConfigError, match="rank 0"):
        add_low_rank(noisy_expert("low"), 0, seed=1)

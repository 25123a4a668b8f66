"""The average of weights: its value, its names, and a network that gets its own weights back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.trainer.model_support import noisy_expert
from trainer.config import ConfigError
from trainer.ema import Ema
from trainer.parameters import named_parameters


def one(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model.to(dtype)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(model).items()}


@pytest.mark.parametrize("host", [False, True])
def test_a_hundred_updates_reach_the_closed_form(host: bool) -> None:
    model = one(1.0)
    ema = Ema(model, 0.999, host=host)
    nn.init.constant_(model.weight, 1.01)  # type: ignore[arg-type]
    for step in range(100):
        ema.update(model, step)
    # A step adds at most 1e-5, and fp32 has steps of 1.2e-7 there: bf16, with 7.8e-3, would stay at 1.
    assert ema.shadow["weight"].item() == pytest.approx(1.01 - 0.01 * 0.999**100, abs=6e-6)
    assert ema.shadow["weight"].item() > 1.0009


def test_steps_before_the_first_leave_the_weights() -> None:
    model = one(0.0)
    ema = Ema(model, 0.5, first_step=3)
    seen = []
    for step in range(5):
        nn.init.constant_(model.weight, step + 1.0)  # type: ignore[arg-type]
        ema.update(model, step)
        seen.append(ema.shadow["weight"].item())
    assert seen == [1.0, 2.0, 3.0, 3.5, 4.25]


def test_names_are_those_of_the_bare_network() -> None:
    model = noisy_expert()
    bare = set(named_parameters(model))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(checkpoint_wrapper(model.blocks[1]))  # type: ignore[assignment]
    assert any("_orig_mod._checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert set(Ema(model, 0.9).shadow) == bare


def test_a_network_has_its_averages_inside_and_its_own_weights_after() -> None:
    model = noisy_expert()
    for parameter in model.memory.parameters():
        parameter.requires_grad_(False)
    ema = Ema(model, 0.9)
    assert set(ema.shadow) == {n for n in named_parameters(model) if not n.startswith("memory.")}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0 / 3.0)
    ema.update(model, 0)
    own, average = values(model), {n: v.clone() for n, v in ema.shadow.items()}
    with pytest.raises(RuntimeError, match=r"inside"), ema.swapped(model):
        inside = values(model)
        assert all(torch.equal(inside[n], average.get(n, own[n])) for n in own)
        assert not torch.equal(inside["head.head.weight"], own["head.head.weight"])
        raise RuntimeError("inside")
    assert all(torch.equal(v, own[n]) for n, v in values(model).items())
    assert all(torch.equal(v, average[n]) for n, v in ema.shadow.items())
    ema.copy_to(model)
    assert all(torch.equal(v, average.get(n, own[n])) for n, v in values(model).items())


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight is torch.bfloat16: averages are made of fp32"):
        Ema(one(1.0, torch.bfloat16), 0.999)
    with pytest.raises(ConfigError, match=r"decay 1.0 of the average"):
        Ema(one(1.0), 1.0)

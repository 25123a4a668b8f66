"""What comes back from a checkpoint: every entry by its name, and by a stated rule where there was none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.model_support import noisy_expert
from tests.trainer.state_support import (
    COMPRESSOR,
    EVERYTHING,
    begin,
    equal,
    gradients,
    in_eight_bits,
    run,
    save,
    whole,
)
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_files import CheckpointError
from trainer.curriculum import OptimConfig
from trainer.model.adapters import AdapterError
from trainer.parameters import named_parameters
from trainer.state import load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def place(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, keep=9, say=lambda line: None)


@pytest.mark.parametrize("expert", ["high", "low"])
@pytest.mark.parametrize(
    "config",
    [OptimConfig(lr=1e-3), OptimConfig(lr=1e-3, betas=(0.0, 0.99))],
    ids=["adam", "second moment"],
)
def test_a_resumed_run_equals_an_unbroken_one(place: Checkpoints, expert: str, config: OptimConfig) -> None:
    unbroken = begin(expert=expert, config=config)
    run(unbroken, range(2))
    saved = save(unbroken, place, 2)
    wanted = run(unbroken, range(2, 5))
    resumed = begin(expert=expert, config=config)
    run(resumed, range(1))  # whatever it held before is gone
    back = resumed.load(saved)
    assert (back.step, back.fresh, back.dropped) == (2, (), ())
    assert (back.parameters, back.moments) == (127, 127)
    assert run(resumed, range(2, 5)) == wanted
    assert equal(whole(resumed), whole(unbroken))


def test_every_entry_of_every_parameter_is_there(place: Checkpoints) -> None:
    state = begin()
    run(state, range(1))
    entries = save(state, place, 1).entries
    names = set(named_parameters(state.model))
    assert {k for k in entries if k.startswith("model/")} == {f"model/{n}" for n in names}
    assert {k for k in entries if k.startswith("ema/")} == {f"ema/{n}" for n in names}
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert {k for k in entries if k.startswith("optimizer/")} == {
        f"optimizer/{n}/{m}" for n in names for m in moments
    }
    assert {str(e.dtype) for e in entries.values()} == {"torch.float32"}
    assert entries["optimizer/head.head.weight/exp_avg"].shape == (64, 64)


def test_a_save_before_the_first_step_comes_back(place: Checkpoints) -> None:
    state = begin()
    gradients(state, 0)  # set, and not yet used: saving must not make a step of them
    saved = save(state, place, 0)
    other = begin(expert="low")
    back = other.load(saved)
    assert back.moments == 0 and len(back.fresh) == 127
    state.optimizer.zero_grad()
    assert run(other, range(3)) == run(state, range(3))
    assert equal(whole(other), whole(state))


def test_newly_trained_parameters_begin_anew_and_others_go_on(place: Checkpoints) -> None:
    frozen = begin(COMPRESSOR)
    run(frozen, range(2))
    saved = save(frozen, place, 2)
    state = begin(EVERYTHING)
    back = state.load(saved)
    memory = {n for n in named_parameters(state.model) if n.startswith("memory.")}
    assert set(back.fresh) == set(named_parameters(state.model)) - memory and back.moments == len(memory)
    assert "87 begin anew: patch_embedding.weight, " in back.lines()[1]
    kept = {
        n
        for p, s in state.optimizer.state.items()
        if s
        for n, q in named_parameters(state.model).items()
        if q is p
    }
    assert kept == memory
    # The average of what was frozen is the weight that it had.
    assert all(
        torch.equal(v, named_parameters(state.model)[n])
        for n, v in state.ema.shadow.items()
        if n not in memory
    )
    run(state, range(2, 3))
    steps = {n: int(state.optimizer.state[p]["step"]) for n, p in named_parameters(state.model).items()}
    assert {steps[n] for n in memory} == {3} and {n for n, s in steps.items() if s == 1} == set(back.fresh)


def test_state_of_what_is_frozen_now_is_dropped_and_listed(place: Checkpoints) -> None:
    whole_network = begin(EVERYTHING)
    run(whole_network, range(2))
    saved = save(whole_network, place, 2)
    state = begin(COMPRESSOR)
    back = state.load(saved)
    assert len(back.dropped) == 87 and "head.head.weight" in back.dropped and back.moments == 40
    assert "87 are not trained now: state dropped: patch_embedding.weight" in back.lines()[1]
    assert all(
        torch.equal(p, named_parameters(whole_network.model)[n])
        for n, p in named_parameters(state.model).items()
    )


def test_what_is_absent_without_a_reason_is_an_error(place: Checkpoints) -> None:
    state = begin()
    run(state, range(1))
    given = state.tensors()
    for step, prefix, says in (
        (1, "optimizer/head.head.bias/", "lacks the optimizer state of head.head.bias"),
        (2, "ema/head.head.bias", "lacks the average of head.head.bias"),
    ):
        place.save(
            step, {k: v for k, v in given.items() if not k.startswith(prefix)}, {"state": state.note()}
        )
        with pytest.raises(CheckpointError, match=says):
            begin().load(place.at(step))
    place.save(3, {k: v for k, v in given.items() if k != "model/head.head.bias"}, {"state": state.note()})
    with pytest.raises(AdapterError, match=r"1 missing \(head.head.bias\)"):
        begin().load(place.at(3))
    place.save(4, given | {"model/other": torch.zeros(1)}, {"state": state.note()})
    with pytest.raises(AdapterError, match=r"1 extra \(other\)"):
        load_weights(place.at(4), noisy_expert(), average=False)
    place.save(5, given | {"ema/head.head.bias": torch.zeros(64).bfloat16()}, {"state": state.note()})
    with pytest.raises(CheckpointError, match=r"ema/head.head.bias is torch.bfloat16"):
        begin().load(place.at(5))
    other = begin(config=OptimConfig(betas=(0.0, 0.99)))
    with pytest.raises(CheckpointError, match=r"has the state of AdamW, and this run uses SecondMomentAdam"):
        other.load(place.at(4))


def test_weights_alone_go_into_a_plain_network(place: Checkpoints) -> None:
    state = begin(COMPRESSOR)
    run(state, range(3))
    saved = save(state, place, 3)
    for average in (False, True):
        model = noisy_expert("low").bfloat16()
        load_weights(saved, model, average)
        for name, parameter in named_parameters(model).items():
            source = state.ema.shadow.get(name) if average else None
            wanted = named_parameters(state.model)[name] if source is None else source
            assert torch.equal(parameter, wanted.bfloat16()), name
    assert not torch.equal(
        state.ema.shadow["memory.output_layer.weight"],
        named_parameters(state.model)["memory.output_layer.weight"],
    )


def test_eight_bit_moments_come_back_code_by_code(place: Checkpoints) -> None:
    state = in_eight_bits(begin(), seed=3)
    saved = save(state, place, 3)
    other = in_eight_bits(begin(expert="low"), seed=None)
    other.load(saved)
    quantised = 0
    for name, parameter in named_parameters(state.model).items():
        for key, kept in state.optimizer.state[parameter].items():
            back = other.optimizer.state[named_parameters(other.model)[name]][key]
            assert type(back) is type(kept)
            if hasattr(kept, "codes"):
                quantised += 1
                assert torch.equal(back.codes, kept.codes) and torch.equal(back.scale, kept.scale)
                assert back.signed == kept.signed
            else:
                assert torch.equal(back, kept)
    assert quantised > 20

"""The few-step measure: a student that has its teacher's mean velocities is near, a random one is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from jobs import train_gate
from jobs.evaluate.few_steps import Pair, compare, verdict
from jobs.evaluate.world import EvaluationError
from jobs.train_config import DataConfig, GateConfig, TrainConfig
from jobs.train_data import TrainingData
from jobs.train_gate import few_steps_gate, make_gate
from tests.jobs.train_corpus import write_corpus
from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET
from tests.trainer.tiny_codecs import fitted
from trainer.codec.linear import Linear
from trainer.curriculum import curriculum
from trainer.data.batch import Batch
from trainer.model.wan import Inputs, Outputs
from trainer.sampler import ManySteps
from trainer.schedule import Block, PddSchedule

SCHEDULE = PddSchedule()
PULL = 3.0


def velocity(state: Tensor, sigma: Tensor) -> Tensor:
    """A flow that turns: four straight steps miss its end."""
    return state * torch.cos(6 * sigma) - PULL * torch.sin(5 * sigma)


class Student(nn.Module):
    """Its bank gives the teacher's own displacement over a block, by many small steps, plus an error."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.config, self.error, self.head = PRESET.model, error, self
        self.block: Block | None = None

    def rows(self, block: Block) -> Tensor:
        self.block = block
        return torch.zeros(2, 1, dtype=torch.float64)

    def forward(self, inputs: Inputs) -> Outputs:
        assert self.block is not None
        start = state = predicted(inputs)
        moved = state
        for k, sigma in enumerate(self.block.sigmas[:-1]):
            if k == len(self.block.sigmas) - 2:
                moved = state
            state = state + self.block.steps[k] * velocity(state, torch.tensor(float(sigma)))
        endpoint = (state - moved) / self.block.steps[-1]
        return Outputs(torch.stack([moved - start, endpoint + self.error], 1))


def teacher(inputs: Inputs) -> Tensor:
    return velocity(predicted(inputs), inputs.sigma.float()[:, None, :, None, None])


@pytest.mark.parametrize(("error", "nearer"), [(0.0, True), (200.0, False)])
def test_a_student_with_the_teachers_displacements_is_nearer_than_four_euler_steps(
    error: float, nearer: bool
) -> None:
    torch.set_num_threads(1)
    batch = batch_of((1, 2, 3), 2, 1)
    pairs = compare(
        dict.fromkeys(PRESET.experts, Student(error)),  # type: ignore[arg-type]
        dict.fromkeys(PRESET.experts, ByHand(teacher)),  # type: ignore[arg-type]
        PRESET,
        SCHEDULE,
        batch,
        Linear(fitted()),
        seed=0,
        many=ManySteps(steps=128, shift=7.0, guidance=1.0),
    )
    assert [p.sample for p in pairs] == list(batch.samples)
    assert all((p.student > p.euler) is nearer for p in pairs)
    assert verdict(pairs).passed is nearer
    if nearer:
        assert min(p.student for p in pairs) > 50


def test_each_euler_step_is_of_the_expert_that_has_the_students_step() -> None:
    """The second half of the schedule begins at sigma 0.9, where a noise level alone would name `high`."""
    torch.set_num_threads(1)
    teachers = {name: ByHand(teacher) for name in PRESET.experts}
    compare(
        dict.fromkeys(PRESET.experts, Student(0.0)),  # type: ignore[arg-type]
        teachers,  # type: ignore[arg-type]
        PRESET,
        SCHEDULE,
        batch_of((1,), 1, 1),
        Linear(fitted()),
        seed=0,
        many=ManySteps(steps=1, guidance=1.0),
    )
    asked = {name: [float(given.sigma[0, 0]) for given in model.seen] for name, model in teachers.items()}
    starts = {name: [float(b.sigma_start) for b in SCHEDULE.blocks_of(name)] for name in PRESET.experts}
    assert starts["low"][0] == 0.9 and PRESET.expert(0.9) == "high"
    assert asked == {"high": [1.0, *starts["high"]], "low": starts["low"]}  # 1.0: the many steps


def test_gates_measure_where_the_networks_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are offloaded lie on the host; here the device that computes is torch's meta device."""
    meta, seen = torch.device("meta"), []
    data = TrainingData.open(write_corpus(tmp_path / "corpus", train=2, val=2), DataConfig(), PRESET)
    stages = {s.name: s for s in curriculum("tiny")}
    config = replace(TrainConfig("tiny"), gate=GateConfig(clips=2, batch=2, levels=1, history=4))
    models = {name: Student(0.0) for name in PRESET.experts}

    def measured(*args: object, **more: object) -> list[object]:
        seen.append(args[-1])
        raise EvaluationError("far enough")

    def compared(*args: object, **more: object) -> list[Pair]:
        batch = args[4]
        assert isinstance(batch, Batch)
        seen.append(batch.latents.device)
        return [Pair("a", 2.0, 1.0)]

    monkeypatch.setattr(train_gate, "measure", measured)
    monkeypatch.setattr(train_gate, "compare", compared)
    make_gate(data, PRESET, config, meta)(stages["1"], models)  # type: ignore[arg-type]
    few_steps_gate(data, PRESET, config, stages["4"], models, models, Linear(fitted()), meta)  # type: ignore[arg-type]
    assert seen == [meta, meta]


def test_the_verdict_needs_both_the_share_and_the_interval() -> None:
    def pairs(gains: list[float]) -> list[Pair]:
        return [Pair(f"s{k}", 20.0 + g, 20.0) for k, g in enumerate(gains)]

    assert verdict(pairs([1.0] * 8 + [-0.1] * 2)).passed
    assert not verdict(pairs([1.0] * 6 + [-0.1] * 4)).passed  # 60 %
    assert not verdict(pairs([0.1] * 8 + [-9.0] * 2)).passed  # nearer often, far off at times
    with pytest.raises(ValueError, match="no pair"):
        verdict([])
    assert "nearer in 80% of 10 pairs" in verdict(pairs([1.0] * 8 + [-0.1] * 2)).line()
    assert replace(verdict(pairs([1.0] * 4)), passed=True).student == 21.0

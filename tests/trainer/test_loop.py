"""The loop on one process: when it saves, what it tells, and how it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trainer.data.stream
import trainer.loop
import trainer.metrics
from tests.trainer.loop_support import PARALLEL, Fed, Remembered, run_loop, two_chunks
from tests.trainer.model_support import PRESET
from trainer.checkpoint import Checkpoints, list_steps, read_saved
from trainer.config import Preset
from trainer.data.batch import Batch
from trainer.data.plan import Draw
from trainer.data.stream import Loader
from trainer.distributed.mesh import Mesh, Parallel, make_mesh
from trainer.flops import training_flops
from trainer.loop import Task, _Heard, _record
from trainer.metrics import StepRecord, read_rows
from trainer.model.layout import Rule, teacher_forced
from trainer.objectives.flow import objective
from trainer.objectives.loss import Loss
from trainer.objectives.passes import Network


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    torch.set_num_threads(1)
    alone = make_mesh(Parallel(), "cpu")
    yield alone
    alone.close()


class Clock:
    """Minutes pass only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.minutes = 0.0
        monkeypatch.setattr(trainer.loop.time, "monotonic", lambda: 60.0 * self.minutes)

    def pass_by(self, minutes: float) -> None:
        self.minutes += minutes


def test_a_checkpoint_comes_by_steps_or_by_minutes_whichever_is_first(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, kept = Clock(monkeypatch), Remembered()
    # Steps of 6 minutes, and of 1 after the fifth. Due are 15 minutes, or 4 steps, after the last checkpoint.
    told = run_loop(
        mesh,
        tmp_path,
        Fed(),
        steps=11,
        checkpoints=kept,
        save_every=4,
        seen=lambda record: clock.pass_by(6 if record.step < 5 else 1),
    )
    # The fourth step begins after 18 minutes and saves anyway; eight end 9 minutes after that.
    assert kept.steps == [4, 8, 11]
    assert [r.step for r in told] == list(range(11))
    clock, kept = Clock(monkeypatch), Remembered()
    run_loop(
        mesh, tmp_path, Fed(), steps=6, checkpoints=kept, seen=lambda record: clock.pass_by(record.step * 4)
    )
    # Minutes at the end of each step: 0, 4, 12, 24, 40, 60; a step tells what its beginning saw.
    assert kept.steps == [5, 6]


def test_a_run_that_died_goes_on_exactly_from_a_checkpoint_of_the_clock(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        saved = read_saved(folder / f"step-{list_steps(folder)[0][-1]:08d}")
        assert saved is not None
        found = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in saved.entries.items()}
        saved.read(found)
        return found

    class Death(Exception):
        pass

    clock = Clock(monkeypatch)

    def die(record: StepRecord) -> None:
        clock.pass_by(16 if record.step == 0 else 0)
        if record.step == 2:
            raise Death

    for name in ("whole", "broken"):
        for seen in (die, lambda record: None) if name == "broken" else (lambda record: None,):
            checkpoints = Checkpoints(tmp_path / name / "checkpoints", 2)
            try:
                run_loop(mesh, tmp_path / name, Fed(), steps=4, checkpoints=checkpoints, seen=seen)
            except Death:
                checkpoints.wait()
                assert list_steps(tmp_path / name / "checkpoints")[0] == [2]
            finally:
                checkpoints.close()
    one, two = weights(tmp_path / "whole" / "checkpoints"), weights(tmp_path / "broken" / "checkpoints")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    rows = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "broken")]
    assert [[r["step"], r["loss"]] for r in rows[0]] == [[r["step"], r["loss"]] for r in rows[1]]
    assert len(rows[1]) == 4  # that of step 2 is there once


def test_the_draws_of_a_stage_are_its_own(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed that reaches the objective is that of the stage, and it is another in every stage."""
    seeds: list[int] = []

    def minimise(model: Network, preset: Preset, batch: Batch, expert: str, seed: int, step: int) -> Loss:
        seeds.append(seed)
        return objective(two_chunks(1))(model, preset, batch, expert, seed, step)

    run_loop(mesh, tmp_path, Fed(), steps=1, minimise=minimise)
    stage = two_chunks(1)
    assert seeds == [stage.seed(7)]

    class Pairs:
        def batch(self, step: int) -> tuple[Draw, ...]:
            return tuple(Draw(2 * step + k, 0, k, 1) for k in range(2))

    monkeypatch.setattr(trainer.data.stream, "make_batch", lambda draws, *more: seeds.append(more[3]))
    for name in ("2b", "3"):
        own = replace(stage, name=name)
        next(Loader(Pairs(), None, own, PRESET, 7, ahead=0).steps(0))  # type: ignore[arg-type]
        assert seeds[-2:] == [own.seed(7)] * 2
    assert len({replace(stage, name=name).seed(run) for name in ("1", "2a", "3", "4") for run in (7, 8)}) == 8


def test_a_peak_of_memory_is_that_of_the_expert(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(trainer.loop, "forget_peak", calls.append)
    run_loop(mesh, tmp_path, Fed(), steps=1)
    assert calls == [mesh.device]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(str(device)))
    trainer.metrics.forget_peak(torch.device("cuda", 3))
    trainer.metrics.forget_peak(torch.device("cpu"))
    assert calls[1:] == ["cuda:3"]


def test_compiled_blocks_say_before_the_first_step_when_they_stop_being_compiled(
    mesh: Mesh, tmp_path: Path
) -> None:
    for compiled in (False, True):
        lines: list[str] = []
        run_loop(
            mesh, tmp_path, Fed(), steps=1, parallel=replace(PARALLEL, compile=compiled), say=lines.append
        )
        assert [("8 times at most" in line and "\n" not in line) for line in lines] == [True] * compiled


def test_mfu_is_the_flops_of_the_batch_over_what_all_ranks_could_do(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = two_chunks(4)
    task = Task(stage, PRESET, "high", 0, PARALLEL, tmp_path)
    level = torch.tensor([0.95, 0.95], dtype=torch.float64)
    value = torch.tensor([1.0, 3.0], dtype=torch.float64)
    waits = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    heard = _Heard(False, False, level, value, 1, 2, waits / 10, waits, 2 * waits)
    assert _record(task, mesh, heard, 1.5, 3, 2.0).mfu is None  # of a CPU no peak is known
    monkeypatch.setattr(trainer.loop, "peak_flops", lambda device: 1e9)
    record = _record(task, mesh, heard, 1.5, 3, 2.0)
    flops = training_flops(PRESET.model, teacher_forced(PRESET, 1, 2), Rule.CAUSAL, prompts=2)
    assert record.mfu is not None and math.isclose(record.mfu, 2 * flops / (2.0 * 1e9 * mesh.world))
    assert (record.loss, record.samples_per_s, record.memory_gb) == (2.0, 1.0, 4.0)
    assert (record.others_s_most, record.others_s_least, record.slow_rank) == (2.0, 0.5, 1)
    assert record.data_wait_s == 0.2

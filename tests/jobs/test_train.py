"""`wp2 train` as a user runs it: stages in order, gates between them, and what is refused before a step."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import trainer.loop
from jobs.commands.base import app
from jobs.train import Options, Told, train
from jobs.train_config import LookConfig, TrainConfig, TrainError, load, plain, shown
from jobs.train_data import TrainingData
from schemas.errors import UserError
from tests.jobs.train_corpus import write_corpus
from trainer.checkpoint import list_steps, read_saved
from trainer.config import TINY, Geometry, Preset
from trainer.curriculum import Stage, curriculum
from trainer.data.plan import PlanError
from trainer.loop import NotFiniteError, Stopped
from trainer.metrics import StepRecord, read_rows
from trainer.model.adapters import Contents, Found, Naming
from trainer.model.wan import build
from trainer.objectives.flow import objective
from trainer.objectives.loss import Loss
from trainer.run_folder import RunError, RunFolder
from trainer.weights.transfer import save

EXPERTS = ("high", "low")
OVERRIDES = ("actions", "recall", "memory", "next_chunk")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("train") / "corpus")


def small(stages: tuple[Stage, ...], gates: bool = False, **more: object) -> TrainConfig:
    """Two clips a step, one a pass. No videos unless asked for."""
    cut = tuple(replace(s, batch=2, micro=1, events=0.5 if s.events else 0.0) for s in stages)
    if not gates:
        cut = tuple(replace(s, gate="") for s in cut)
    values: dict[str, object] = {"look": LookConfig(clips=0), "save_every": 2, **more}
    config = TrainConfig("tiny", stages=cut, **values)  # type: ignore[arg-type]
    return replace(config, parallel=replace(config.parallel, checkpointing=False))


def alone(name: str) -> tuple[Stage, ...]:
    """One stage that starts from fresh weights."""
    return tuple(replace(s, start=None) for s in curriculum("tiny") if s.name == name)


class Heard:
    """What a run told. at: called with every record."""

    def __init__(self, at: Callable[[StepRecord], None] = lambda record: None) -> None:
        self.lines: list[str] = []
        self.records: list[StepRecord] = []
        self._at = at
        self.told = Told(say=self.lines.append, seen=self._seen)

    def _seen(self, record: StepRecord) -> None:
        self.records.append(record)
        self._at(record)


def weights(run: Path, stage: str, expert: str) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint: weights, moments and average."""
    folder = RunFolder(run).checkpoints(stage, expert)
    saved = read_saved(folder / f"step-{list_steps(folder)[0][-1]:08d}")
    assert saved is not None
    found = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in saved.entries.items()}
    saved.read(found)
    return found


def test_stages_follow_each_other_through_their_gates(corpus: str, tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Heard()
    config = small(
        curriculum("tiny"), gates=True, look=LookConfig(every=1, clips=1, chunks=2, steps=2, guidance=1.0)
    )
    config = replace(config, gate=replace(config.gate, clips=2, batch=2, levels=1, history=4))
    options = Options(corpus, run, "1-2a", steps=1, overrides=("actions",))
    train(config, options, heard.told)
    assert [(r.stage, r.expert) for r in heard.records] == [(s, e) for s in ("1", "2a") for e in EXPERTS]
    for stage in ("1", "2a"):
        gate = json.loads((run / stage / "gate.json").read_text())
        assert gate["held_out"] and not gate["passed"] and "held-out clips" in gate["detail"]
        assert gate["overridden"] == (stage == "1")
        assert (run / stage / "rollouts" / "end-00000001" / "val00.mp4").stat().st_size > 1000
        for expert in EXPERTS:
            rows = read_rows(run / stage / expert / "metrics.jsonl")
            assert [row["step"] for row in rows] == [0]
            assert rows[0].keys() == StepRecord.__annotations__.keys()
    # While one expert trains, its videos are made with the other of the stage, or of the one before.
    assert {p.name for p in (run / "1" / "rollouts").iterdir()} == {"low-00000001", "end-00000001"}
    assert {p.name for p in (run / "2a" / "rollouts").iterdir()} > {"high-00000001", "low-00000001"}
    # 2a starts from the average of stage 1; after one step the rate has moved it by little.
    one, two = weights(run, "1", "low"), weights(run, "2a", "low")
    moved = max(float((two[n] - one[n.replace("model/", "ema/")]).abs().max()) for n in two if "model/" in n)
    assert 0 < moved < 1e-3
    # The next stage does not start behind a gate that did not pass; what is finished is skipped.
    with pytest.raises(TrainError, match="stage 2b does not start: gate recall of stage 2a failed"):
        train(config, replace(options, span="2b"), heard.told)
    again = Heard()
    train(config, options, again.told)
    assert not again.records and sum("skipped" in line for line in again.lines) == 4
    with pytest.raises(RunError, match=r"stages\.1\.batch: 2 -> 4"):
        train(replace(config, stages=tuple(replace(s, batch=4) for s in config.stages)), options, heard.told)


@pytest.mark.parametrize("name", [pytest.param("2a", marks=pytest.mark.soak), "3"])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(name: str, corpus: str, tmp_path: Path) -> None:
    config = small(alone(name), save_every=100)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    train(config, Options(corpus, unbroken, name, steps=4), Heard().told)

    def stop(record: StepRecord) -> None:
        if record.step in (0, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    # SIGTERM comes after the step was counted, so the next one is finished too: 2 of high, 4, 2 of low, 4.
    for _ in range(4):
        try:
            train(config, Options(corpus, broken, name, steps=4), Heard(stop).told)
        except Stopped as stopped:
            assert "the same command goes on from here" in str(stopped)
    train(config, Options(corpus, broken, name, steps=4), Heard().told)
    exact = ("step", "loss", "grad_norm", "by_sigma", "history", "lr")
    for expert in EXPERTS:
        a, b = weights(unbroken, name, expert), weights(broken, name, expert)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        rows = [read_rows(run / name / expert / "metrics.jsonl") for run in (unbroken, broken)]
        assert [[r[k] for k in exact] for r in rows[0]] == [[r[k] for k in exact] for r in rows[1]]


def test_a_loss_that_is_no_number_ends_the_run_and_is_named(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def broken(stage: Stage) -> object:
        whole = objective(stage)

        def minimise(model: object, preset: Preset, batch: object, expert: str, seed: int, step: int) -> Loss:
            loss = whole(model, preset, batch, expert, seed, step)  # type: ignore[arg-type]
            return (
                replace(loss, total=loss.total * math.nan, value=loss.value * math.nan) if step == 3 else loss
            )

        return minimise

    monkeypatch.setattr(trainer.loop, "objective", broken)
    heard = Heard()
    with pytest.raises(
        NotFiniteError, match=r"stage 2a, expert high, step 3: the loss is not finite; samples train"
    ):
        train(small(alone("2a")), Options(corpus, run, "2a", ("high",), steps=6), heard.told)
    assert list_steps(run / "2a" / "high" / "checkpoints")[0] == [2]
    assert [r.step for r in heard.records] == [0, 1, 2]


def test_what_cannot_work_is_refused_before_the_first_step(corpus: str, tmp_path: Path) -> None:
    run, told = tmp_path / "run", Heard().told
    config = small(alone("3"))
    with pytest.raises(TrainError, match=r"stage 3 starts from stage 2b, which .* has not finished"):
        train(small(curriculum("tiny")), Options(corpus, run, "3"), told)
    short = write_corpus(tmp_path / "short", train=2, val=0, latents=12)
    with pytest.raises(TrainError, match="reads 16 latents of a clip, and of 2 clips 2 are shorter"):
        train(config, Options(short, run, "3"), told)
    calm = write_corpus(tmp_path / "calm", train=2, val=0, events=0)
    with pytest.raises(TrainError, match="takes 50% of its samples from event clips"):
        train(config, Options(calm, run, "3"), told)
    odd = write_corpus(tmp_path / "odd", train=1, val=0, preset=replace(TINY, geometry=Geometry(64, 64)))
    with pytest.raises(TrainError, match="latents of 64x64 pixels, preset tiny is made for 64x128"):
        train(config, Options(odd, run, "3"), told)
    wide = write_corpus(tmp_path / "wide", train=1, val=0, text_dim=512)
    with pytest.raises(TrainError, match=r"text of 512 values a token .*, preset tiny reads 384"):
        train(config, Options(wide, run, "3"), told)
    for device, why in (("tpu", "give cpu or cuda"), ("cuda:1", "ranks choose"), ("cuda", "sees 0 GPUs")):
        if device != "cuda" or not torch.cuda.is_available():
            with pytest.raises(UserError, match=why):
                train(config, Options(corpus, run, "3", device=device), told)
    with pytest.raises(TrainError, match="--experts single: preset tiny has high, low"):
        train(config, Options(corpus, run, "3", ("single",)), told)
    data = TrainingData.open(corpus, config.data, TINY)
    with pytest.raises(PlanError, match="2 samples a step do not split over 4 data ranks"):
        data.plan(config.stages[0], TINY, 0, data_world=4)
    assert not run.exists()


def test_clips_are_kept_from_training_where_a_corpus_has_no_split(tmp_path: Path) -> None:
    config = small(alone("3"))
    many = TrainingData.open(write_corpus(tmp_path / "many", train=12, val=0), config.data, TINY)
    assert many.is_held_out and len(many.held_out) == 2
    assert not set(many.held_out.sample_id) & set(many.train.sample_id)
    few = TrainingData.open(write_corpus(tmp_path / "few", train=4, val=0), config.data, TINY)
    assert not few.is_held_out and len(few.train) == 4


def test_settings_are_read_strictly_and_shown_as_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(shown(load(None, "tiny")))
    assert load(file, None) == load(None, "tiny")
    file.write_text("preset: tiny\nstages: {2a: {batch: 4, micro: 2, sigma: {shift: 7}}}\nparallel:\n")
    changed = load(file, None)
    assert (changed.stages[1].batch, changed.stages[1].sigma.shift) == (4, 7.0)
    assert plain(changed)["stages"]["1"] == plain(load(None, "tiny"))["stages"]["1"]
    for text, said in {
        "stages: {2a: {bacth: 4}}": "unknown key 'stages.2a.bacth'; did you mean 'batch'?",
        "stages: {7: {batch: 4}}": "unknown key 'stages.7'",
        "stages: {1: {batch: 3, micro: 2}}": "a batch of 3 does not split into passes of micro 2",
        "stages: {1: {steps: many}}": "stages.1.steps: Input should be a valid integer",
        "parallel: {precision: float8}": "parallel.precision: Input should be",
        "preset: huge": "no preset 'huge'",
    }.items():
        file.write_text(text)
        with pytest.raises(TrainError) as caught:
            load(file, None)
        assert said in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_command_prints_its_settings_and_asks_for_what_it_needs() -> None:
    import jobs.commands.train  # noqa: F401

    made = CliRunner().invoke(app, ["train", "--preset", "tiny", "--show-config"])
    assert made.exit_code == 0 and "preset: tiny" in made.output and "gate: next_chunk" in made.output
    bare = CliRunner().invoke(app, ["train"])
    assert isinstance(bare.exception, TrainError) and "CORPUS" in str(bare.exception)


def test_micro_batches_add_up_to_the_whole_step(corpus: str, tmp_path: Path) -> None:
    found = []
    for micro in (1, 2):
        stages = tuple(replace(s, micro=micro) for s in small(alone("2a")).stages)
        heard = Heard()
        config = replace(small(alone("2a")), stages=stages)
        train(config, Options(corpus, tmp_path / f"{micro}", "2a", ("high",), steps=3), heard.told)
        found.append(heard.records)
    for one, two in zip(*found, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-6)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_a_stage_starts_from_weights_that_are_given(corpus: str, tmp_path: Path) -> None:
    models = {expert: build(TINY.model, seed) for seed, expert in enumerate(EXPERTS)}
    save(models, Found(Naming.NATIVE, Contents.VELOCITY, TINY), tmp_path / "given")
    config = small(curriculum("tiny"))
    options = Options(corpus, tmp_path / "run", "3", steps=1, init=tmp_path / "given")
    still = replace(config, stages=tuple(replace(s, optim=replace(s.optim, lr=0.0)) for s in config.stages))
    train(still, options, Heard().told)
    for expert in EXPERTS:
        trained = weights(tmp_path / "run", "3", expert)
        for name, value in models[expert].state_dict().items():
            assert torch.equal(trained[f"model/{name}"], value.bfloat16().float()), name
    with pytest.raises(RunError, match=r"stages\.3\.start_weights"):
        train(still, replace(options, init=tmp_path / "other"), Heard().told)

"""`wp2 train` as a user runs it: stages in order, gates between them, and what is refused before a step."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor
from typer.testing import CliRunner

import jobs.train_gate
import tests.jobs.train_corpus
import trainer.loop
from jobs.commands.base import app
from jobs.train import GateResult, Options, Told, train
from jobs.train_config import DataConfig, LookConfig, TrainConfig, TrainError, load, plain, shown
from jobs.train_data import RedrawnPlan, TrainingData
from jobs.train_look import Looker
from schemas.errors import UserError
from tests.jobs.train_corpus import write_corpus
from trainer.checkpoint import list_steps, read_saved
from trainer.config import TINY, Geometry, Preset
from trainer.curriculum import Stage, curriculum
from trainer.data.batch import Batch
from trainer.data.plan import PlanError
from trainer.distributed.mesh import Parallel, make_mesh
from trainer.loop import NotFiniteError, Stopped
from trainer.metrics import StepRecord, read_rows
from trainer.model.adapters import Contents, Found, Naming
from trainer.model.wan import build
from trainer.objectives.flow import objective
from trainer.objectives.loss import Loss
from trainer.run_folder import RunError, RunFolder, write_json
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
    # One expert alone stands behind the gate of both, and nothing that is finished goes back unasked.
    with pytest.raises(TrainError, match="stage 2b does not start: gate recall of stage 2a failed"):
        train(config, replace(options, span="2b", experts=("high",)), heard.told)
    with pytest.raises(TrainError, match="--step 1: all of 1, 2a is finished"):
        train(config, replace(options, step=1), heard.told)
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
    run, config = tmp_path / "run", small(alone("2a"))
    stage = replace(config.stages[0], steps=4)
    bad = {d.position for d in TrainingData.open(corpus, config.data, TINY).plan(stage, TINY, 0, 1).batch(3)}

    def broken(stage: Stage) -> object:
        whole = objective(stage)

        def minimise(model: object, preset: Preset, batch: Batch, expert: str, seed: int, step: int) -> Loss:
            loss = whole(model, preset, batch, expert, seed, step)  # type: ignore[arg-type]
            sick = math.nan if bad & set(batch.positions) else 1.0
            return replace(loss, total=loss.total * sick, value=loss.value * sick)

        return minimise

    monkeypatch.setattr(trainer.loop, "objective", broken)
    heard, options = Heard(), Options(corpus, run, "2a", ("high",), steps=4)
    for steps in ([0, 1, 2], [0, 1, 2, 2]):  # the same command meets the same samples
        with pytest.raises(
            NotFiniteError, match=r"stage 2a, expert high, step 3: the loss is not finite; samples train"
        ):
            train(config, options, heard.told)
        assert list_steps(run / "2a" / "high" / "checkpoints")[0] == [2]
        assert [r.step for r in heard.records] == steps
    redraw = ("2a/high/3",)
    train(config, replace(options, redraw=redraw), Heard().told)
    assert RunFolder(run).read()["redrawn"] == {"2a/high": {"3": 1}}
    # What came after is what the record says: the same as of a run in which it was said from the start.
    monkeypatch.undo()
    train(config, replace(options, out=tmp_path / "other", redraw=redraw), Heard().told)
    a, b = weights(run, "2a", "high"), weights(tmp_path / "other", "2a", "high")
    assert all(torch.equal(a[key], b[key]) for key in a)
    train(config, replace(options, redraw=redraw), Heard().told)  # the same command again changes nothing
    for text, why in {
        "2a/high/2": "that step is made",
        "2a/high/4": "the steps of stage 2a are 0 to 3",
        "2a/mid/3": "give STAGE/EXPERT/STEP, of 2a/high/",
    }.items():
        with pytest.raises(RunError, match=why):
            train(config, replace(options, redraw=(text,)), Heard().told)
    assert RunFolder(run).read()["redrawn"] == {"2a/high": {"3": 1}}


def test_a_step_that_is_redrawn_moves_no_other(corpus: str) -> None:
    stage = replace(small(alone("2a")).stages[0], steps=6)
    data = TrainingData.open(corpus, small(()).data, TINY)
    plain, moved = data.plan(stage, TINY, 0, 1), replace(data, redrawn={"2a/low": {"3": 1, "4": 2}})
    assert [moved.plan(stage, TINY, 0, 1, "high").batch(k) for k in range(6)] == [*map(plain.batch, range(6))]
    drawn = moved.plan(stage, TINY, 0, 1, "low")
    assert isinstance(drawn, RedrawnPlan)
    assert [drawn.batch(k) for k in range(6)] == [plain.batch(k) for k in (0, 1, 2, 9, 16, 5)]


def test_another_rate_is_taken_where_it_is_asked_for_and_remembered(corpus: str, tmp_path: Path) -> None:
    run, config = tmp_path / "run", small(alone("2a"))

    def stop(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    options = Options(corpus, run, "2a", ("high",), steps=4)
    with pytest.raises(KeyboardInterrupt):
        train(config, options, Heard(stop).told)
    before = weights(run, "2a", "high")
    stage = config.stages[0]
    still = replace(config, stages=(replace(stage, optim=replace(stage.optim, lr=0.0)),))
    with pytest.raises(RunError, match=r"stages\.2a\.optim\.lr: 0\.002 -> 0\.0\): .*give --accept-changes"):
        train(still, options, Heard().told)
    other = replace(still, stages=(replace(still.stages[0], text_drop=0.5),))
    with pytest.raises(
        RunError, match=r"\(stages\.2a\.text_drop: 0\.1 -> 0\.5\): choose another --out; --acc"
    ):
        train(other, replace(options, accept_changes=True), Heard().told)
    train(still, replace(options, accept_changes=True), Heard().told)
    changed = [{"settings": ["stages.2a.optim.lr: 0.002 -> 0.0"], "from": {"2a": {"high": 2, "low": 0}}}]
    assert RunFolder(run).read()["changes"] == changed
    after = weights(run, "2a", "high")
    assert all(torch.equal(after[key], before[key]) for key in after if key.startswith("model/"))
    rates = [row["lr"] for row in read_rows(run / "2a" / "high" / "metrics.jsonl")]
    assert rates[1] > 0 and rates[2:] == [0.0, 0.0]
    # Who goes back goes on with the settings of now, from there.
    identity = {k: v for k, v in RunFolder(run).read().items() if k not in ("changes", "redrawn")}
    known = RunFolder(run).remember(identity, {"2a": {"high": 1, "low": 0}})
    assert known["changes"] == [{**changed[0], "from": {"2a": {"high": 1, "low": 0}}}]


def test_the_precision_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    stage, at = {"steps": 4, "precision": "float32"}, {"1": {"high": 2}}
    folder, coarse = RunFolder(tmp_path), {"stages": {"1": {**stage, "precision": "bfloat16"}}}
    write_json(tmp_path / "run.json", {"stages": {"1": {"steps": 4}}})  # of a run that did not remember it
    folder.remember({"stages": {"1": stage}}, at)
    with pytest.raises(
        RunError, match=r'stages\.1\.precision: "float32" -> "bfloat16"\): .*--accept-changes'
    ):
        folder.remember(coarse, at)
    assert folder.remember(coarse, at, accept=True)["changes"][0]["from"] == {"1": {"high": 2}}


def test_a_look_is_made_again_by_a_run_that_was_killed_before_it_saved(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, played = tmp_path / "run", []
    config = small(alone("2a"), save_every=100, look=LookConfig(every=1, clips=1, chunks=2))

    def play(looker: Looker, folder: Path, clip: Batch, experts: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{clip.samples[0]}.mp4").write_text(f"{len(played)}")
        played.append(folder.name)
        if len(played) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Looker, "_play", play)

    def killed(record: StepRecord) -> None:
        if (record.expert, record.step) == ("low", 1):
            raise KeyboardInterrupt

    rollouts = run / "2a" / "rollouts"
    for _ in range(2):  # behind a look, and in the middle of one
        with pytest.raises(KeyboardInterrupt):
            train(config, Options(corpus, run, "2a", steps=2), Heard(killed).told)
        assert [p.read_text() for p in (rollouts / "low-00000001").iterdir()] == ["0"]
        (rollouts / ".low-00000001").mkdir(exist_ok=True)
        (rollouts / ".low-00000001" / "old.mp4").touch()
    assert not list_steps(run / "2a" / "low" / "checkpoints")[0]
    train(config, Options(corpus, run, "2a", steps=2), Heard().told)
    assert [p.read_text() for p in (rollouts / "low-00000001").iterdir()] == ["2"]
    assert {p.name for p in rollouts.iterdir()} == {"low-00000001", "low-00000002", "end-00000002"}


def test_a_run_goes_on_without_the_stage_that_it_started_from(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = GateResult("actions", 1.0, 0.0, True, True, "")
    monkeypatch.setattr(jobs.train_gate, "make_gate", lambda *given: lambda stage, models: passed)
    config = small(curriculum("tiny")[:2], save_every=1)
    config = replace(config, stages=(replace(config.stages[0], gate="actions"), config.stages[1]))
    options = Options(corpus, tmp_path / "run", "2a", steps=2)
    train(config, replace(options, span="1", steps=1), Heard().told)

    def stop(record: StepRecord) -> None:
        if (record.expert, record.step) == ("low", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, options, Heard(stop).told)
    assert list_steps(options.out / "2a" / "low" / "checkpoints")[0] == [1]
    whole = tmp_path / "whole"
    shutil.copytree(options.out, whole)
    shutil.rmtree(options.out / "1")
    train(config, options, Heard().told)
    train(config, replace(options, out=whole), Heard().told)
    a, b = weights(options.out, "2a", "low"), weights(whole, "2a", "low")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    # What has not begun needs it.
    shutil.rmtree(options.out / "2a" / "low")
    with pytest.raises(TrainError, match=r"stage 2a starts from stage 1, which .* has not finished"):
        train(config, options, Heard().told)


def test_asked_to_stop_while_it_loads_a_run_makes_no_step(corpus: str, tmp_path: Path) -> None:
    heard = Heard()
    told = replace(heard.told, begin=lambda stage, expert: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped before stage 3, expert high, went on; the same command"):
        train(small(alone("3")), Options(corpus, tmp_path / "run", "3", steps=2), told)
    assert not heard.records


def test_what_cannot_work_is_refused_before_the_first_step(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with monkeypatch.context() as patch:
        patch.setattr(tests.jobs.train_corpus, "segment_starts", lambda latents, most: ())
        bare = write_corpus(tmp_path / "bare", train=2, val=0)
    with pytest.raises(
        TrainError, match=r"stage 1 reads independent segments, and the latents of .* have none"
    ):
        train(small(alone("1")), Options(bare, run, "1"), told)
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


def test_clips_are_kept_from_training_where_a_corpus_has_no_split_and_growth_moves_none(
    tmp_path: Path,
) -> None:
    def opened(train: int, part: float) -> TrainingData:
        url = write_corpus(tmp_path / f"{train}", train=train, val=0)
        return TrainingData.open(url, DataConfig(held_out=part), TINY)

    few, more, many = opened(4, 0.2), opened(6, 0.2), opened(12, 0.2)
    assert len(few.train) == 3 and not few.is_held_out  # one is no measure, and kept back all the same
    assert more.is_held_out and set(more.held_out.sample_id) == {"train03", "train05"}
    assert set(many.held_out.sample_id) == {"train03", "train05", "train07", "train11"}
    for small, large in ((few, more), (few, many), (more, many)):
        assert set(small.train.sample_id) <= set(large.train.sample_id)
        assert not set(large.held_out.sample_id) & set(large.train.sample_id)
    with pytest.raises(TrainError, match="every sample of the wanted tiers is held out"):
        opened(1, 1.0)


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


def ask_the_first(rank: int, store: str) -> None:
    """One of two ranks of which each sees another disk."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = make_mesh(Parallel(timeout_s=60), "cpu")
    assert mesh.first(lambda: f"disk of {rank}") == "disk of 0"

    def refuse() -> None:
        raise (TrainError if rank == 0 else AssertionError)(f"rank {rank} sees no gate")

    with pytest.raises(TrainError, match="rank 0 sees no gate"):
        mesh.first(refuse)
    mesh.close()


@pytest.mark.soak
def test_the_first_rank_decides_what_a_disk_says(tmp_path: Path) -> None:
    processes.spawn(ask_the_first, (str(tmp_path / "store"),), nprocs=2)

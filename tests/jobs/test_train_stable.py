"""Stages 4 and 5 by `wp2 train`: exact after a stop, watched, and exported as four-step weights."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import jobs.train as train_module
from jobs.export import choose
from jobs.train import Options, Told, train
from jobs.train_config import LookConfig, TrainConfig, TrainError, plain
from jobs.train_data import TrainingData
from jobs.train_stable import Scenes
from tests.jobs.test_train import weights as tensors
from tests.jobs.test_train_ranks import kill_once_saved, start
from tests.jobs.train_corpus import write_corpus
from trainer.checkpoint import list_steps, read_saved
from trainer.checkpoint_files import CheckpointError
from trainer.curriculum import Law, StableConfig, curriculum
from trainer.export import Layout, export
from trainer.loop import Stopped
from trainer.metrics import read_rows
from trainer.model.adapters import Contents
from trainer.run_folder import RunFolder
from trainer.schedule import PddSchedule
from trainer.stable.loop import WatchError
from trainer.stable.watch import WatchConfig
from trainer.weights.checkpoint import open_checkpoint
from trainer.weights.transfer import load

EXPERTS = ("high", "low")
STABLE = StableConfig(latents=64, critic_steps=2, critic_lr=1e-3, score="3", teacher="3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("stable") / "corpus")


def settings(stable: StableConfig = STABLE, **more: object) -> TrainConfig:
    """Stage 3 from fresh weights, then 4 and 5, two videos a step."""
    stages = tuple(
        replace(
            s,
            start=None if s.name == "3" else s.start,
            batch=2,
            micro=1 if s.name == "5" else 2,
            histories=(0,) if s.name == "5" else (0, 2),
            events=0.0,
            gate="",
            stable=stable,
            optim=replace(s.optim, warmup=0, lr=1e-3),
        )
        for s in curriculum("tiny")
        if s.name in ("3", "4", "5")
    )
    config = TrainConfig(
        "tiny", stages=stages, look=LookConfig(clips=1, chunks=2, steps=2, guidance=1.0), save_every=1
    )
    config = replace(
        config, parallel=replace(config.parallel, checkpointing=False), watch=WatchConfig(teacher=1)
    )
    return replace(config, **more)  # type: ignore[arg-type]


def quiet(seen: Callable[[object], None] = lambda record: None) -> Told:
    return Told(say=lambda line: None, seen=seen)


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages 3 to 5, two steps each, never interrupted."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("stable") / "run"
    train(settings(), Options(corpus, out, "3-5", steps=2), quiet())
    return out


def test_a_stopped_run_goes_on_as_if_it_had_not_been(corpus: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(settings(), Options(corpus, out, "3", steps=2), quiet())
    stops: list[str] = []

    def ask(record: object) -> None:
        stops.append("asked")
        os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(6):  # every step of stages 4 and 5 is a run of its own
        try:
            train(settings(), Options(corpus, out, "4-5", steps=2), quiet(ask))
        except Stopped:
            continue
        break
    assert len(stops) >= 6
    for stage, expert in itertools.product(("4", "5"), EXPERTS):
        whole, parts = tensors(run, stage, expert), tensors(out, stage, expert)
        assert whole.keys() == parts.keys()
        different = [n for n in whole if not torch.equal(whole[n], parts[n])]
        assert not different, different[:3]


def test_exported_weights_start_a_branch_and_serve_as_its_scores(
    corpus: str, run: Path, tmp_path: Path
) -> None:
    """`--init` of stage 5 with one velocity: every interval begins with it, and stage 4 is left out."""
    export(choose(run, "3", None, lambda line: None), tmp_path / "three", Layout.WORLDPLAY2)
    there = str(tmp_path / "three")
    stable = replace(STABLE, score=there, teacher=there, clip=64, replayed=1)
    options = Options(corpus, tmp_path / "run", "5", steps=1, init=tmp_path / "three")
    train(settings(stable), options, quiet())
    (row,) = read_rows(tmp_path / "run" / "5" / "metrics.jsonl")
    assert row["grad_norm"].keys() <= {"high", "low"} and row["grad_norm"]
    bank = tensors(tmp_path / "run", "5", "low")
    assert any("bank" in name for name in bank)
    for wrong in ({"score": "2b"}, {"score": "5"}, {"teacher": str(tmp_path / "none")}):
        config = settings(replace(stable, **wrong))  # type: ignore[arg-type]
        with pytest.raises(TrainError, match=r"is no finished stage of .* and no path"):
            train(config, replace(options, out=tmp_path / "other"), quiet())


def test_what_a_rollout_would_meet_is_refused_before_a_step(corpus: str, run: Path, tmp_path: Path) -> None:
    for stable, told in (
        (replace(STABLE, score="4"), r"`stable: \{score: 4\}` has few-step heads, and one velocity is"),
        (replace(STABLE, law=Law.JOINED, latents=320), r"clip \w+ has 48 known action rows, .* asks for 320"),
    ):
        (folder := tmp_path / stable.law).mkdir()
        out = _from(run, folder)
        with pytest.raises(TrainError, match=told):
            train(settings(stable), Options(corpus, out, "5", steps=1), quiet())
        assert not (out / "5").exists()
    config = settings(replace(STABLE, law=Law.JOINED, latents=320))
    data = TrainingData.open(corpus, config.data, config.sizes)
    plan = data.plan(config.stages[-1], config.sizes, 0, 1)
    scenes = Scenes(plan, data.corpus, data.train, config.stages[-1], config.sizes, 0, slice(0, 2))
    with pytest.raises(TrainError, match=r"stage 5, samples train\d+: clips of the game have \d+ action"):
        scenes.at(0)


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "sequence"), [("4", 1), ("5", 1), ("5", 2)])
def test_two_ranks_killed_and_started_anew_train_what_one_process_does(
    corpus: str, run: Path, tmp_path: Path, stage: str, sequence: int
) -> None:
    config, file = settings(), tmp_path / "train.yaml"
    shared = replace(config, parallel=replace(config.parallel, sequence=sequence))
    file.write_text(yaml.safe_dump(plain(shared)))
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        runs.append(_from(run, tmp_path / name, ("3",) if stage == "4" else ("3", "4")))
    one, two = runs
    train(config, Options(corpus, one, stage, steps=4, device="cpu"), quiet())
    experts = EXPERTS if stage == "4" else ("low",)
    for expert in experts:
        latest = RunFolder(two).checkpoints(stage, expert) / "latest"
        kill_once_saved(start(corpus, two, file, stage, 4), latest)
    ended = start(corpus, two, file, stage, 4)
    assert ended.wait(240) == 0, (two.parent / "log.txt").read_text()[-3000:]
    where = [f"{stage}/{e}" for e in EXPERTS] if stage == "4" else [stage]
    # A student of stage 4 begins as its teacher, and of this network their distance stays near rounding.
    names, near = ("before", "after", "real", "critic", "left_out"), {"rel": 1e-4, "abs": 1e-5}
    if stage == "4":
        names, near = ("loss",), {"rel": 0.05, "abs": 1e-9}
    for folder in where:
        alike = [read_rows(at / folder / "metrics.jsonl") for at in (one, two)]
        assert [row["step"] for row in alike[1]] == [0, 1, 2, 3]
        for a, b in zip(*alike, strict=True):
            for name in names:
                assert b[name] == pytest.approx(a[name], **near)
            norm = {"rel": 0.05} if stage == "4" else {"rel": 1e-3, "abs": 1e-7}
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], **norm)


def test_a_step_moves_both_students_and_their_fake_scores_and_is_told(run: Path) -> None:
    rows = read_rows(run / "5" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["grad_norm"].keys() == {"high", "low"} and row["before"] != row["after"] for row in rows)
    assert all(len(row["motion"]) == row["chunks"] == 16 for row in rows)
    for expert in EXPERTS:
        start, end, score = (tensors(run, stage, expert) for stage in ("4", "5", "3"))
        names = [n.removeprefix("model/") for n in start if n.startswith("model/")]
        moved = [n for n in names if not torch.equal(start[f"ema/{n}"], end[f"model/{n}"])]
        assert any("bank" in n for n in moved) and any("blocks" in n for n in moved)
        fakes = [n.removeprefix("fake/model/") for n in end if n.startswith("fake/model/")]
        assert any(not torch.equal(score[f"ema/{n}"], end[f"fake/model/{n}"]) for n in fakes)


def test_the_run_is_exported_as_four_step_weights_that_open(run: Path, tmp_path: Path) -> None:
    saved = {}
    for expert in EXPERTS:
        folder = RunFolder(run).checkpoints("5", expert)
        saved[expert] = read_saved(folder / f"step-{list_steps(folder)[0][-1]:08d}")
    export(saved, tmp_path / "fast", Layout.WORLDPLAY2)  # type: ignore[arg-type]
    opened = open_checkpoint(tmp_path / "fast")
    assert opened.contents is Contents.COMPACT and opened.preset.name == "tiny"
    assert load(opened.experts[0]).head.heads == 4


def test_in_turns_a_step_trains_one_expert(corpus: str, run: Path, tmp_path: Path) -> None:
    config = settings(replace(STABLE, turns=True))
    out = _from(run, tmp_path)
    train(config, Options(corpus, out, "5", steps=1), quiet())
    rows = read_rows(out / "5" / "metrics.jsonl")
    assert rows[0]["grad_norm"].keys() == {"high"}
    for expert, moves in (("high", True), ("low", False)):
        start, end = tensors(out, "4", expert), tensors(out, "5", expert)
        name = "head.bank_weight"
        assert torch.equal(start[f"ema/{name}"], end[f"model/{name}"]) is not moves
        fake, score = end[f"fake/model/{PATCH}"], tensors(out, "3", expert)[f"ema/{PATCH}"]
        assert torch.equal(fake, score) is not moves

    # Copies that are read while their masters wait change nothing: it is the rollout of all experts at once.
    assert rows[0]["before"] == read_rows(run / "5" / "metrics.jsonl")[0]["before"]


PATCH = "patch_embedding.weight"


@pytest.mark.parametrize("law", list(Law))
def test_recorded_rows_are_extended_by_the_named_law(corpus: str, law: Law) -> None:
    config = settings(replace(STABLE, law=law))
    stage = config.stages[-1]
    data = TrainingData.open(corpus, config.data, config.sizes)
    plan = data.plan(stage, config.sizes, 0, 1)
    scenes = Scenes(plan, data.corpus, data.train, stage, config.sizes, 0, slice(0, 2))
    scene = scenes.at(0)[0]
    assert scene.actions.shape == (1, 64, 6) and len(scene.prompts) == 16
    row = plan.batch(0)[0].row
    own = np.load(io.BytesIO(bytes(data.corpus.read(row, ("annotations",))["annotations"]["actions.npy"])))
    rows = scene.actions[0].numpy()
    assert np.array_equal(rows[:48], own)
    assert np.allclose(rows[48:, 1], -own[:31:-1, 1]) is (law is Law.OUT_AND_BACK)


def test_a_low_rank_fake_score_is_trained_and_alone_kept(corpus: str, run: Path, tmp_path: Path) -> None:
    out = _from(run, tmp_path)
    config = settings(replace(STABLE, critic_rank=4, critic_lr=0.3))
    train(config, Options(corpus, out, "5", steps=2), quiet())
    end = tensors(out, "5", "low")
    names = {n for n in end if n.startswith("fake/model/")}
    assert names and all(n.endswith(("-down", "-up")) for n in names)
    assert any(end[n].any() for n in names if n.endswith("-up"))
    rows = read_rows(out / "5" / "metrics.jsonl")
    assert rows[0]["before"] == rows[0]["real"] and rows[1]["before"] != rows[1]["real"]


def test_what_a_watchdog_ended_goes_on_from_an_earlier_step_alone(
    corpus: str, run: Path, tmp_path: Path
) -> None:
    out = _from(run, tmp_path)
    config = settings(watch=WatchConfig(still=1e9, window=1, teacher=1))
    options = Options(corpus, out, "5", steps=2)
    with pytest.raises(WatchError, match=r"stage 5, step 1: still: motion of late chunks is [\d.]+ of the"):
        train(config, options, quiet())
    told = r"stage 5 was ended behind step 1: still: motion of .* give --step 1 to go on from there"
    places = [RunFolder(out).checkpoints("5", expert) for expert in EXPERTS]
    for _ in range(2):  # at the last step, and it does not count as finished
        with pytest.raises(WatchError, match=told):
            train(config, options, quiet(lambda record: pytest.fail("a step was made")))
    assert [list_steps(place)[0] for place in places] == [[1, 2], [1, 2]]
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 7: there are 1, 2"):
        train(config, replace(options, step=7), quiet())
    seen: list[int] = []
    sound = settings(watch=WatchConfig(window=1, still=0.0, teacher=1))
    train(sound, replace(options, step=1), quiet(lambda record: seen.append(1)))
    assert len(seen) == 1 and all((place / "set-aside-step-00000002").is_dir() for place in places)
    said: list[str] = []
    train(sound, options, Told(say=said.append))
    assert "stage 5: finished before, skipped" in said


def test_going_on_from_where_a_watchdog_ended_a_run_says_so(corpus: str, run: Path, tmp_path: Path) -> None:
    out = _from(run, tmp_path)
    options = Options(corpus, out, "5", steps=2)
    ended = settings(watch=WatchConfig(still=1e9, window=0, teacher=1))
    with pytest.raises(WatchError):
        train(ended, options, quiet())
    with pytest.raises(WatchError, match=r"behind step 0: .* there is no earlier checkpoint"):
        train(ended, options, quiet())
    said: list[str] = []
    sound = settings(watch=WatchConfig(still=0.0, window=0, teacher=1))
    train(sound, replace(options, step=1), Told(say=said.append))
    assert any("goes on from step 1, where a watchdog ended the run: still: motion" in line for line in said)


def test_another_schedule_than_that_of_the_heads_is_refused(
    corpus: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _from(run, tmp_path)
    monkeypatch.setattr(
        train_module._Run, "schedule", property(lambda self: PddSchedule(shift=5.0, boundary=None))
    )
    with pytest.raises(CheckpointError, match="one schedule serves start, rollout, replay and inference"):
        train(settings(), Options(corpus, out, "5", steps=1), quiet())


def test_how_passes_cut_a_step_changes_nothing(corpus: str, run: Path, tmp_path: Path) -> None:
    out = _from(run, tmp_path)
    stages = tuple(replace(s, micro=2) for s in settings().stages)
    train(settings(stages=stages), Options(corpus, out, "5", steps=2), quiet())
    apart, together = (read_rows(at / "5" / "metrics.jsonl") for at in (run, out))
    for a, b in zip(apart, together, strict=True):
        names = ("before", "after", "real", "critic")
        for name in names:
            assert b[name] == pytest.approx(a[name], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3, abs=1e-7)


def test_a_folder_that_is_being_trained_is_refused(corpus: str, run: Path, tmp_path: Path) -> None:
    out = _from(run, tmp_path)
    (out / "5").mkdir()
    with (out / "5" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrainError, match="is being trained by another run"):
            train(settings(), Options(corpus, out, "5", steps=1), quiet())


def test_stage_5_needs_all_experts(corpus: str, run: Path, tmp_path: Path) -> None:
    out = _from(run, tmp_path)
    with pytest.raises(TrainError, match="rolls out with all experts"):
        train(settings(), Options(corpus, out, "5", experts=("low",), steps=1), quiet())


def _from(run: Path, tmp_path: Path, finished: tuple[str, ...] = ("3", "4")) -> Path:
    """A run that has finished these stages."""
    out = tmp_path / "run"
    out.mkdir()
    for stage in finished:
        (out / stage).symlink_to(run / stage)
    known = RunFolder(run).read()
    known["stages"] = {name: known["stages"][name] for name in finished}
    train_module.write_json(out / "run.json", known)
    return out

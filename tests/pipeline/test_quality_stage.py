"""The quality stage on real clips: a row a window, medians as facts, and nothing judged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jobs.show import draw
from pipeline.clips.signals import COLUMNS, SIGNALS, Signals
from pipeline.clips.signals import pack as pack_signals
from pipeline.gates import Gates, GatesConfig
from pipeline.ingest import Ingest, IngestConfig
from pipeline.observe import Observe, ObserveConfig
from pipeline.pose.stage import Pose, PoseConfig
from pipeline.quality.axes import AXES, RAWS
from pipeline.quality.stage import SCORES, Quality, hard_cuts, read_quality, spans
from pipeline.sources import SourceConfig
from pipeline.stage import Receipt, Unit, run_unit
from pipeline.store import Store, sha256_file
from pipeline.tables import _quality
from schemas.camera import CameraRecord, Cameras
from schemas.clip import Clip, FrameTable, Sidecar
from schemas.policy import AXES as JUDGED
from schemas.quality import SMOOTHNESS_RAWS, VISUAL_RAWS, Status
from schemas.tables import TABLES

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared/data/footage"))
DOOM = CameraRecord(focal=0.375, aspect=1.2, look="shear", look_known=True, n=1, mad=0.0)
KEPT: dict[str, Unit] = {}


def scored(folder: Path, name: str) -> Unit:
    """A clip of the pack with the receipts of every stage up to quality, gates without a shortest length."""
    if name not in KEPT:
        path = FOOTAGE / name
        clip = Clip(
            clip_id=path.stem.lower(),
            recording_id="r",
            game="doom",
            source_path=name,
            bytes=path.stat().st_size,
            sha256=sha256_file(path),
        )
        unit = Unit(clip, "p", Store(str(FOOTAGE)), Store(str(folder / "corpus")))
        cameras = Cameras(games={"doom": {"16/9": DOOM}})
        for stage in (
            Ingest(IngestConfig()),
            Gates(GatesConfig(min_frames=1)),
            Observe(ObserveConfig()),
            Pose(PoseConfig(), SourceConfig(), cameras),
            Quality(),
        ):
            receipt = run_unit(stage, unit)
            assert receipt.status is Status.OK, receipt.reasons
            unit = replace(unit, receipts={**unit.receipts, stage.name: receipt})
        KEPT[name] = unit
    return KEPT[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, footage: Path) -> Path:
    return tmp_path_factory.mktemp("quality")


def rows(unit: Unit) -> list[dict[str, object]]:
    found: list[dict[str, object]] = read_quality(unit).to_pylist()
    return found


def test_every_window_has_its_scores_and_the_facts_are_their_medians(folder: Path) -> None:
    unit = scored(folder, "nav05_keys_deathmatch.mp4")
    table, facts = rows(unit), unit.receipts["quality"].facts
    assert [(r["start"], r["stop"]) for r in table] == [(s.start, s.stop) for s in spans(715)]
    assert [r["window"] for r in table] == list(range(6))
    for name in SCORES:
        scores = [r[name] for r in table]
        assert all(0 <= score <= 1 for score in scores)
        assert facts[f"q_{name}"] == pytest.approx(np.median(scores), abs=1e-6)
    assert all(r["smoothness"] > 0.9 and r["motion_by"] == "poses" for r in table)
    assert facts["aesthetics_by"] and not facts["watermark"]


@pytest.mark.soak  # 12 s; test_smoothness holds the score
def test_jitter_comes_last_and_is_named(folder: Path) -> None:
    unit = scored(folder, "bad01_jitter.mp4")
    assert unit.receipts["pose"].facts["estimator"] == "vo-1"
    assert {(r["smoothness_by"], r["motion_by"]) for r in rows(unit)} == {("shake", "poses")}
    assert unit.receipts["quality"].facts["q_smoothness"] < 0.1


def test_a_frozen_run_is_flagged_in_its_window_and_does_not_veto_the_clip(folder: Path) -> None:
    unit = scored(folder, "bad05_frozen_140_245.mp4")
    before, frozen, after = rows(unit)
    assert (frozen["frozen_start"], frozen["frozen_stop"]) == (140, 245)
    assert frozen["smoothness_by"] == "frozen" and frozen["smoothness"] < 0.4
    assert min(before["smoothness"], after["smoothness"]) > 0.9
    assert unit.receipts["quality"].status is Status.OK


def test_a_clip_of_53_frames_is_one_short_window(folder: Path) -> None:
    unit = scored(folder, "q_noise_10.mp4")
    [row] = rows(unit)
    assert (row["window"], row["start"], row["stop"]) == (0, 0, 53)
    assert all(row[name] is not None for name in SCORES)


def test_without_signals_cuts_are_unknown(folder: Path) -> None:
    [row] = rows(scored(folder, "q_noise_10.mp4"))
    assert row["cuts"] is None and "cut" in str(row["smoothness_unknown"]).split("|")


def test_the_same_unit_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    unit = scored(folder, "nav05_keys_deathmatch.mp4")
    again = run_unit(Quality(), unit)
    assert again.outputs == unit.receipts["quality"].outputs
    assert again.content == unit.receipts["quality"].content


def test_the_picture_of_a_clip_shows_its_scores(folder: Path, tmp_path: Path) -> None:
    draw(scored(folder, "bad05_frozen_140_245.mp4"), tmp_path / "clip.png")
    assert (tmp_path / "clip.png").stat().st_size > 100_000


# --- columns ----------------------------------------------------------------------------------------------


def test_the_table_holds_every_score_and_every_raw_measure(folder: Path) -> None:
    names = TABLES["quality"].names
    assert names[:9] == ["clip_id", "window", *SCORES]
    assert tuple(SCORES) == tuple(JUDGED) and SCORES[:-1] == AXES
    assert tuple(VISUAL_RAWS) == RAWS
    assert names[-len(RAWS) - len(SMOOTHNESS_RAWS) :] == [*RAWS, *SMOOTHNESS_RAWS]
    unit = scored(folder, "q_noise_10.mp4")
    assert set(_quality(unit)) == set(names)


# --- cuts of the recording on the frames of the clip ------------------------------------------------------


def cut_unit(tmp_path: Path, cut: np.ndarray, start: int, stop: int) -> Unit:
    kinds: Mapping[str, type] = {
        "pts": np.int64,
        "pixels": np.uint64,
        "change": np.float32,
        "covered": np.float32,
    }
    columns = {name: np.zeros(len(cut), kinds.get(name, np.bool_)) for name in COLUMNS} | {"cut": cut}
    corpus = Store(str(tmp_path / "corpus"))
    corpus.write(SIGNALS, pack_signals(Signals(time_base=Fraction(1, 30), **columns)))
    clip = Clip(
        clip_id="a",
        recording_id="a",
        source_path="a.mp4",
        bytes=1,
        sha256="0",
        start=start,
        stop=stop,
        signals=Sidecar(path=SIGNALS, digest="d"),
    )
    receipts: dict[str, Receipt] = {}
    return Unit(clip, "p", corpus, corpus, receipts)


def shown(source: np.ndarray) -> FrameTable:
    n = len(source)
    one = np.ones(n, np.bool_)
    return FrameTable(Fraction(1, 30), np.arange(n), source, np.zeros(n, np.uint64), one, ~one)


def test_cuts_fall_on_the_frames_that_show_them(tmp_path: Path) -> None:
    """A clip of frames 100 to 200 of a recording, halved by its working copy: the cut before source frame 121
    lies before frame 11, which shows 122."""
    frame = np.arange(300)
    unit = cut_unit(tmp_path, np.isin(frame, [100, 121, 160, 250]), 100, 200)
    found = hard_cuts(unit, shown(np.arange(100, 200, 2)))
    assert np.flatnonzero(found).tolist() == [11, 30]
    assert np.flatnonzero(hard_cuts(unit, shown(np.arange(100, 200)))).tolist() == [21, 60]


def test_a_repeated_source_frame_repeats_no_cut(tmp_path: Path) -> None:
    unit = cut_unit(tmp_path, np.arange(50) == 20, 0, 0)
    source = np.sort(np.concatenate([np.arange(50), [20, 20]]))
    assert np.flatnonzero(hard_cuts(unit, shown(source))).tolist() == [20]

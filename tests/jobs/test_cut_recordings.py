"""Recordings that are cut: each clip is its own frames of the recording, and so are its labels."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from jobs.config import CurateConfig, parse
from jobs.corpus_run import run_curate
from jobs.runner import InProcess
from pipeline.flow import StageOrderError
from pipeline.shards.verify import verify
from pipeline.store import Store
from pipeline.tables import batches

NAME = "nav05_keys_deathmatch"
FRAMES = 715
LENGTHS = {"navigation_min_s": 4.5, "navigation_max_s": 7.0, "event_min_s": 4.4, "event_max_s": 4.6}
INPUTS = [
    {"column": "TURN_RIGHT", "action": "yaw", "unit": "key", "sign": 1},
    {"column": "TURN_LEFT", "action": "yaw", "unit": "key", "sign": -1},
    {"column": "MOVE_FORWARD", "action": "forward", "unit": "key", "sign": 1},
]
POSES = {
    "file": "{stem}.truth.csv",
    "columns": {
        "x": "CAMERA_POSITION_X",
        "y": "CAMERA_POSITION_Y",
        "z": "CAMERA_POSITION_Z",
        "yaw": "CAMERA_ANGLE",
        "pitch": "CAMERA_PITCH",
    },
    "world": {"up": "z", "handed": "right"},
    "yaw_positive": "left",
    "pitch_positive": "down",
}


def source(folder: Path, footage: Path, clock: str) -> Path:
    """One recording with its log and poses; clock: rows by "frame" or by "time"."""
    folder.mkdir()
    for suffix in ("mp4", "truth.csv"):
        (folder / f"{NAME}.{suffix}").symlink_to(footage / f"{NAME}.{suffix}")
    when = {"time": "time_s"} if clock == "time" else {}
    log = {"file": "{stem}.truth.csv", "row": "next", "inputs": INPUTS, **when}
    game = {
        "game": "doom",
        "videos": ["*.mp4"],
        "perspective": "fps",
        "log": log,
        "poses": {**POSES, **when},
    }
    (folder / "games.yaml").write_text(yaml.safe_dump({"games": [game]}))
    return folder


def config(**clips: Any) -> CurateConfig:
    return parse({"clips": {**LENGTHS, **clips}, "run": {"cpus": 2}}, "test")


def rows(corpus: Path, table: str, clip: str = "") -> list[dict[str, Any]]:
    return [r for b in batches(Store(str(corpus)), table, clip) for r in b.to_pylist()]


@pytest.fixture(scope="module")
def cut(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("cut")
    run_curate(
        f"gameplay:{source(base / 'in', footage, 'frame')}", str(base / "out"), config(), pool=InProcess()
    )
    return base / "out"


@pytest.fixture(scope="module")
def whole(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("whole")
    run_curate(
        f"gameplay:{source(base / 'in', footage, 'frame')}",
        str(base / "out"),
        config(enabled=False),
        pool=InProcess(),
    )
    return base / "out"


def spans(corpus: Path) -> dict[str, tuple[int, int]]:
    found = {r["clip_id"]: (r["start"], r["stop"]) for r in rows(corpus, "segments") if r["clip_id"]}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def test_segments_partition_the_recording(cut: Path) -> None:
    found = sorted((r["start"], r["stop"]) for r in rows(cut, "segments"))
    assert found[0][0] == 0 and found[-1][1] == FRAMES
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert len(spans(cut)) >= 3
    assert {r["status"] for r in rows(cut, "clips")} == {"ok"}
    assert {r["kind"] for r in rows(cut, "clips")} == {"navigation"}


def test_frames_of_a_clip_are_those_of_the_recording(cut: Path) -> None:
    for clip, (start, stop) in spans(cut).items():
        frames = rows(cut, "frames", clip)
        assert [r["source_index"] for r in frames] == list(range(start, stop))
        assert frames[0]["time_s"] == 0


def test_labels_of_a_clip_are_those_of_its_frames(cut: Path, whole: Path) -> None:
    """Poses and turns of a clip are the recording's at its frames, not at the recording's start."""
    (one,) = spans(whole).values()
    assert one == (0, FRAMES)
    truth = pd.DataFrame(rows(whole, "poses"))
    for clip, (start, stop) in spans(cut).items():
        mine = pd.DataFrame(rows(cut, "poses", clip))
        theirs = truth.iloc[start:stop].reset_index(drop=True)
        for column in ("x_right", "y_down", "z_forward"):
            assert np.allclose(mine[column], theirs[column])
        assert np.allclose(mine["yaw_rate_deg_s"][:-1], theirs["yaw_rate_deg_s"][:-1])
        actions = pd.DataFrame(rows(cut, "actions", clip))
        pressed = actions[actions["forward"] != 0]
        assert len(pressed) > 3


@pytest.mark.soak  # 12 s
def test_a_log_by_time_gives_the_labels_of_a_log_by_frame(cut: Path, footage: Path, tmp_path: Path) -> None:
    run_curate(
        f"gameplay:{source(tmp_path / 'in', footage, 'time')}",
        str(tmp_path / "out"),
        config(),
        pool=InProcess(),
    )
    for clip in spans(cut):
        for table in ("actions", "poses"):
            assert rows(cut, table, clip) == rows(tmp_path / "out", table, clip)


def test_splits_go_by_recording_and_published_files_verify(cut: Path) -> None:
    assert len({r["split"] for r in rows(cut, "clips")}) == 1
    assert verify(Store(str(cut))) == []


def test_other_lengths_leave_recordings_that_were_cut(cut: Path, footage: Path) -> None:
    before = spans(cut)
    entry = source(cut.parent / "again", footage, "frame")
    outcome = run_curate(
        f"gameplay:{entry}", str(cut), config(navigation_min_s=2.0, navigation_max_s=3.0), pool=InProcess()
    )
    assert spans(cut) == before
    assert outcome.already_done == len(before)


def test_lost_signals_are_made_anew_as_their_error_says(cut: Path) -> None:
    before = spans(cut)
    (signals,) = (cut / "recordings/work/clips").rglob("*.signals.parquet")
    data = signals.read_bytes()
    signals.unlink()
    for folder in (cut / "recordings/ledger").glob("g*"):
        shutil.rmtree(folder)
    outcome = run_curate(f"gameplay:{cut.parent / 'in'}", str(cut), config(), pool=InProcess())
    assert signals.read_bytes() == data and spans(cut) == before
    assert outcome.already_done == len(before)


def test_cutting_anew_is_refused(cut: Path) -> None:
    with pytest.raises(StageOrderError, match="cut once"):
        run_curate(f"folder:{cut.parent / 'in'}", str(cut), config(), anew="clips", pool=InProcess())


def test_a_recording_that_nobody_could_look_at_is_no_clip_and_is_named(footage: Path, tmp_path: Path) -> None:
    entry = f"gameplay:{source(tmp_path / 'in', footage, 'frame')}"
    run_curate(entry, str(tmp_path / "out"), config(timeout_s=0.01), pool=InProcess())
    assert rows(tmp_path / "out", "clips") == []
    (failed,) = rows(tmp_path / "out", "failures")
    assert failed["stage"] == "clips" and failed["reasons"].startswith("timeout")
    run_curate(entry, str(tmp_path / "out"), config(), retry_failed=True, only="clips", pool=InProcess())
    assert len(rows(tmp_path / "out", "clips")) >= 3
    assert rows(tmp_path / "out", "failures") == []

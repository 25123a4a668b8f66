"""From pictures and logs alone to published actions: signs, calibration, and the same bytes on any pool."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs.config import parse
from jobs.corpus_run import run_curate
from jobs.runner import InProcess, RayPool
from pipeline.calibration import CAMERA, ROTATION
from pipeline.shards.read import read_index, read_sample
from pipeline.statistics import newest, versions
from pipeline.store import Store
from pipeline.tables import batches
from schemas.action import AXES, RateStatus, RotationRates
from schemas.camera import Cameras

CLIP = "nav05_keys_deathmatch"
KEY_MAP = Path(__file__).parents[1] / "footage.yaml"
SETTINGS = {"source": {"key_map": str(KEY_MAP)}, "run": {"cpus": 2}}


@pytest.fixture(scope="module")
def recordings(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of one game with logs and no poses; the truth columns of the logs are gone."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in (CLIP, "loop03_turn180_deathmatch_offpath"):
        (folder / f"{name}.mp4").symlink_to(footage / f"{name}.mp4")
        log = pd.read_csv(footage / f"{name}.truth.csv")
        plain = ("JUMP", "SPEED", "DEAD")
        kept = [c for c in log if c.startswith(("MOVE_", "TURN_", "mouse_")) or c in plain]
        log[[c for c in kept if "DELTA" not in c]].to_csv(folder / f"{name}.truth.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def corpus(recordings: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("motion") / "corpus"
    run_curate(f"gameplay:{recordings}", str(folder), parse(SETTINGS, "test"), pool=InProcess())
    return Store(str(folder))


def members(corpus: Store) -> dict[str, Any]:
    """Annotation arrays of the clip, as a trainer reads them."""
    ids = {r["source_path"]: r["clip_id"] for b in batches(corpus, "clips") for r in b.to_pylist()}
    row = next(r for r in read_index(corpus).to_pylist() if r["sample_id"] == ids[f"{CLIP}.mp4"])
    found = read_sample(corpus, row["annotations"])
    return {k: np.load(io.BytesIO(v), allow_pickle=False) for k, v in found.items() if k.endswith("npy")}


def test_rates_of_the_game_come_from_pictures_and_logs(corpus: Store) -> None:
    cameras, rates = newest(corpus, CAMERA, Cameras), newest(corpus, ROTATION, RotationRates)
    assert cameras is not None and rates is not None
    focal = cameras.games["fdoom_keys"]["16/9"].focal
    assert focal is not None and abs(focal * 640 / 240 - 1) < 0.03
    right = rates.rates["fdoom_keys"]["TURN_RIGHT"]
    assert right.status is RateStatus.OK
    assert right.ramp[0].value == pytest.approx(1.758 * 35, rel=0.02)
    assert right.value == pytest.approx(3.516 * 35, rel=0.02)


def test_published_turns_and_poses_have_the_signs_of_the_engine(corpus: Store, footage: Path) -> None:
    """Right is positive, forward motion goes along the camera's third axis: through every stage and file."""
    truth = pd.read_csv(footage / f"{CLIP}.truth.csv")
    found = members(corpus)
    ends = found["grid.npy"][::4]
    turned = np.cumsum(np.concatenate(([0.0], truth["d_yaw_right_deg"].to_numpy()[:-1])))
    true_yaw = np.diff(turned[ends])
    yaw = found["actions.npy"][1:, AXES.index("yaw")]
    known = np.isfinite(yaw)
    assert known.mean() > 0.9
    assert np.median(np.abs(yaw[known] - true_yaw[known])) < 0.2
    assert np.corrcoef(yaw[known], true_yaw[known])[0, 1] > 0.99
    poses = found["poses.npy"]
    step = np.einsum("fi,fi->f", np.diff(poses[:, :, 3], axis=0), poses[:-1, :, 2])
    walks = (truth["MOVE_FORWARD"] > 0)[:-1] & (np.hypot(truth["VELOCITY_X"], truth["VELOCITY_Y"]) > 5)[:-1]
    walks &= np.isfinite(step)
    assert walks.sum() > 50 and np.median(step[walks]) > 0.5


def test_log_and_poses_agree_and_a_frame_without_a_pose_says_why(corpus: Store) -> None:
    rows = {r["source_path"]: r for b in batches(corpus, "clips") for r in b.to_pylist()}
    assert rows[f"{CLIP}.mp4"]["log_pose_correlation"] > 0.99
    poses = [r for b in batches(corpus, "poses", rows[f"{CLIP}.mp4"]["clip_id"]) for r in b.to_pylist()]
    assert all(bool(r["reason"]) != r["valid"] for r in poses)
    assert {r["reason"] for r in poses} - {""} <= {"few_points", "disagree", "imprecise", "pose_gap"}
    assert sum(r["valid"] for r in poses) / len(poses) > 0.95


def test_the_loop_is_found_and_the_other_clip_has_none(corpus: Store) -> None:
    loops = {r["source_path"][:6]: r["loop"] for b in batches(corpus, "clips") for r in b.to_pylist()}
    assert loops["nav05_"] == ""
    assert int(loops["loop03"].split("-")[1]) >= 1000


@pytest.mark.soak  # a minute of odometry; test_curate holds the same without it
def test_two_ray_workers_make_the_same_bytes(corpus: Store, recordings: Path, tmp_path: Path) -> None:
    pool = RayPool(None, 2, None)
    try:
        run_curate(f"gameplay:{recordings}", str(tmp_path / "corpus"), parse(SETTINGS, "test"), pool=pool)
    finally:
        pool.close()
    other = Store(str(tmp_path / "corpus"))
    for part in ("work", "statistics", "shards"):
        paths = [s.path for s in corpus.list(part)]
        assert paths == [s.path for s in other.list(part)]
        assert [p for p in paths if corpus.read(p) != other.read(p)] == []


def test_a_second_run_measures_nothing_and_recalibrating_finds_the_same(
    corpus: Store, recordings: Path
) -> None:
    source, config = f"gameplay:{recordings}", parse(SETTINGS, "test")
    before = {s.path: s.version for s in corpus.list("shards")}
    run_curate(source, corpus.root, config, pool=InProcess())
    assert versions(corpus, CAMERA) == versions(corpus, ROTATION) == [1]
    first = newest(corpus, ROTATION, RotationRates)
    run_curate(source, corpus.root, config, recalibrate=True, pool=InProcess())
    assert versions(corpus, CAMERA) == versions(corpus, ROTATION) == [1, 2]
    assert newest(corpus, ROTATION, RotationRates) == first
    assert {s.path: s.version for s in corpus.list("shards")} == before

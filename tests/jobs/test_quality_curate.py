"""Quality by the way that a user takes: every rung of the pack's ladders gets its scores, and bad clips fall
for their own reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.config import parse
from jobs.corpus_run import run_curate
from jobs.runner import InProcess
from pipeline.store import Store
from pipeline.tables import batches

RUNGS = ("q_ref_crf18", "q_blur_s4", "q_compress_crf51", "q_noise_50", "q_dark_035", "q_lowcontrast")
BAD = {"bad04_menu": "menu", "bad07_duplicated_x3": "below_grid_rate"}


@pytest.fixture(scope="module")
def corpus(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    base = tmp_path_factory.mktemp("quality")
    (base / "in").mkdir()
    for name in (*RUNGS, *BAD, "q_noise_10"):
        (base / "in" / f"{name}.mp4").symlink_to(footage / f"{name}.mp4")
    settings = parse({"gates": {"min_frames": 1}, "observe": {"track": "none"}}, "test")
    run_curate(f"folder:{base / 'in'}", str(base / "out"), settings, pool=InProcess())
    return Store(str(base / "out"))


def rows(corpus: Store, table: str) -> list[dict[str, Any]]:
    return [r for b in batches(corpus, table) for r in b.to_pylist()]


def test_every_rung_is_scored_and_loses_on_its_own_axis(corpus: Store) -> None:
    names = {r["clip_id"]: Path(r["source_path"]).stem for r in rows(corpus, "clips")}
    worst: dict[str, dict[str, float]] = {}
    for row in rows(corpus, "quality"):
        held = worst.setdefault(names[row["clip_id"]], {})
        for axis in ("sharpness", "noise", "compression", "dynamic_range"):
            held[axis] = min(row[axis], held.get(axis, 1.0))
    assert set(RUNGS) <= set(worst)
    for rung, axis in (
        ("q_blur_s4", "sharpness"),
        ("q_noise_50", "noise"),
        ("q_noise_10", "noise"),
        ("q_compress_crf51", "compression"),
        ("q_dark_035", "dynamic_range"),
        ("q_lowcontrast", "dynamic_range"),
    ):
        assert worst[rung][axis] < worst["q_ref_crf18"][axis], (rung, axis)
    assert worst["q_noise_50"]["noise"] < worst["q_noise_10"]["noise"]


def test_a_clip_of_53_frames_is_one_short_window(corpus: Store) -> None:
    ids = {Path(r["source_path"]).stem: r["clip_id"] for r in rows(corpus, "clips")}
    (window,) = [r for r in rows(corpus, "quality") if r["clip_id"] == ids["q_noise_50"]]
    assert (window["start"], window["stop"]) == (0, 53)


def test_bad_clips_fall_for_their_own_reasons(corpus: Store) -> None:
    found = {Path(r["source_path"]).stem: r["reasons"] for r in rows(corpus, "clips") if r["reasons"]}
    assert {name: reasons.split(":")[0] for name, reasons in found.items()} == BAD


def test_counts_of_the_selection_add_up_to_the_clips(corpus: Store) -> None:
    chosen = rows(corpus, "selection")
    assert len(chosen) == len(rows(corpus, "clips"))
    assert all((r["tier"] == "out") == bool(r["reasons"]) for r in chosen)

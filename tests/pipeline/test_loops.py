"""Loops are closed by views: the pack's closed loops are found, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from pipeline import loops
from pipeline.frames import frame_pass
from pipeline.loops import LoopReason, LoopSearch, Views, find_loop

Gray = npt.NDArray[np.uint8]


class Shown:
    """A picture of which only the gray view is asked."""

    def __init__(self, gray: Gray) -> None:
        self.gray = gray


def search(path: Path) -> LoopSearch:
    views = Views()
    frame_pass(path, [views])
    return find_loop(views.views)


def show(pictures: list[Gray]) -> list[loops.View]:
    views = Views()
    for index, picture in enumerate(pictures):
        views.see(index * loops.STRIDE, Shown(picture))  # type: ignore[arg-type]
    return views.views


def scene(seed: int) -> Gray:
    """A textured picture [180, 320] of blocks of random brightness."""
    blocks = np.random.default_rng(seed).integers(20, 220, (30, 54)).astype(np.uint8)
    return np.kron(blocks, np.ones((6, 6), np.uint8))[:, :320]


@pytest.mark.parametrize(
    "clip", ["loop01_rewind_map02", "loop03_turn180_deathmatch_offpath", "loop04_rewind_map06"]
)
def test_a_clip_that_returns_to_its_start_is_found(footage: Path, clip: str) -> None:
    found = search(footage / f"{clip}.mp4").closure
    assert found is not None
    about = json.loads((footage / f"{clip}.truth.json").read_text())["loop"]
    truth = pd.read_csv(footage / f"{clip}.truth.csv")
    path = truth[["CAMERA_POSITION_X", "CAMERA_POSITION_Y"]].to_numpy(np.float64)
    turned = (truth["CAMERA_ANGLE"][found.later] - truth["CAMERA_ANGLE"][found.first] + 180) % 360 - 180
    assert np.linalg.norm(path[found.later] - path[found.first]) < 2
    assert abs(turned) < 2
    assert about["return_end"] - 70 <= found.later <= about["return_end"] + 16
    assert found.score > 0.3
    assert found.shift < 0.01


@pytest.mark.parametrize(
    "clip",
    [
        "nonloop01_oneway_drop_e1m1",
        "nav01_mouse_map01",  # passes half a step beside its start, which is another view
        "nav05_keys_deathmatch",
        "event01_door_map01",  # ends before the other side of the door of its start
        "event07_fight_defend_center",  # turns in a round room with the same wall all round
        "bad03_hud",
        "bad04_menu",
    ],
)
def test_a_clip_that_does_not_return_is_not(footage: Path, clip: str) -> None:
    assert search(footage / f"{clip}.mp4") == LoopSearch(None, LoopReason.NOT_SEEN_AGAIN)


def test_a_view_that_comes_back_a_little_to_the_side_still_closes() -> None:
    pictures = [scene(0)] * 4 + [scene(s) for s in range(1, 9)] + [np.roll(scene(0), 9, axis=1)] * 3
    found = find_loop(show(pictures)).closure
    assert found is not None
    assert found.later == 12 * loops.STRIDE
    assert found.shift == pytest.approx(9 / 320, abs=0.004)
    far = [*pictures[:12], np.roll(scene(0), 60, axis=1)]
    assert find_loop(show(far)).reason is LoopReason.NOT_SEEN_AGAIN


def test_an_overlay_that_never_moves_closes_no_loop() -> None:
    """Half of the picture is painted on the screen; the world below it never repeats."""
    pictures = [scene(s) for s in range(20)]
    for picture in pictures:
        picture[90:] = scene(99)[90:]
    assert find_loop(show(pictures)).reason is LoopReason.NOT_SEEN_AGAIN
    back = find_loop(show([*pictures, pictures[0]])).closure
    assert back is not None
    assert (back.first, back.later) == (0, 20 * loops.STRIDE)


def test_a_view_that_was_never_left_is_no_loop() -> None:
    assert find_loop(show([scene(0)] * 30)) == LoopSearch(None, LoopReason.NEVER_LEFT)
    blink = [scene(0)] * 10 + [scene(1)] * (loops.LEFT_VIEWS - 1) + [scene(0)] * 3
    assert find_loop(show(blink)).reason is LoopReason.NEVER_LEFT


def test_nothing_is_claimed_of_a_picture_without_points() -> None:
    flat = np.full((180, 320), 40, np.uint8)
    assert find_loop(show([flat] * 30)) == LoopSearch(None, LoopReason.FEW_POINTS)
    assert find_loop([]) == LoopSearch(None, LoopReason.FEW_POINTS)


def test_memory_is_bounded_and_reruns_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_VIEWS", 16)
    pictures = [scene(0)] + [scene(s) for s in range(1, 96)] + [scene(0)] * 4
    views = show(pictures)
    assert len(views) <= 16
    gaps = np.diff([v.frame for v in views])
    assert len(set(gaps.tolist())) == 1
    again = show(pictures)
    assert all(a.descriptors.tobytes() == b.descriptors.tobytes() for a, b in zip(views, again, strict=True))
    assert find_loop(views) == find_loop(again)
    closure = find_loop(views).closure
    assert closure is not None
    assert closure.later >= 96 * loops.STRIDE

"""Drift: each measure follows what it is of, and nothing where nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest

from jobs.evaluate import drift
from jobs.evaluate.drift import CHARACTER, Protocol, looks, summary
from jobs.evaluate.page import write
from jobs.evaluate.report import Report
from jobs.evaluate.world import World
from schemas.clip import Perspective
from tests.jobs.oracles import Corrupted, Frozen, Noise, Panorama, Picture, Stuttering, starts, texture

LONG = Protocol(trajectories=2, latents=24, films=0)
END = "end of the video"
GRADES = range(5)


def quiet(what: str, done: int, of: int) -> None:
    pass


def measured(world: World, folder: Path, perspective: Perspective = Perspective.FIRST) -> Report:
    begun = [replace(s, perspective=perspective) for s in starts(2, 48, 64)]
    return drift.run(world, begun, LONG, folder, quiet)


def test_a_frozen_video_has_no_motion_and_does_not_drift(tmp_path: Path) -> None:
    report = measured(Frozen(), tmp_path, Perspective.THIRD)
    assert report.value(END, "motion").mean == 0.0
    assert all(y.mean == 0.0 for f in report.figures if f.title == "motion" for y in f.lines[0].y)
    assert report.value(END, "saturation_kept").mean == 1.0
    assert report.value(END, "sharpness_kept").mean == pytest.approx(1.0, rel=1e-6)  # sums of 13 and of 16
    assert report.value(END, "distance").mean == 0.0 and report.value(END, "character").mean == 1.0
    with pytest.raises(KeyError):  # a share of nothing is not known
        report.value(END, "motion_kept")
    write(report, tmp_path)
    assert measured(Panorama(), tmp_path).value(END, "motion").mean > 0.01
    assert measured(Noise(), tmp_path).value(END, "motion").mean > 0.2


Change = Callable[[Picture, int, np.random.Generator], Picture]


def late(change: Callable[[Picture], Picture]) -> Change:
    """From the second chunk on."""
    return lambda rgb, frame, draw: change(rgb) if frame >= 13 else rgb


def blurred(grade: int) -> Change:
    return late(lambda rgb: cv2.GaussianBlur(rgb, (0, 0), 0.5 * grade) if grade else rgb)


def grey(grade: int) -> Change:
    def change(rgb: Picture) -> Picture:
        mean = rgb.mean(axis=2, keepdims=True)
        return (rgb + grade / 4 * (mean - rgb)).astype(np.uint8)

    return late(change)


def tinted(grade: int) -> Change:
    return late(lambda rgb: np.clip(rgb + grade * np.array([30.0, -20.0, -30.0]), 0, 255).astype(np.uint8))


def other_character(grade: int) -> Change:
    """The region is repainted in another pattern of dark red, a fifth of its rows at each grade."""

    def change(rgb: Picture) -> Picture:
        height, width = rgb.shape[:2]
        rows, columns = CHARACTER
        top, bottom = round(height * rows.start), round(height * rows.stop)
        left, right = round(width * columns.start), round(width * columns.stop)
        out = rgb.copy()
        stop = top + (bottom - top) * grade // 5
        out[top:stop, left:right] = texture(48, 64, "red")[top:stop, left:right] // (2, 8, 8)
        return out

    return late(change)


@pytest.mark.parametrize(
    ("measure", "change", "rises"),
    [
        ("sharpness_kept", blurred, False),
        ("saturation_kept", grey, False),
        ("distance", tinted, True),
        ("character", other_character, False),
    ],
)
def test_five_grades_of_corruption_move_each_measure_strictly(
    tmp_path: Path, measure: str, change: Callable[[int], Change], rises: bool
) -> None:
    still = [measured(Corrupted(Frozen(), change(g)), tmp_path, Perspective.THIRD) for g in GRADES]
    moving = [measured(Corrupted(Panorama(), change(g)), tmp_path, Perspective.THIRD) for g in GRADES]
    for reports in (still, moving) if measure != "distance" else (still,):
        values = [report.value(END, measure).mean for report in reports]
        assert all((b > a) is rises and a != b for a, b in pairwise(values)), values


def test_five_grades_of_stuttering_lower_motion_strictly(tmp_path: Path) -> None:
    """A picture held longer jumps further and less often: of a walk in one direction the sum stays, of a
    textured one it saturates."""
    values = [measured(Stuttering(Panorama(), 4**g), tmp_path).value(END, "motion").mean for g in GRADES]
    assert all(b < a for a, b in pairwise(values)), values


def test_the_character_counts_in_third_person_only_and_curves_have_a_point_a_chunk(tmp_path: Path) -> None:
    third = measured(Panorama(), tmp_path, Perspective.THIRD)
    first = measured(Panorama(), tmp_path)
    assert {f.title for f in third.figures} - {f.title for f in first.figures} == {"character"}
    assert all(len(f.lines[0].x) == 6 for f in third.figures)
    assert third.figures[0].lines[0].x[:2] == (0.5, 1.5)


def test_looks_of_known_pictures() -> None:
    black = np.zeros((13, 32, 32, 3), np.uint8)
    red = np.zeros((16, 32, 32, 3), np.uint8)
    red[..., 0] = 255
    found = looks(iter([black, red, red]), third_person=False)
    assert found.saturation.tolist() == [0.0, 1.0, 1.0]
    assert found.distance.tolist() == [0.0, 1.0, 1.0] and found.sharpness.tolist() == [0.0, 0.0, 0.0]
    # The step from one chunk to the next belongs to the later one: luma of red is 76 of 255.
    np.testing.assert_allclose(found.motion, [0.0, 76 / 255 / 16, 0.0], atol=1e-6)
    assert np.isnan(summary(found)["saturation_kept"]) and np.isnan(found.character).all()

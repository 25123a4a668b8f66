"""Control: a camera in a painted room, and worlds that obey in part or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from jobs.evaluate import control
from jobs.evaluate.control import OPPOSITE, RANDOM, Protocol, scores
from jobs.evaluate.page import write
from jobs.evaluate.report import Report
from jobs.evaluate.stats import paired
from jobs.evaluate.world import Case, EvaluationError, Frames, World
from schemas.action import FORWARD, LATERAL, PITCH, YAW
from tests.jobs.oracles import Deaf, Frozen, Mishearing, Noise, Room, starts

FOCAL = Room().focal
SMALL = Protocol(8, 8, latents=8, turn_latents=4, focal=FOCAL, films=0)
FEW = replace(SMALL, trajectories=4, pairs=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def quiet(what: str, done: int, of: int) -> None:
    pass


def measured(world: World, folder: Path, protocol: Protocol = SMALL) -> Report:
    return control.run(world, starts(8, 64, 128), protocol, folder, quiet)


def test_a_world_that_obeys_is_right_and_its_focal_length_is_found(tmp_path: Path) -> None:
    protocol = replace(FEW, turn_latents=8, focal=None, films=2)
    report = measured(Room(), tmp_path, protocol)
    assert report.settings["focal_share_of_width"] == pytest.approx(FOCAL, rel=0.02)
    assert report.value(RANDOM, "rotation_error").mean < 0.3
    assert report.value(RANDOM, "turn_accuracy").mean > 0.9
    assert report.value(RANDOM, "translation_accuracy").mean > 0.85
    assert report.value(RANDOM, "known").mean > 0.9
    assert report.value(OPPOSITE, "sign").mean == report.value(OPPOSITE, "both_signs").mean == 1
    turns = [case for case in report.cases if "yaw_deg" in case]
    np.testing.assert_allclose([abs(case["yaw_deg"]) for case in turns], 7 * 3, rtol=0.02)
    page = write(report, tmp_path).read_text()
    assert page.count("data:video/mp4;base64,") == 2 and page.count("<svg") == 2


def test_shuffled_actions_score_at_chance(tmp_path: Path) -> None:
    report = measured(Deaf(Room()), tmp_path)
    for part, measure, chance in (
        (RANDOM, "turn_accuracy", 0.5),
        (RANDOM, "translation_accuracy", 0.5),
        (OPPOSITE, "sign", 0.5),
        (OPPOSITE, "both_signs", 0.25),
    ):
        value = report.value(part, measure)
        # Not to follow is at most chance: a latent in which it does something else than asked is wrong too.
        assert value.low <= chance, (measure, value)
        assert value.mean < 0.7, (measure, value)
    played = [case for case in report.cases if "rotation_error" in case]
    names = [case["start"] for case in played]
    apart = paired(
        [case["rotation_error"] for case in played],
        [case["rotation_error_chance"] for case in played],
        names,
    )
    assert not apart.clear_of(0.0)
    obeyed = measured(Room(), tmp_path, replace(SMALL, pairs=0))
    own = [case for case in obeyed.cases if "rotation_error" in case]
    better = paired(
        [case["rotation_error_chance"] for case in own], [case["rotation_error"] for case in own], names
    )
    assert better.low > 0


def test_five_grades_of_mishearing_lower_every_score_strictly(tmp_path: Path) -> None:
    reports = [
        measured(Mishearing(Room(), share), tmp_path, replace(FEW, pairs=0))
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for better, worse in pairwise(reports):
        for measure in ("rotation_error", "rotation_error_relative"):
            assert better.value(RANDOM, measure).mean < worse.value(RANDOM, measure).mean
        for measure in ("turn_accuracy", "translation_accuracy"):
            assert better.value(RANDOM, measure).mean > worse.value(RANDOM, measure).mean


@dataclass(frozen=True)
class Stubborn:
    """A room that turns to the other side from the first `wrong` of its starts."""

    wrong: int
    name: str = "stubborn"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        rows = case.rows.copy()
        if int(case.name.split("-")[1]) < self.wrong:
            rows[:, YAW] *= -1
        return Room().play(replace(case, rows=rows), seed)


def test_the_opposite_test_counts_the_starts_that_turn_as_asked(tmp_path: Path) -> None:
    for wrong in (0, 1, 4):
        found = measured(Stubborn(wrong), tmp_path, replace(FEW, trajectories=0))
        assert found.value(OPPOSITE, "both_signs").mean == 1 - wrong / 4


def test_a_frozen_and_a_noisy_world_follow_nothing(tmp_path: Path) -> None:
    one = replace(FEW, trajectories=2, pairs=2)
    frozen = measured(Frozen(), tmp_path, one)
    for part, measure in (
        (RANDOM, "turn_accuracy"),
        (RANDOM, "translation_accuracy"),
        (OPPOSITE, "sign"),
        (OPPOSITE, "both_signs"),
    ):
        assert frozen.value(part, measure).mean == 0
    assert frozen.value(RANDOM, "rotation_error_relative").mean == 1
    noise = measured(Noise(), tmp_path, one)
    assert noise.value(RANDOM, "known").mean < 0.2
    assert noise.value(OPPOSITE, "both_signs").mean < 0.5
    write(noise, tmp_path)
    with pytest.raises(EvaluationError, match="give --focal"):
        measured(Noise(), tmp_path, replace(one, focal=None))


def test_scores_are_those_of_what_was_seen() -> None:
    rows = np.zeros((5, 6), np.float32)
    rows[1:, YAW] = [3, 3, -3, 0]
    rows[1:, PITCH] = [0, 0, 0, 1]
    rows[1:, FORWARD] = [1, 0, -1, 0]
    rows[1:, LATERAL] = [0, 1, 0, 0]
    turned = np.array([[3, 0], [2, 0], [3, 0], [0, 0.5]], float)
    moved = np.array([[0.1, 0.9], [-1, 0], [0, -1], [0, 0]], float)
    known = np.array([True, True, True, False])
    found = scores(rows, control.Seen(turned, moved, known))
    assert found["rotation_error"] == pytest.approx((0 + 1 + 6) / 3)
    assert found["rotation_error_relative"] == pytest.approx(7 / 9)
    assert found["turn_accuracy"] == 2 / 4  # the third turns the other way, the fourth is not known
    assert found["translation_accuracy"] == 2 / 3
    assert found["known"] == 0.75

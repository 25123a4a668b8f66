"""The 6-vector per latent: legal values, and a reason for every unknown. Source: DESIGN rule 4."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.action import AXES, FORWARD, JUMP, PITCH, YAW, LatentActions, RotationRates, Witness, runs


def rows(t: int = 4) -> np.ndarray:
    return np.zeros((t, 6), np.float32)


def test_every_unknown_needs_a_reason_and_only_those() -> None:
    r = rows()
    r[1:3, YAW] = np.nan
    assert LatentActions(r, {"yaw": ((1, 3, "uncalibrated"),)}, Witness.NONE).rows is r
    for reasons in (
        {},
        {"yaw": ((1, 2, "uncalibrated"),)},
        {"yaw": ((1, 4, "x"),)},
        {"pitch": ((1, 3, "x"),)},
    ):
        with pytest.raises(ValueError, match="reason"):
            LatentActions(r, reasons, Witness.NONE)


@pytest.mark.parametrize(
    ("axis", "value"), [(FORWARD, 0.5), (FORWARD, 2), (JUMP, -1), (AXES.index("lateral"), 3)]
)
def test_an_enumerated_axis_takes_only_its_values_even_beside_an_unknown(axis: int, value: float) -> None:
    r = rows()
    r[2, axis] = value
    r[2, PITCH] = np.nan
    with pytest.raises(ValueError, match=AXES[axis]):
        LatentActions(r, {"pitch": ((2, 3, "no_poses"),)}, Witness.NONE)


def test_the_first_row_is_idle() -> None:
    r = rows()
    r[0, YAW] = 1.0
    with pytest.raises(ValueError, match="idle"):
        LatentActions(r, {}, Witness.POSES)


def test_a_reason_for_something_that_is_no_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="roll"):
        LatentActions(rows(), {"roll": ((0, 1, "x"),)}, Witness.NONE)


@given(st.lists(st.booleans(), max_size=60))
def test_runs_rebuild_the_mask(mask: list[bool]) -> None:
    found = runs(np.array(mask, bool))
    again = [False] * len(mask)
    for start, stop in found:
        again[start:stop] = [True] * (stop - start)
    assert again == mask
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_an_input_without_a_rate_is_none_not_zero() -> None:
    rates = RotationRates(rates={"fdoom_mouse": {"mouse_counts_x": 0.15}})
    assert rates.rate("fdoom_mouse", "mouse_counts_x") == 0.15
    assert rates.rate("fdoom_mouse", "TURN_LEFT") is None and rates.rate("other", "mouse_counts_x") is None

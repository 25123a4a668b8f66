"""Rows of long rollouts: out and back ends where it began, joined rows are recorded ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from schemas.action import JUMP, PERSPECTIVE, YAW
from tests.trainer.model_support import action_rows
from trainer.curriculum import Law
from trainer.stable.controls import Rows, back, extended


def rows(seed: int, latents: int) -> Rows:
    out = action_rows(seed, latents)[0].numpy()
    out[0] = 0.0
    out[:, PERSPECTIVE] = 1.0
    return out


def none() -> Iterator[Rows]:
    raise AssertionError("other clips are not asked for")


def test_out_and_back_is_at_the_recorded_places_at_all_times() -> None:
    own = rows(1, 24)
    long = extended(own, 80, Law.OUT_AND_BACK, none)
    assert long.shape == (80, 6) and np.array_equal(long[:24], own)
    heading, recorded = long[:, YAW].cumsum(), own[:, YAW].cumsum()
    # 23 motions out, 23 back, 23 out ...
    for k in range(80):
        place = k % 46
        assert heading[k] == pytest.approx(recorded[min(place, 46 - place)], abs=1e-3)
    assert not long[24:47, JUMP].any() and np.array_equal(long[47:70, JUMP], own[1:, JUMP])
    assert (long[:, PERSPECTIVE] == 1.0).all()


def test_the_way_back_flips_every_sign_and_none_of_zero() -> None:
    there = rows(2, 9)
    again = back(there)
    assert np.array_equal(again[0, :4], -there[-1, :4] + 0.0)
    assert not np.signbit(again[again == 0.0]).any()


def test_joined_rows_are_recorded_ones_without_their_idle_rows() -> None:
    own, others = rows(1, 24), [rows(k, 20) for k in (2, 3, 4)]
    long = extended(own, 60, Law.JOINED, lambda: iter(others))
    assert np.array_equal(long[24:43], others[0][1:]) and np.array_equal(long[43:60], others[1][1:18])


def test_what_is_long_enough_is_cut_and_what_cannot_be_extended_is_refused() -> None:
    assert np.array_equal(extended(rows(1, 24), 8, Law.JOINED, none), rows(1, 24)[:8])
    with pytest.raises(ValueError, match="1 action rows cannot be extended to 8"):
        extended(rows(1, 1), 8, Law.OUT_AND_BACK, none)
    with pytest.raises(ValueError, match="have 43 action rows in all, 60 are asked for"):
        extended(rows(1, 24), 60, Law.JOINED, lambda: iter([rows(2, 20)]))

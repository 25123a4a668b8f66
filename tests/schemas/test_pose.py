"""The pose convention and the turn between two poses. Source: faults P7, P8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from schemas.pose import PoseTrack, Scale, Vec3, turn

UP: Vec3 = (0.0, 0.0, 1.0)


def look(yaw_right: np.ndarray | list[float], pitch_up: np.ndarray | list[float]) -> np.ndarray:
    """Camera-to-world rotations in a z-up world; yaw 0 looks along +y. Angles in degrees."""
    yaw, pitch = np.radians(np.asarray(yaw_right, float)), np.radians(np.asarray(pitch_up, float))
    ahead = np.stack([np.sin(yaw), np.cos(yaw), 0 * yaw], 1)
    right = np.stack([np.cos(yaw), -np.sin(yaw), 0 * yaw], 1)
    up = np.array(UP)
    forward = np.cos(pitch)[:, None] * ahead + np.sin(pitch)[:, None] * up
    return np.stack([right, np.cross(forward, right), forward], axis=2)


def test_yaw_right_and_pitch_up_are_positive() -> None:
    r = look([0, 10, 10], [0, 0, 5])
    assert turn(r[:-1], r[1:], UP) == pytest.approx(np.array([[10, 0], [0, 5]]))
    assert turn(r[:-1], r[1:], None) == pytest.approx(np.array([[10, 0], [0, 5]]))


def test_steps_over_the_seam_of_180_degrees_stay_small() -> None:
    r = look([-179, 179, -178, 178], [0, 0, 0, 0])
    assert turn(r[:-1], r[1:], UP)[:, 0] == pytest.approx([-2, 3, -4])


def test_a_yaw_sweep_looking_almost_straight_up_is_read_exactly() -> None:
    yaw = np.linspace(0, 350, 176)
    r = look(yaw, np.full(176, 89.5))
    steps = turn(r[:-1], r[1:], UP)
    assert steps[:, 0] == pytest.approx(np.full(175, 2.0), abs=1e-9)
    assert steps[:, 1] == pytest.approx(np.zeros(175), abs=1e-9)


def test_a_total_turn_of_1080_degrees_is_kept_by_the_sum_of_steps() -> None:
    yaw = np.linspace(0, 1080, 541)
    r = look(yaw, 20 * np.sin(np.radians(yaw)))
    steps = turn(r[:-1], r[1:], UP)
    assert steps[:, 0].sum() == pytest.approx(1080)
    assert steps[:, 1].sum() == pytest.approx(0, abs=1e-9)


@given(
    st.floats(-179, 179), st.floats(-89, 89), st.floats(-170, 170), st.floats(-80, 80), st.integers(0, 2**31)
)
@settings(max_examples=80)
def test_turn_does_not_depend_on_the_world_axes(
    yaw: float, pitch: float, dyaw: float, dpitch: float, seed: int
) -> None:
    a, b = look([yaw], [pitch]), look([yaw + dyaw], [pitch + dpitch])
    world = Rotation.random(rng=np.random.default_rng(seed)).as_matrix()
    x, y, z = (world @ np.array(UP)).tolist()
    got = turn(world @ a, world @ b, (x, y, z))
    assert got == pytest.approx(np.array([[dyaw, dpitch]]), abs=1e-6)


def test_an_unknown_pose_gives_an_unknown_turn() -> None:
    r = look([0, 10, 20], [0, 0, 0])
    r[1] = np.nan
    assert np.isnan(turn(r[:-1], r[1:], UP)).all()


def _track(rotation: np.ndarray, valid: list[bool]) -> PoseTrack:
    return PoseTrack(rotation, np.zeros((len(valid), 3)), np.array(valid), Scale.UNKNOWN, "test")


def test_a_track_refuses_mirrors_shears_and_uncleared_rows() -> None:
    r = look([0.0], [0.0])
    with pytest.raises(ValueError, match="mirror"):
        _track(r * np.array([1, 1, -1]), [True])
    with pytest.raises(ValueError, match="orthonormal"):
        _track(r * 2, [True])
    with pytest.raises(ValueError, match="NaN"):
        _track(r, [False])
    with pytest.raises(ValueError, match="finite"):
        _track(r * np.nan, [True])
    with pytest.raises(ValueError, match=r"\[2,3,3\]"):
        _track(r, [True, True])

"""Visual odometry: real spans against the engine's truth, synthetic worlds against what was put in."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest

from pipeline.frames import frame_pass
from pipeline.pose.focal import Camera, find_turns, pool
from pipeline.pose.tracks import EMPTY, STEPS_PER_PIXEL, Tracker, Tracks
from pipeline.pose.vo import Doubt, Steps, overlay, solve, window_track
from pipeline.pose.vo_fit import Look, rotation
from schemas.pose import Scale, turn
from schemas.quality import Unknown
from schemas.timeline import Span

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared/data/footage"))
DOOM = Camera(0.375, Look.SHEAR, 1.2)


@functools.cache
def tracked(name: str) -> Tracks:
    cv2.setNumThreads(1)
    tracker = Tracker()
    frame_pass(FOOTAGE / f"{name}.mp4", [tracker])
    return tracker.tracks()


def cut(tracks: Tracks, start: int, stop: int) -> Tracks:
    part = slice(start, stop)
    return Tracks(tracks.at[part], tracks.linked[part], tracks.repeat[part], tracks.width, tracks.height)


def truth(name: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    rows = pd.read_csv(FOOTAGE / f"{name}.truth.csv")[start : stop - 1]
    return rows["d_yaw_right_deg"].to_numpy(), rows["d_pitch_up_deg"].to_numpy()


def holds(steps: Steps, yaw: np.ndarray, valid: float, median: float, p95: float) -> None:
    ok = steps.valid
    error = np.abs(steps.yaw_deg - yaw)[ok]
    assert ok.mean() >= valid
    assert np.median(error) <= median
    assert np.percentile(error, 95) <= p95
    assert (error > 2).mean() <= 0.01
    assert np.corrcoef(steps.yaw_deg[ok], yaw[ok])[0, 1] >= 0.99


# --- real footage -----------------------------------------------------------------------------------------


def test_keys_of_a_game_whose_focal_length_was_never_told() -> None:
    tracks = tracked("nav05_keys_deathmatch")
    found = pool([find_turns(tracks)])
    assert found.camera is not None
    assert found.camera.focal * 640 == pytest.approx(240, rel=0.015)
    assert found.n >= 40 and found.mad < 0.02
    yaw, _ = truth("nav05_keys_deathmatch", 0, 300)
    holds(solve(cut(tracks, 0, 300), found.camera), yaw, valid=0.95, median=0.06, p95=0.4)


@pytest.mark.soak  # 9 s
def test_mouse_with_a_picture_that_slides_when_looking_up() -> None:
    tracks = cut(tracked("nav01_mouse_map01"), 200, 500)
    yaw, pitch = truth("nav01_mouse_map01", 200, 500)
    steps = solve(tracks, DOOM)
    holds(steps, yaw, valid=0.95, median=0.07, p95=0.45)
    assert np.abs(pitch).max() > 0.5
    assert np.median(np.abs(steps.pitch_deg - pitch)[steps.valid]) < 0.06
    looks = steps.valid & (np.abs(pitch) > 0.3)
    assert np.median(steps.pitch_deg[looks] / pitch[looks]) == pytest.approx(1, abs=0.1)


def test_true_perspective_with_bare_walls() -> None:
    yaw, _ = truth("nav12_miniworld_fourrooms", 0, 300)
    camera = Camera(311.77 / 640, Look.TILT)
    holds(solve(cut(tracked("nav12_miniworld_fourrooms"), 0, 300), camera), yaw, 0.98, 0.04, 0.25)


@pytest.mark.soak  # 10 s
def test_a_status_bar_is_found_and_does_not_hold_the_camera_still() -> None:
    tracks = tracked("bad03_hud")
    at, to, known = tracks.steps()
    hidden = overlay(at, to, known, 0.25 / tracks.width)
    row = tracks.at[:-1, :, 1] / STEPS_PER_PIXEL
    bar = known & (row > 332)  # the bar covers the lowest 28 rows
    assert hidden[bar].mean() > 0.9
    assert hidden[known & (row < 250)].mean() < 0.02
    yaw, _ = truth("bad03_hud", 0, 560)
    holds(solve(tracks, DOOM), yaw, valid=0.9, median=0.08, p95=0.6)


def test_a_frozen_picture_is_no_motion_and_says_so() -> None:
    steps = solve(tracked("bad05_frozen_140_245"), DOOM)
    frozen = slice(140, 244)
    assert steps.repeat[frozen].mean() > 0.7  # the encoder refines the still picture now and then
    assert np.nanmax(np.abs(steps.yaw_deg[frozen])) < 0.02
    assert not steps.direction[frozen][steps.repeat[frozen]].any()
    assert not steps.repeat[245:300].any()


def test_same_bytes_on_rerun() -> None:
    tracks = cut(tracked("nav05_keys_deathmatch"), 300, 400)
    one, two = solve(tracks, DOOM), solve(tracks, DOOM)
    for name in ("yaw_deg", "pitch_deg", "roll_deg", "direction", "pitch_at_deg", "sigma_deg", "agree"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
    again = Tracker()
    frame_pass(FOOTAGE / "bad05_frozen_140_245.mp4", [again])
    assert again.tracks().at.tobytes() == tracked("bad05_frozen_140_245").at.tobytes()


# --- synthetic worlds -------------------------------------------------------------------------------------

WIDTH, HEIGHT, FOCAL = 640, 360, 0.5


def world(
    turns: np.ndarray, travels: np.ndarray, cloud: np.ndarray, outliers: float = 0.0, noise_px: float = 0.1
) -> Tracks:
    """Tracks of a cloud of points [P, 3] seen by a camera that turns by rotation vectors [S, 3] (radians) and
    then moves by travels [S, 3] in its own axes."""
    rng = np.random.default_rng(7)
    frames = len(turns) + 1
    facing, position = np.eye(3), np.zeros(3)
    at = np.full((frames, len(cloud), 2), EMPTY)
    seen = np.zeros((frames, len(cloud)), bool)
    for k in range(frames):
        if k:
            facing = facing @ rotation(turns[k - 1 : k])[0]
            position = position + facing @ travels[k - 1]
        p = (cloud - position) @ facing
        pixel = p[:, :2] / np.where(p[:, 2:] > 0.1, p[:, 2:], np.nan) * FOCAL * WIDTH
        pixel += (np.array([WIDTH, HEIGHT]) - 1) / 2 + rng.normal(0, noise_px, pixel.shape)
        wrong = rng.random(len(cloud)) < outliers / 2  # spoils the step before and the step behind
        pixel[wrong] += rng.uniform(-30, 30, (wrong.sum(), 2))
        seen[k] = (pixel > 1).all(1) & (pixel[:, 0] < WIDTH - 2) & (pixel[:, 1] < HEIGHT - 2)
        at[k, seen[k]] = np.rint(pixel[seen[k]] * STEPS_PER_PIXEL).astype(np.uint16)
    linked = seen.copy()
    linked[1:] &= seen[:-1]
    linked[0] = False
    return Tracks(at, linked, np.zeros(frames, bool), WIDTH, HEIGHT)


def around(count: int = 500) -> np.ndarray:
    rng = np.random.default_rng(3)
    angle, far = rng.uniform(-np.pi, np.pi, count), rng.uniform(3, 25, count)
    return np.stack([far * np.sin(angle), rng.uniform(-0.6, 0.6, count) * far, far * np.cos(angle)], 1)


YAW = np.radians(2.5 * np.sin(np.arange(40) / 6))


def turning(roll: float = 0.0) -> np.ndarray:
    return np.stack([0.3 * YAW[::-1], YAW, roll * YAW], 1)


def test_pure_rotation_is_a_turn_without_travel() -> None:
    tracks = world(turning(0.2), np.zeros((40, 3)), around())
    steps = solve(tracks, Camera(FOCAL, Look.TILT))
    assert steps.valid.all()
    assert np.abs(steps.yaw_deg - np.degrees(YAW)).max() < 0.03
    assert np.abs(steps.pitch_deg - 0.3 * np.degrees(YAW[::-1])).max() < 0.03
    assert np.abs(steps.roll_deg - 0.2 * np.degrees(YAW)).max() < 0.05
    assert not steps.direction.any()


def test_forward_motion_over_a_dominant_plane() -> None:
    rng = np.random.default_rng(5)
    floor = np.stack([rng.uniform(-12, 12, 700), np.full(700, 1.5), rng.uniform(1, 30, 700)], 1)
    travels = np.tile([0.0, 0.0, 0.15], (40, 1))
    turns = np.stack([0 * YAW, YAW / 4, 0 * YAW], 1)
    steps = solve(world(turns, travels, floor), Camera(FOCAL, Look.TILT))
    assert np.abs(steps.yaw_deg - np.degrees(YAW / 4))[steps.valid].max() < 0.15
    assert steps.valid.mean() > 0.9
    assert np.median(steps.direction[:, 2]) > 0.98


def test_three_points_in_ten_are_wrong() -> None:
    travels = np.tile([0.1, 0.0, 0.2], (40, 1))
    steps = solve(world(turning(), travels, around(), outliers=0.3), Camera(FOCAL, Look.TILT))
    assert steps.valid.mean() > 0.95
    assert np.abs(steps.yaw_deg - np.degrees(YAW))[steps.valid].max() < 0.15
    heading = np.array([0.1, 0, 0.2]) / np.hypot(0.1, 0.2)
    assert np.median(steps.direction @ heading) > 0.99


def test_a_cut_is_few_points_and_ends_the_window() -> None:
    tracks = world(turning(), np.tile([0.0, 0, 0.1], (40, 1)), around())
    tracks.linked[21] = False
    steps = solve(tracks, Camera(FOCAL, Look.TILT))
    assert [k for k, d in enumerate(steps.doubt) if d] == [20]
    assert steps.doubt[20] is Doubt.FEW_POINTS and np.isnan(steps.yaw_deg[20])
    track = window_track(steps, Span(0, 41))
    assert track.valid[:21].all() and not track.valid[21:].any()
    assert window_track(steps, Span(21, 41)).valid.all()


def test_no_points_no_answer() -> None:
    nothing = Tracks(np.full((5, 9, 2), EMPTY), np.zeros((5, 9), bool), np.zeros(5, bool), 640, 360)
    steps = solve(nothing, DOOM)
    assert set(steps.doubt) == {Doubt.FEW_POINTS} and np.isnan(steps.yaw_deg).all()
    found = pool([find_turns(nothing)])
    assert found.camera is None and found.reason is Unknown.UNCALIBRATED


def test_a_window_keeps_the_project_convention() -> None:
    """Yaw right and pitch up positive, travel forward along +z of the camera, first frame the world."""
    turns = np.tile(np.radians([0.0, 1.5, 0.0]), (40, 1))
    tracks = world(turns, np.tile([0.0, 0, 0.2], (40, 1)), around())
    steps = solve(tracks, Camera(FOCAL, Look.TILT))
    track = window_track(steps, Span(5, 30))
    assert track.scale is Scale.UNKNOWN and track.valid.all()
    assert np.allclose(track.rotation[0], np.eye(3)) and not track.translation[0].any()
    assert np.allclose(turn(track.rotation[:-1], track.rotation[1:], None)[:, 0], 1.5, atol=0.1)
    forward = np.einsum("ni,ni->n", np.diff(track.translation, axis=0), track.rotation[1:, :, 2])
    assert (forward > 0.97).all()


def test_a_window_of_a_sliding_picture_knows_up_and_looks_where_the_player_looks() -> None:
    steps = solve(cut(tracked("nav01_mouse_map01"), 200, 350), DOOM)
    track = window_track(steps, Span(0, 150))
    yaw, pitch = truth("nav01_mouse_map01", 200, 350)
    both = track.valid[1:] & track.valid[:-1]
    got = turn(track.rotation[:-1], track.rotation[1:], track.up)[both]
    assert np.median(np.abs(got[:, 0] - yaw[both])) < 0.07
    assert np.median(np.abs(got[:, 1] - pitch[both])) < 0.06
    assert np.isnan(track.rotation[~track.valid]).all()


@pytest.mark.soak  # 7 s
def test_focal_length_of_a_synthetic_camera() -> None:
    yaw = np.radians(3.0) * np.sign(np.sin(np.arange(40) / 5 + 0.1))
    turns = np.stack([0 * yaw, yaw, 0 * yaw], 1)
    found = pool([find_turns(world(turns, np.zeros((40, 3)), around()))])
    assert found.camera is not None and found.focal == pytest.approx(FOCAL, rel=0.005)

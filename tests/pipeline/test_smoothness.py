"""Smoothness: real footage against its truth, then turns and captures whose faults were put in."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
from scipy.spatial.transform import Rotation

from pipeline.frames import frame_pass
from pipeline.media import MediaTable, Probe
from pipeline.pose.tracks import Tracker
from pipeline.quality.motion import Motion, motion, picture_shift
from pipeline.quality.smoothness import Smoothness, smoothness
from schemas.clip import FrameTable
from schemas.pose import PoseTrack, Scale
from schemas.quality import SMOOTHNESS_RAWS
from schemas.timeline import Span, windows

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared/data/footage"))
CLEAN = sorted(
    p.name.removesuffix(".truth.csv")
    for kind in ("nav", "loop", "nonloop", "odd_long", "event07", "bad03")
    for p in FOOTAGE.glob(f"{kind}*.truth.csv")
)


def table(change: Sequence[float] | np.ndarray, rate: int, repeat: np.ndarray | None = None) -> MediaTable:
    n = len(change)
    frames = FrameTable(
        time_base=Fraction(1, rate * 512),
        pts=np.arange(n, dtype=np.int64) * 512,
        source_index=np.arange(n, dtype=np.int64),
        pixels=np.arange(n, dtype=np.uint64),
        ok=np.ones(n, np.bool_),
        repeat=np.zeros(n, np.bool_) if repeat is None else repeat,
    )
    return MediaTable(frames, np.asarray(change, np.float32), {})


def track(yaw_deg: np.ndarray, pitch_deg: np.ndarray | None = None, **extra: object) -> PoseTrack:
    """Poses that look along these angles, one a frame."""
    pitch = np.zeros_like(yaw_deg) if pitch_deg is None else pitch_deg
    n = len(yaw_deg)
    rotation = Rotation.from_euler("YX", np.stack([yaw_deg, pitch], 1), degrees=True).as_matrix()
    given = {"translation": np.zeros((n, 3)), "valid": np.ones(n, np.bool_), "scale": Scale.UNKNOWN} | extra
    return PoseTrack(rotation=rotation, estimator="test", up=(0.0, -1.0, 0.0), **given)  # type: ignore[arg-type]


def steps(per_frame: np.ndarray, rate: int = 35, cut: np.ndarray | None = None) -> Motion:
    """Motion of a camera that turns this many degrees from frame to frame, in pictures that show it."""
    yaw = np.concatenate([[0.0], np.cumsum(per_frame)])
    change = np.concatenate([[0.0], np.abs(per_frame) * 2])
    return motion(table(change, rate), track(yaw), cut)


def scores(clip: Motion) -> list[Smoothness]:
    n = len(clip.seconds)
    return [smoothness(clip, s.start, s.stop) for s in windows(n).spans or (Span(0, n),)]


def median(clip: Motion) -> float:
    return float(np.median([s.score for s in scores(clip) if s.score is not None]))


# --- real footage -----------------------------------------------------------------------------------------


def true_motion(name: str) -> Motion:
    """The clip's own turns, in pictures that always change: what the poses alone say."""
    rows = pd.read_csv(FOOTAGE / f"{name}.truth.csv")
    yaw = np.concatenate([[0.0], rows["d_yaw_right_deg"].to_numpy()[:-1].cumsum()])
    pitch = np.concatenate([[0.0], rows["d_pitch_up_deg"].to_numpy()[:-1].cumsum()])
    rate = 35 if "fps" not in rows else int(rows["fps"][0])
    return motion(table(np.full(len(rows), 5.0), rate), track(yaw, pitch), None)


def test_mouse_and_key_turns_are_smooth_and_random_jumps_are_last_by_far(footage: Path) -> None:
    clean = {name: scores(true_motion(name)) for name in CLEAN}
    assert len(clean) >= 15
    worst = max(s.raw["shake"] for found in clean.values() for s in found if s.raw["shake"] is not None)
    jitter = scores(true_motion("bad01_jitter"))
    assert worst < 0.05
    assert all(s.raw["shake"] > 10 * worst and s.by == "shake" for s in jitter)
    assert min(np.median([s.score for s in found]) for found in clean.values()) > 0.95
    assert max(s.score for s in jitter) < 0.2


@functools.cache
def seen(name: str, *more: type[Tracker]) -> tuple[MediaTable, Tracker | None]:
    """The frame table of a whole clip, decoded once, and its points where they were asked for."""
    cv2.setNumThreads(1)
    probe, tracker = Probe(), more[0]() if more else None
    decoded = frame_pass(FOOTAGE / f"{name}.mp4", [probe, *([tracker] if tracker else [])])
    frames = FrameTable(
        time_base=decoded.report.stream.time_base,
        pts=decoded.pts - decoded.pts[0],
        source_index=np.arange(len(decoded)),
        pixels=decoded.pixels,
        ok=decoded.ok,
        repeat=decoded.repeat,
    )
    return probe.table(decoded, frames), tracker


def test_where_the_camera_is_unknown_the_points_tell_jumps_from_turns(footage: Path) -> None:
    """The same from the pictures alone: how the followed points move on the screen."""
    found = {}
    for name in ("event03_kill_zombieman", "bad01_jitter"):
        pictures, tracker = seen(name, Tracker)
        found[name] = scores(motion(pictures, None, None, picture_shift(tracker.tracks())))
    turns, jitter = found.values()
    assert all(s.motion_by == "points" and s.raw["jerk_deg_s3"] is None for s in turns + jitter)
    assert all(s.score > 0.9 for s in turns)
    assert all(s.score < 0.2 and s.by == "shake" for s in jitter)


def test_a_frozen_run_is_named_with_its_frames(footage: Path) -> None:
    pictures, _ = seen("bad05_frozen_140_245")
    found = scores(motion(pictures, None, None))
    assert [s.by for s in found] == ["frozen", "frozen", "stutter"]
    frozen = found[1]
    # Frames 140 to 244 show what frame 139 shows.
    assert (frozen.raw["frozen_start"], frozen.raw["frozen_stop"]) == (140, 245)
    assert frozen.raw["frozen_share"] == pytest.approx(105 / 150)
    assert frozen.score < 0.4
    whole = smoothness(motion(pictures, None, None), 0, len(pictures.frames))
    assert (whole.raw["frozen_start"], whole.raw["frozen_stop"]) == (139, 245)


def test_every_picture_shown_three_times_is_a_stutter(footage: Path) -> None:
    pictures, _ = seen("bad07_duplicated_x3")
    for found in scores(motion(pictures, None, None)):
        assert found.by == "stutter" and found.score < 0.05
        assert found.raw["held_share"] > 0.5


def test_players_who_stop_are_not_frozen(footage: Path) -> None:
    pictures, _ = seen("nav05_keys_deathmatch")
    first = smoothness(motion(pictures, None, None), 0, 150)
    assert first.raw["still_share"] > 0.15 and first.raw["frozen_share"] == 0.0


# --- turns ------------------------------------------------------------------------------------------------


def turn(rate: int, seconds: float = 5.0) -> np.ndarray:
    """Degrees a frame of one hand's turn: three swings, some with a sharp end, sampled at a rate."""
    at = np.arange(0, seconds, 1 / 480)
    speed = 90 * np.sin(2 * np.pi * 0.6 * at) + np.where((at > 1.5) & (at < 2.5), 120.0, 0.0)
    yaw = np.concatenate([[0.0], np.cumsum(speed) / 480])
    return np.diff(yaw[:: 480 // rate])


def test_one_turn_gives_one_figure_at_30_and_60_frames_a_second() -> None:
    at30, at60 = steps(turn(30), 30), steps(turn(60), 60)
    a, b = smoothness(at30, 0, len(at30.seconds)), smoothness(at60, 0, len(at60.seconds))
    assert a.score == pytest.approx(b.score, rel=0.05)
    assert a.raw["jerk_deg_s3"] == pytest.approx(b.raw["jerk_deg_s3"], rel=0.05)


def test_jitter_gives_one_figure_at_30_and_60_frames_a_second() -> None:
    draw = np.random.default_rng(0)
    at30 = draw.uniform(1, 8, 150) * draw.choice([-1, 1], 150)
    a = smoothness(steps(at30, 30), 0, 151)
    b = smoothness(steps(np.repeat(at30 / 2, 2), 60), 0, 301)
    assert a.by == b.by == "shake" and a.raw["shake"] > 0.3
    assert a.raw["shake"] == pytest.approx(b.raw["shake"], rel=0.05)


def keys() -> np.ndarray:
    """Turn keys of a game that ramps: 1.76 for 5 frames, 3.5, then 7 with run; square starts and stops."""
    press = [1.758] * 5 + [3.516] * 20 + [7.031] * 15
    rest = [0.0] * 10
    return np.array((press + rest + [-v for v in press] + rest) * 2)


def flick() -> np.ndarray:
    """A fast honest mouse turn: 180 degrees in 6 frames, between slow looks around."""
    slow = 2 * np.sin(np.arange(72) / 8)
    return np.concatenate([slow, [10.0, 35.0, 55.0, 45.0, 25.0, 10.0], -slow])


@pytest.mark.parametrize("per_frame", [keys(), flick(), np.full(149, 4.0), turn(30)])
def test_honest_turns_are_smooth_whatever_their_size(per_frame: np.ndarray) -> None:
    found = smoothness(steps(per_frame), 0, len(per_frame) + 1)
    assert found.score > 0.95
    assert found.raw["shake"] < 0.05


@pytest.mark.parametrize("size", [1.0, 3.0, 8.0])
def test_shake_upon_a_turn_is_found(size: float) -> None:
    shaken = turn(30) + np.random.default_rng(1).uniform(-size, size, len(turn(30)))
    found = smoothness(steps(shaken, 30), 0, len(shaken) + 1)
    still = smoothness(steps(turn(30), 30), 0, len(shaken) + 1)
    assert found.by == "shake" and found.raw["shake"] > still.raw["shake"] + 0.02 * size


def test_turns_past_180_and_near_the_pole_are_smooth() -> None:
    yaw = np.cumsum(np.full(200, 7.0))  # 1,400 degrees
    level = motion(table(np.full(200, 5.0), 35), track(yaw), None)
    up = motion(table(np.full(200, 5.0), 35), track(np.cumsum(np.full(200, 1.0)), np.full(200, 89.5)), None)
    assert smoothness(level, 0, 200).score > 0.99
    assert smoothness(up, 0, 200).score > 0.99


def test_travel_is_judged_where_it_is_in_metres() -> None:
    speed = np.concatenate([np.linspace(0, 0.3, 20), np.full(130, 0.3)])
    jumps = speed + np.random.default_rng(2).uniform(-0.3, 0.3, 150)
    position = {
        name: np.stack([np.zeros(150), np.zeros(150), np.cumsum(s)], 1)
        for name, s in (("walk", speed), ("jumps", jumps))
    }

    def judged(name: str, scale: Scale) -> Smoothness:
        poses = track(np.zeros(150), translation=position[name], scale=scale)
        return smoothness(motion(table(np.full(150, 5.0), 30), poses, None), 0, 150)

    assert judged("walk", Scale.METRE).score > 0.95
    assert judged("jumps", Scale.METRE).by == "travel" and judged("jumps", Scale.METRE).score < 0.7
    assert judged("jumps", Scale.UNKNOWN).raw["travel_shake"] is None


# --- captures ---------------------------------------------------------------------------------------------


def capture(shown: Sequence[int], per_frame: np.ndarray, exact: bool = True) -> Motion:
    """A capture that shows these frames of a turning game: the same one again is a repeat."""
    yaw = np.concatenate([[0.0], np.cumsum(per_frame)])[list(shown)]
    moved = np.diff(np.asarray(shown)) > 0
    change = np.concatenate(
        [[0.0], np.where(moved, 5.0 * np.diff(np.asarray(shown)), 0.0 if exact else 0.02)]
    )
    repeat = np.concatenate([[False], ~moved]) if exact else None
    return motion(table(change, 35, repeat), track(yaw), None)


DROPPED = [*range(61), 60, 60, *(k for k in range(61, 150) if k != 90)]
"""Frame 60 repeated twice and frame 90 lost."""


@pytest.mark.parametrize("exact", [True, False])
def test_repeats_in_a_turn_are_a_stutter_and_no_stop(exact: bool) -> None:
    found = smoothness(capture(DROPPED, np.full(150, 7.0), exact), 0, len(DROPPED))
    assert found.by == "stutter" and 0.5 < found.score < 0.95
    assert (found.raw["stutters"], found.raw["skips"]) == (2, 1)
    assert found.raw["still_share"] == 0.0
    assert found.raw["repeat_share"] == pytest.approx(2 / len(DROPPED) if exact else 0.0)
    # Neither the repeats nor the step of twice the rate behind them count as shaking.
    assert found.raw["shake"] < 0.02


def test_the_more_frames_repeat_the_lower_the_score() -> None:
    def every(step: int) -> float:
        shown = [k - (k % step == step - 1) for k in range(150)]
        return smoothness(capture(shown, np.full(150, 4.0)), 0, 150).score

    assert every(40) > every(20) > every(10) > every(4) > every(2)
    assert every(2) < 0.05


def test_a_swing_back_through_rest_is_no_stutter() -> None:
    per_frame = 3 * np.sin(np.arange(150) / 10)
    per_frame[[31, 62]] = 0.0
    found = smoothness(steps(per_frame), 0, 151)
    assert found.raw["stutters"] == 0 and found.score > 0.95


def test_uneven_frame_times_lower_the_score() -> None:
    even = table(np.full(150, 5.0), 30)
    pts = even.frames.pts.copy()
    pts[1::2] += 300  # frames come in pairs
    uneven = FrameTable(
        even.frames.time_base,
        pts,
        even.frames.source_index,
        even.frames.pixels,
        even.frames.ok,
        even.frames.repeat,
    )
    found = smoothness(motion(MediaTable(uneven, even.change, {}), None, None), 0, 150)
    assert found.by == "timing" and found.score < 0.5


def test_source_frames_that_a_working_copy_leaves_out_are_skips() -> None:
    even = table(np.full(150, 5.0), 30)
    source = np.arange(150) + (np.arange(150) >= 40) * 2
    frames = FrameTable(
        even.frames.time_base,
        even.frames.pts,
        source,
        even.frames.pixels,
        even.frames.ok,
        even.frames.repeat,
    )
    found = smoothness(motion(MediaTable(frames, even.change, {}), None, None), 0, 150)
    assert found.raw["skips"] == 1 and found.raw["stutter_share"] == pytest.approx(2 / 149)


def test_a_hard_cut_inside_speaks_and_one_at_the_start_does_not() -> None:
    cut = np.zeros(300, np.bool_)
    cut[150] = True
    clip = steps(np.full(299, 2.0), cut=cut)
    assert smoothness(clip, 100, 250).by == "cut"
    assert smoothness(clip, 100, 250).score <= 0.2
    assert smoothness(clip, 150, 300).raw["cuts"] == 0


# --- what cannot be known ---------------------------------------------------------------------------------


def test_unknown_parts_are_named_and_their_measures_empty() -> None:
    found = smoothness(motion(table(np.full(150, 5.0), 30), None, None), 0, 150)
    assert found.unknown == ("shake", "travel", "cut")
    assert all(found.raw[name] is None for name in ("shake", "travel_shake", "jerk_deg_s3", "cuts"))
    assert found.by == "stutter"
    assert list(found.raw) == list(SMOOTHNESS_RAWS)


def test_one_teleport_or_blunder_is_no_shaking() -> None:
    per_frame = np.full(149, 1.0)
    per_frame[70] = 90.0
    assert smoothness(steps(per_frame), 0, 150).raw["shake"] < 0.02


def test_few_known_poses_say_nothing() -> None:
    yaw, valid = np.cumsum(np.full(150, 2.0)), np.zeros(150, np.bool_)
    valid[:40] = True
    poses = track(yaw)
    known = PoseTrack(
        np.where(valid[:, None, None], poses.rotation, np.nan),
        np.where(valid[:, None], poses.translation, np.nan),
        valid,
        Scale.UNKNOWN,
        "test",
    )
    assert "shake" in smoothness(motion(table(np.full(150, 5.0), 30), known, None), 0, 150).unknown


def test_rates_are_not_taken_across_worlds() -> None:
    yaw = np.cumsum(np.full(150, 2.0))
    world = np.arange(150) // 10
    yaw += 90 * world
    pictures = table(np.full(150, 5.0), 30)
    one, two = (smoothness(motion(pictures, track(yaw, world=w), None), 0, 150) for w in (None, world))
    assert one.raw["shake"] > 0.05 and two.raw["shake"] == 0.0


def test_a_world_at_rest_and_a_single_frame_have_no_score() -> None:
    rest = smoothness(motion(table(np.zeros(150), 30, np.arange(150) > 0), None, None), 0, 150)
    assert rest.score is None and rest.by == "" and rest.raw["still_share"] == 1.0
    assert smoothness(motion(table([0.0], 30), None, None), 0, 1).score is None


def test_a_short_clip_is_one_window() -> None:
    found = smoothness(steps(np.full(52, 3.0)), 0, 53)
    assert found.score > 0.99


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="100 frames, but"):
        motion(table(np.zeros(100), 30), track(np.zeros(99)), None)
    with pytest.raises(ValueError, match="outside"):
        smoothness(steps(np.zeros(99)), 0, 150)

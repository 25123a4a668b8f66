"""Windows joined to one track: real telemetry first, then worlds whose truth is known. spec/faults.md P*."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy.spatial.transform import Rotation

from benchmarks.stitch import World, see, total_error, walk
from pipeline.pose.align import (
    KEEP,
    OPEN,
    SpanMismatch,
    align_rotation,
    align_scale,
    align_translation,
)
from pipeline.pose.stitch import MOST_SCALE, stitch
from schemas.pose import PoseTrack, Scale, turn
from schemas.stitch import SeamReason, SeamVerdict, Stitched, WindowTrack
from schemas.timeline import Span, windows

Floats = npt.NDArray[np.float64]
EYE = np.eye(3)


def track(rotation: Floats, translation: Floats, scale: Scale = Scale.UNKNOWN) -> PoseTrack:
    return PoseTrack(rotation, translation, np.ones(len(rotation), np.bool_), scale, "synthetic")


def yaw(degrees: npt.ArrayLike) -> Floats:
    """Camera-to-world of turns to the right (+y is down)."""
    out: Floats = Rotation.from_rotvec(np.outer(degrees, [0, 1, 0]), degrees=True).as_matrix()
    return out


def blank(window: WindowTrack, rows: slice) -> WindowTrack:
    t = window.track
    valid = t.valid.copy()
    valid[rows] = False
    rotation = np.where(valid[:, None, None], t.rotation, np.nan)
    translation = np.where(valid[:, None], t.translation, np.nan)
    return replace(window, track=replace(t, rotation=rotation, translation=translation, valid=valid))


def steps(out: Stitched) -> Floats:
    """float64 [F-1]: step lengths inside a segment, NaN across segments."""
    lengths = np.linalg.norm(np.diff(out.track.translation, axis=0), axis=1)
    return np.where((out.segment[1:] == out.segment[:-1]) & (out.segment[1:] >= 0), lengths, np.nan)


def join_noise(ratio: float, seed: int, gate_open: bool = False) -> float | None:
    """Scale of one overlap of 10 steps forward, true scale 2; step / noise = ratio on both sides."""
    rng = np.random.default_rng([seed, int(1000 * ratio)])
    path = np.outer(np.arange(10), [0, 0, 1.0])
    left = track(yaw(np.zeros(10)), path + rng.normal(size=(10, 3)) / ratio)
    right = track(yaw(np.zeros(10)), (path + rng.normal(size=(10, 3)) / ratio) / 2)
    return align_scale(left, right, EYE, (0, 0), gate_open).estimate.value


# --- real paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", ["nav02_mouse_map02", "loop01_rewind_map02", "nav08_runkeys_map03"])
def test_a_real_path_seen_through_windows_comes_back(footage: Path, clip: str) -> None:
    """Telemetry, cut to windows, each in a world and a unit of its own, without noise: one segment a stretch
    that moves, the true turns everywhere, the true lengths inside a segment."""
    rows = pd.read_csv(footage / f"{clip}.truth.csv")
    angle = np.radians(rows["CAMERA_ANGLE"].to_numpy(np.float64))
    zero, one = np.zeros_like(angle), np.ones_like(angle)
    right = np.stack([np.sin(angle), -np.cos(angle), zero], axis=1)
    ahead = np.stack([np.cos(angle), np.sin(angle), zero], axis=1)
    rotation = np.stack([right, np.stack([zero, zero, -one], axis=1), ahead], axis=2)
    names = ["CAMERA_POSITION_X", "CAMERA_POSITION_Y", "CAMERA_POSITION_Z"]
    world = World(rotation, rows[names].to_numpy(np.float64), np.zeros(len(rows), np.bool_))
    views, units = see(world, np.random.default_rng(7), 0.0, turn_noise_deg=0.0)
    out = stitch(views, len(rows))
    assert out.track.valid.all()
    assert set(out.world.tolist()) == {0}
    truth = turn(rotation[:-1], rotation[1:], (0, 0, 1.0))[:, 0]
    rel = out.track.rotation[:-1].transpose(0, 2, 1) @ out.track.rotation[1:]
    assert np.degrees(Rotation.from_matrix(rel).magnitude()) == pytest.approx(np.abs(truth), abs=1e-5)
    lengths, true_lengths = steps(out), np.linalg.norm(np.diff(world.translation, axis=0), axis=1)
    for segment in range(out.segment.max() + 1):
        inside = (out.segment[1:] == segment) & np.isfinite(lengths)
        first = next(w.window for w in out.windows if w.segment == segment)
        assert lengths[inside] * units[first] == pytest.approx(true_lengths[inside], rel=1e-6, abs=1e-6)
    moves = [np.ptp(world.translation[s.start : s.stop], axis=0).max() > 0 for s in out.seams]
    assert [s.verdict is SeamVerdict.JOINED for s in out.seams] == moves


# --- scale (P1, P3) ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [3, 10, 100])
def test_the_scale_of_an_overlap_is_unbiased_above_the_gate(ratio: float) -> None:
    found = [join_noise(ratio, seed) for seed in range(300)]
    known = np.array([s for s in found if s is not None])
    assert len(known) > 290
    assert np.median(known) == pytest.approx(2, rel=0.012)


@pytest.mark.parametrize(("ratio", "most"), [(0.3, 0.01), (1, 0.25)])
def test_an_overlap_below_the_gate_gives_no_scale(ratio: float, most: float) -> None:
    found = [join_noise(ratio, seed) for seed in range(300)]
    assert sum(s is not None for s in found) <= most * 300


def test_the_gate_stays_open_longer_than_it_takes_to_open() -> None:
    closed = sum(join_noise(1.2, seed) is not None for seed in range(200))
    opened = sum(join_noise(1.2, seed, gate_open=True) is not None for seed in range(200))
    assert closed + 40 < opened
    assert OPEN < KEEP


@pytest.mark.parametrize("turning", [0.0, 4.0])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
@pytest.mark.parametrize("kind", list(Scale))
def test_a_still_overlap_joins_the_turn_and_declares_the_scale(
    turning: float, noise: float, kind: Scale
) -> None:
    """P1: identical poses, pure yaw, and both with noise; the camera walks everywhere else."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        path = walk(rng, 430, still=((139, 151), (279, 291)))
        heading = np.cumsum(np.where(path.still, turning, 1.0))
        ahead = np.stack([np.sin(np.radians(heading)), 0 * heading, np.cos(np.radians(heading))], axis=1)
        moved = np.cumsum(ahead * ~path.still[:, None], axis=0)
        world = World(yaw(heading), moved, path.still)
        views, _ = see(world, rng, noise, similarity=kind is Scale.UNKNOWN, turn_noise_deg=0.0, kind=kind)
        out = stitch(views, 430)
        assert {s.reason for s in out.seams} == {SeamReason.SCALE_UNOBSERVABLE}
        assert all(s.scale is None for s in out.seams)
        rel = out.track.rotation[:-1].transpose(0, 2, 1) @ out.track.rotation[1:]
        expected = np.where(path.still[1:], turning, 1.0)
        assert np.degrees(Rotation.from_matrix(rel).magnitude()) == pytest.approx(expected, abs=1e-4)
        if kind is Scale.METRE:
            assert {s.verdict for s in out.seams} == {SeamVerdict.SCALE_KEPT}
            assert set(out.segment.tolist()) == {0}
            assert np.array_equal(out.scale_kept, np.arange(430) >= out.seams[0].cut)
            assert out.track.translation == pytest.approx(world.translation, abs=1e-3)
        else:
            assert {s.verdict for s in out.seams} == {SeamVerdict.SCALE_BREAK}
            assert sorted(set(out.segment.tolist())) == [0, 1, 2, 3][: len(out.windows)]
            assert not out.scale_kept.any()
        assert np.linalg.norm(np.diff(out.track.translation[138:152], axis=0), axis=1).max() < 4


def test_motion_that_both_windows_misread_in_a_turn_on_the_spot_is_not_a_scale() -> None:
    """P1: the error lies in the pictures, so it agrees between the windows and no noise betrays it."""
    rng = np.random.default_rng(3)
    path = walk(rng, 290, still=((138, 152),))
    ghost = np.cumsum(np.where(path.still, 0.02, 0.0))[:, None] * np.array([1.0, 0, 0])
    world = replace(path, translation=path.translation + ghost)
    views, _ = see(world, rng, 0.0)
    assert stitch(views, 290).seams[0].reason is SeamReason.SCALE_UNOBSERVABLE


@pytest.mark.parametrize(
    ("ratio", "median", "bound"), [(3, 0.05, 0.60), (10, 0.02, 0.18), (100, 0.003, 0.018)]
)
def test_the_total_scale_of_a_minute_is_unbiased_and_its_spread_is_stated(
    ratio: float, median: float, bound: float
) -> None:
    errors, stated = [], []
    for seed in range(60):
        rng = np.random.default_rng([seed, ratio])
        views, units = see(walk(rng, 1800), rng, 1 / ratio)
        out = stitch(views, 1800)
        error = total_error(out, units)
        if error is None:
            continue
        errors.append(math.log1p(error))
        spread = out.windows[-1].scale_spread
        assert spread is not None
        stated.append(spread)
    assert len(errors) >= 58
    # The mean over 60 clips is itself only known to its standard error.
    assert abs(np.mean(errors)) < max(median, 2.5 * np.std(errors) / math.sqrt(60))
    assert np.abs(errors).max() < bound
    assert 0.75 < np.std(errors) / np.median(stated) < 1.3


@pytest.mark.parametrize(("share", "declared"), [(0.1, 0.03), (0.2, 0.25)])
def test_frames_thrown_off_do_not_move_the_join(share: float, declared: float) -> None:
    joined = total = 0
    for seed in range(12):
        rng = np.random.default_rng([seed, 5])
        views, units = see(walk(rng, 1800), rng, 0.01, share)
        for seam in stitch(views, 1800).seams:
            total += 1
            if seam.verdict is SeamVerdict.JOINED:
                joined += 1
                assert seam.scale == pytest.approx(units[seam.right] / units[seam.left], rel=0.02)
    assert joined >= (1 - declared) * total


@pytest.mark.parametrize("off", [10, 3000])
def test_a_frame_that_both_windows_got_wrong_is_not_a_scale(off: float) -> None:
    """A camera that stands, but for one frame that is so many noises off in both windows."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        still = np.zeros((10, 3))
        still[4, 2] = off
        left, right = (track(yaw(np.zeros(10)), (still + rng.normal(size=(10, 3))) / u) for u in (1, 2))
        assert align_scale(left, right, EYE, (0, 0), True).estimate.reason == SeamReason.SCALE_UNOBSERVABLE


def test_no_still_overlap_is_given_a_scale() -> None:
    """Half of the overlaps stand or turn on the spot, with noise and one frame in ten thrown off."""
    spans = windows(1800).spans
    stands = tuple((b.start - 1, a.stop + 1) for a, b in pairwise(spans))[::2]
    for seed in range(15):
        rng = np.random.default_rng([seed, 9])
        world = walk(rng, 1800, stands)
        for seam in stitch(see(world, rng, 0.1, 0.1)[0], 1800).seams:
            still = bool(world.still[seam.start : seam.stop].all())
            assert not (still and seam.scale is not None)
            assert seam.rotation_deg is not None


def test_overlaps_that_tell_different_stories_break() -> None:
    rng = np.random.default_rng(0)
    views, _ = see(walk(rng, 290), rng, 0.01)
    left, right = views
    shuffled = right.track.translation.copy()
    shuffled[:10] = rng.normal(size=(10, 3)) * 5
    lost = replace(right, track=replace(right.track, translation=shuffled))
    seam = stitch([left, lost], 290).seams[0]
    assert seam.verdict is SeamVerdict.SCALE_BREAK
    assert seam.reason in (SeamReason.POSITIONS_DISAGREE, SeamReason.SCALE_UNOBSERVABLE)
    spun = right.track.rotation.copy()
    spun[:10] = Rotation.random(10, rng=rng).as_matrix()
    out = stitch([left, replace(right, track=replace(right.track, rotation=spun))], 290)
    assert (out.seams[0].verdict, out.seams[0].reason) == (SeamVerdict.BREAK, SeamReason.ROTATION_JUMP)
    assert set(out.world.tolist()) == {0, 1}


def test_a_product_of_scales_that_runs_away_ends_the_segment() -> None:
    rng = np.random.default_rng(1)
    views, _ = see(walk(rng, 710), rng, 0.001, similarity=False)
    grown = [
        replace(w, track=replace(w.track, translation=w.track.translation / 4.0**i))
        for i, w in enumerate(views)
    ]
    out = stitch(grown, 710)
    assert [s.verdict for s in out.seams] == [SeamVerdict.JOINED] * 2 + [SeamVerdict.SCALE_BREAK, "joined"]
    assert out.seams[2].reason is SeamReason.SCALE_RUNAWAY
    assert all(1 / MOST_SCALE <= w.scale <= MOST_SCALE for w in out.windows if w.scale is not None)


def test_a_product_that_is_no_longer_known_ends_the_segment() -> None:
    """Thirty-two joins at a step of three noises add up to more than 30 %."""
    rng = np.random.default_rng(2)
    views, _ = see(walk(rng, 6500), rng, 1 / 2.2)
    out = stitch(views, 6500)
    assert SeamReason.SCALE_DRIFT in {s.reason for s in out.seams}
    assert all(w.scale_spread is not None and w.scale_spread <= 0.3 for w in out.windows)


# --- rotation and conventions (P7, P8) --------------------------------------------------------------------


def test_rotation_is_the_mean_of_the_orientations_that_agree() -> None:
    rng = np.random.default_rng(0)
    truth = Rotation.random(rng=rng).as_matrix()
    right = Rotation.random(10, rng=rng).as_matrix()
    noisy = Rotation.from_rotvec(rng.normal(0, 0.2, (10, 3)), degrees=True).as_matrix()
    left = noisy @ truth @ right
    left[:3] = Rotation.random(3, rng=rng).as_matrix()
    found = align_rotation(track(left, np.zeros((10, 3))), track(right, np.zeros((10, 3)))).value
    assert found is not None
    assert np.degrees(Rotation.from_matrix(found.matrix @ truth.T).magnitude()) < 0.25
    assert not found.agree[:3].any()
    assert found.agree[3:].sum() >= 6


@pytest.mark.parametrize("tilt", [0.0, 89.5])
def test_turns_stay_whole_over_seams_half_turns_and_steep_pitch(tilt: float) -> None:
    """P8: 1,080 degrees of yaw at pitch 0 and 89.5, through windows in worlds of their own."""
    frames, per_frame = 541, 2.0
    pitch = Rotation.from_euler("x", tilt, degrees=True).as_matrix()
    heading = np.arange(frames) * per_frame
    rotation = yaw(heading) @ pitch
    ahead = np.stack([np.sin(np.radians(heading)), 0 * heading, np.cos(np.radians(heading))], axis=1)
    world = World(rotation, np.cumsum(ahead, axis=0), np.zeros(frames, np.bool_))
    views, _ = see(world, np.random.default_rng(4), 0.001, turn_noise_deg=0.0)
    level = [replace(v, track=replace(v.track, up=tuple(v.track.rotation[0] @ rotation[v.span.start].T
             @ np.array([0.0, -1.0, 0.0])))) for v in views]  # fmt: skip
    out = stitch(level, frames)
    assert out.track.up is not None
    turns = turn(out.track.rotation[:-1], out.track.rotation[1:], out.track.up)
    assert turns[:, 0].sum() == pytest.approx(1080, abs=1e-3)
    assert np.abs(turns[:, 0] - per_frame).max() < 1e-3
    assert np.abs(turns[:, 1]).max() < 1e-3


def test_a_step_forward_and_a_turn_left_keep_their_signs() -> None:
    """P7: a camera at (1, 2, 3) looks along +x, walks forward and turns left by 1 degree a frame."""
    frames = 290
    left_turn = np.radians(np.arange(frames) * 1.0)
    ahead = np.stack([np.cos(left_turn), np.sin(left_turn), 0 * left_turn], axis=1)
    down = np.broadcast_to([0, 0, -1.0], (frames, 3))
    rotation = np.stack([np.cross(down, ahead), down, ahead], axis=2)
    position = np.array([1.0, 2, 3]) + np.concatenate([np.zeros((1, 3)), np.cumsum(ahead[:-1], axis=0)])
    world = World(rotation, position, np.zeros(frames, np.bool_))
    views, _ = see(world, np.random.default_rng(0), 0.0, similarity=False, turn_noise_deg=0.0)
    out = stitch([replace(v, track=replace(v.track, up=(0, 0, 1.0))) for v in views], frames)
    assert out.track.translation == pytest.approx(position, abs=1e-9)
    assert out.track.rotation == pytest.approx(rotation, abs=1e-9)
    step = np.diff(out.track.translation, axis=0)
    assert np.einsum("ni,ni->n", step, out.track.rotation[:-1, :, 2]) == pytest.approx(1, abs=1e-9)
    turns = turn(out.track.rotation[:-1], out.track.rotation[1:], out.track.up)
    assert turns == pytest.approx(np.tile([-1.0, 0.0], (frames - 1, 1)), abs=1e-6)


# --- whose pose, gaps, directions -------------------------------------------------------------------------


def test_each_frame_has_the_pose_of_one_window_and_a_gap_stays_a_gap() -> None:
    rng = np.random.default_rng(0)
    views, _ = see(walk(rng, 290), rng, 0.0, turn_noise_deg=0.0)
    left, right = views
    left = blank(blank(left, slice(60, 70)), slice(141, 143))
    right = blank(right, slice(6, 8))  # frames 146, 147
    out = stitch([left, right], 290)
    cut = out.seams[0].cut
    assert cut in (144, 145)
    assert not out.track.valid[60:70].any()
    assert (out.window[60:70] == -1).all()
    assert (out.segment[60:70] == -1).all()
    assert np.isnan(out.track.translation[60:70]).all()
    borrowed_right, borrowed_left = out.window[141:143], out.window[146:148]
    assert (borrowed_right == 1).all()
    assert (borrowed_left == 0).all()
    others = np.r_[0:60, 70:141, 143:cut]
    assert (out.window[others] == 0).all()
    assert (out.window[np.r_[cut:146, 148:290]] == 1).all()
    both = blank(right, slice(1, 3))  # frames 141, 142 are lost on both sides
    assert not stitch([left, both], 290).track.valid[141:143].any()


def test_frames_outside_all_windows_stay_unknown() -> None:
    rng = np.random.default_rng(0)
    views, _ = see(walk(rng, 430), rng, 0.0)
    out = stitch([views[0], views[2]], 430)
    assert out.seams[0].reason is SeamReason.NO_OVERLAP
    assert not out.track.valid[150:280].any()
    assert set(out.world[280:].tolist()) == {1}
    with pytest.raises(SpanMismatch, match="in order"):
        stitch(views[::-1], 430)
    with pytest.raises(SpanMismatch, match="ends at 430"):
        stitch(views, 429)
    with pytest.raises(SpanMismatch, match="overlap of 150"):
        align_translation(views[0].track, views[0].over(Span(0, 10)), EYE, 1.0)


def test_directions_without_lengths_join_their_turns_and_no_scale() -> None:
    rng = np.random.default_rng(0)
    world = walk(rng, 430)
    views, _ = see(world, rng, 0.0, similarity=False, turn_noise_deg=0.0)
    unit = []
    for view in views:
        step = np.diff(view.track.translation, axis=0)
        step /= np.linalg.norm(step, axis=1, keepdims=True)
        path = np.concatenate([np.zeros((1, 3)), np.cumsum(step, axis=0)])
        first = view.track.rotation[0].T
        unit.append(replace(view, lengths=False, track=track(first @ view.track.rotation, path @ first.T)))
    out = stitch(unit, 430)
    assert {s.verdict for s in out.seams} == {SeamVerdict.DIRECTIONS}
    assert all(s.scale is None for s in out.seams)
    assert (out.segment == -1).all()
    assert out.track.scale is Scale.UNKNOWN
    assert {w.scale for w in out.windows} == {None}
    step = np.diff(out.track.translation, axis=0)
    assert np.linalg.norm(step, axis=1) == pytest.approx(1, abs=1e-9)
    true_step = np.diff(world.translation, axis=0) @ world.rotation[0]
    true_step /= np.linalg.norm(true_step, axis=1, keepdims=True)
    assert step == pytest.approx(true_step, abs=1e-6)


@pytest.mark.parametrize("frames", [150, 285, 290, 295, 430, 435])
def test_every_frame_of_any_length_has_one_pose_and_reruns_are_equal(frames: int) -> None:
    """Back-aligned last windows overlap by up to 149 frames, and may reach into the window but one."""
    rng = np.random.default_rng(frames)
    world = walk(rng, frames)
    views, units = see(world, rng, 0.0, turn_noise_deg=0.0)
    out = stitch(views, frames)
    assert out.track.valid.all()
    assert len(out.windows) == len(windows(frames).spans)
    lengths = np.linalg.norm(np.diff(world.translation, axis=0), axis=1)
    assert steps(out) * units[0] == pytest.approx(lengths, rel=1e-6)
    again = stitch(views, frames)
    assert again.track.translation.tobytes() == out.track.translation.tobytes()
    assert (again.seams, again.windows) == (out.seams, out.windows)


def test_focal_lengths_of_both_sides_are_compared() -> None:
    rng = np.random.default_rng(0)
    left, right = see(walk(rng, 290), rng, 0.0)[0]
    seam = stitch([replace(left, focal=240.0), replace(right, focal=264.0)], 290).seams[0]
    assert seam.focal_ratio == pytest.approx(1.1)
    assert stitch([left, replace(right, focal=264.0)], 290).seams[0].focal_ratio is None

"""Windows of a clip joined, left to right, to one track. Which rule holds where: docs/poses.md.

Source: DESIGN rule 4; spec/faults.md P1, P3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.pose.align import SpanMismatch, align_rotation, align_scale, align_translation, shared_frames
from schemas.pose import PoseTrack, Scale, Vec3
from schemas.stitch import Seam, SeamReason, SeamVerdict, Stitched, WindowRow, WindowTrack
from schemas.timeline import Span

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROTATION_JUMP_DEG = 3.0
"""Median disagreement of the orientations over an overlap above which the windows tell different stories."""
MOST_SCALE = 30.0
"""A window's unit in units of the first of its segment, or the inverse: beyond it the joins ran away."""
MOST_SPREAD = 0.30
"""Relative standard deviation of that product above which a segment ends. Twelve seams at a step of 3 noises
add up to 0.18."""
BRISK = 60.0
"""Percentile of a window's steps that is called brisk. With 20 % of the frames thrown off, 36 % of the steps
are wild, so a higher one would be wild as well."""
UPRIGHT = math.cos(math.radians(5.0))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a window lies: p = scale * rotation @ p_window + shift, in its world and its segment's unit."""

    world: int
    segment: int
    rotation: Floats
    scale: float
    shift: Floats
    variance: float = 0.0
    kept: bool = False
    gate_open: bool = False


def stitch(windows: Sequence[WindowTrack], frames: int) -> Stitched:
    """Join the windows of a clip of F = `frames` frames.

    windows: by increasing start; only neighbours are joined. Frames that no window covers stay invalid, and
    so do frames that are invalid in every joined window that covers them: nothing is interpolated.
    Raises SpanMismatch when there is no window, one reaches beyond the clip, or they are not in order.
    """
    _check(windows, frames)
    places = [_Place(0, 0, np.eye(3), 1.0, np.zeros(3))]
    seams: list[Seam] = []
    for left, right in pairwise(windows):
        seam, place = _join(len(seams), left, right, places[-1])
        seams.append(seam)
        places.append(place)
    owner = _owners(windows, places, seams, frames)
    return Stitched(
        track=_track(windows, places, owner),
        window=_of_window(owner, [w.window for w in windows]),
        world=_of_window(owner, [p.world for p in places]),
        segment=_of_window(owner, [p.segment if w.lengths else -1 for w, p in zip(windows, places)]),
        scale_kept=_of_window(owner, [int(p.kept) for p in places]) == 1,
        windows=_rows(windows, places, seams),
        seams=tuple(seams),
    )


def _check(windows: Sequence[WindowTrack], frames: int) -> None:
    if not windows:
        raise SpanMismatch("there is no window to stitch")
    starts = [w.span.start for w in windows]
    stops = [w.span.stop for w in windows]
    if any(b <= a for edges in (starts, stops) for a, b in pairwise(edges)):
        raise SpanMismatch("windows must be in order of their frames")
    if stops[-1] > frames:
        raise SpanMismatch(f"window {windows[-1].window} ends at {stops[-1]} in a clip of {frames} frames")


def _join(index: int, left: WindowTrack, right: WindowTrack, place: _Place) -> tuple[Seam, _Place]:
    """The seam, and the place of the right window; `place` is the left one's."""
    start, stop = right.span.start, left.span.stop
    seam = Seam(
        seam=index,
        left=left.window,
        right=right.window,
        start=start,
        stop=max(start, stop),
        shared=0,
        cut=(start + max(start, stop)) // 2,
        rotation_deg=None,
        scale=None,
        scale_spread=None,
        votes=0,
        translation_residual=None,
        focal_ratio=right.focal / left.focal if left.focal and right.focal else None,
        verdict=SeamVerdict.BREAK,
        reason=SeamReason.NO_OVERLAP,
    )
    if stop <= start:
        return seam, _new_world(place)
    a, b = left.over(Span(start, stop)), right.over(Span(start, stop))
    seam = replace(seam, shared=int(np.count_nonzero(shared_frames(a, b))))
    turn = align_rotation(a, b).value
    if turn is None:
        return seam, _new_world(place)
    seam = replace(seam, rotation_deg=turn.residual_deg)
    if turn.residual_deg > ROTATION_JUMP_DEG:
        return replace(seam, reason=SeamReason.ROTATION_JUMP), _new_world(place)

    seam, follow = _scale(seam, left, right, turn.matrix, place)
    rotation = place.rotation @ turn.matrix
    if seam.verdict in (SeamVerdict.JOINED, SeamVerdict.SCALE_KEPT):
        fit = align_translation(a, b, turn.matrix, follow.scale / place.scale)
        both = fit.agree & turn.agree
        seam = replace(
            seam,
            cut=_nearest(np.flatnonzero(both if both.any() else turn.agree) + start, seam.cut),
            translation_residual=_in_steps(fit.residual, a) if seam.verdict is SeamVerdict.JOINED else None,
        )
        shift = place.scale * place.rotation @ fit.vector + place.shift
    else:
        # No common unit. The positions meet at the cut: a plot stays in one piece, and every step between two
        # frames is one that a window measured.
        seam = replace(seam, cut=_nearest(np.flatnonzero(turn.agree) + start, seam.cut))
        row = seam.cut - start
        met = place.scale * place.rotation @ a.translation[row] + place.shift
        shift = met - follow.scale * rotation @ b.translation[row]
    return seam, replace(follow, rotation=rotation, shift=shift)


def _scale(
    seam: Seam, left: WindowTrack, right: WindowTrack, turn: Floats, place: _Place
) -> tuple[Seam, _Place]:
    """The seam with scale and verdict; the right window's place but for its rotation and shift."""
    if not (left.lengths and right.lengths):
        seam = replace(seam, verdict=SeamVerdict.DIRECTIONS, reason=SeamReason.NO_LENGTHS)
        return seam, place if left.lengths == right.lengths else _new_segment(place)
    span = Span(seam.start, seam.stop)
    brisk = (_step(left.track, BRISK), _step(right.track, BRISK))
    fit = align_scale(left.over(span), right.over(span), turn, brisk, place.gate_open)
    seam = replace(seam, votes=int(np.count_nonzero(fit.agree)))
    if fit.estimate.value is None:
        seam = replace(seam, reason=SeamReason(fit.estimate.reason))
        metres = left.track.scale is Scale.METRE and right.track.scale is Scale.METRE
        if metres and seam.reason is SeamReason.SCALE_UNOBSERVABLE:
            return replace(seam, verdict=SeamVerdict.SCALE_KEPT), replace(place, kept=True, gate_open=False)
        return replace(seam, verdict=SeamVerdict.SCALE_BREAK), _new_segment(place)
    total = place.scale * fit.estimate.value
    variance = place.variance + fit.estimate.confidence**2
    seam = replace(seam, scale=fit.estimate.value, scale_spread=fit.estimate.confidence)
    if abs(math.log(total)) > math.log(MOST_SCALE):
        seam = replace(seam, verdict=SeamVerdict.SCALE_BREAK, reason=SeamReason.SCALE_RUNAWAY)
        return seam, _new_segment(place)
    if variance > MOST_SPREAD**2:
        seam = replace(seam, verdict=SeamVerdict.SCALE_BREAK, reason=SeamReason.SCALE_DRIFT)
        return seam, _new_segment(place)
    seam = replace(seam, verdict=SeamVerdict.JOINED, reason=SeamReason.NONE)
    return seam, replace(place, scale=total, variance=variance, gate_open=True)


def _new_segment(place: _Place) -> _Place:
    return replace(place, segment=place.segment + 1, scale=1.0, variance=0.0, kept=False, gate_open=False)


def _new_world(place: _Place) -> _Place:
    return _Place(place.world + 1, place.segment + 1, np.eye(3), 1.0, np.zeros(3))


def _step(track: PoseTrack, percentile: float) -> float:
    """Percentile of the distances between neighbouring frames; 0 when no two are valid."""
    steps = np.linalg.norm(np.diff(track.translation, axis=0), axis=1)
    steps = steps[np.isfinite(steps)]
    return float(np.percentile(steps, percentile)) if len(steps) else 0.0


def _in_steps(distance: float, overlap: PoseTrack) -> float | None:
    step = _step(overlap, 50)
    return distance / step if step > 0 else None


def _nearest(frames: Ints, middle: int) -> int:
    return int(frames[np.argmin(np.abs(frames - middle))])


def _owners(
    windows: Sequence[WindowTrack], places: Sequence[_Place], seams: Sequence[Seam], frames: int
) -> Ints:
    """int64 [F], index of the window that gives each frame its pose, or -1.

    From cut to cut. Where that window has no valid pose, a neighbour in the same segment gives its own.
    """
    owner = np.full(frames, -1, np.int64)
    cuts = [windows[0].span.start, *(s.cut for s in seams), windows[-1].span.stop]
    for i, window in enumerate(windows):
        owner[max(cuts[i], window.span.start) : min(cuts[i + 1], window.span.stop)] = i
    valid = np.zeros((len(windows), frames), np.bool_)
    for i, window in enumerate(windows):
        valid[i, window.span.slice()] = window.track.valid
    for frame in np.flatnonzero((owner >= 0) & ~valid[owner, np.arange(frames)]):
        i = int(owner[frame])
        near = [
            j
            for j in (i - 1, i + 1)
            if 0 <= j < len(windows) and windows[j].lengths and places[j].segment == places[i].segment
        ]
        owner[frame] = next((j for j in near if valid[j, frame]), -1)
    return owner


def _track(windows: Sequence[WindowTrack], places: Sequence[_Place], owner: Ints) -> PoseTrack:
    rotation, translation = np.full((len(owner), 3, 3), np.nan), np.full((len(owner), 3), np.nan)
    for i, (window, place) in enumerate(zip(windows, places, strict=True)):
        mine = np.flatnonzero(owner == i)
        rows = mine - window.span.start
        rotation[mine] = place.rotation @ window.track.rotation[rows]
        translation[mine] = place.scale * window.track.translation[rows] @ place.rotation.T + place.shift
    metres = all(w.track.scale is Scale.METRE and w.lengths for w in windows)
    return PoseTrack(
        rotation=rotation,
        translation=translation,
        valid=owner >= 0,
        world=_of_window(owner, [p.world for p in places]),
        scale=Scale.METRE if metres else Scale.UNKNOWN,
        estimator="+".join(dict.fromkeys(w.track.estimator for w in windows)),
        up=_up(windows, places),
    )


def _up(windows: Sequence[WindowTrack], places: Sequence[_Place]) -> Vec3 | None:
    """Gravity-up where every window knows it and all agree within 5 degrees after the join."""
    ups = [p.rotation @ w.track.up for w, p in zip(windows, places, strict=True) if w.track.up is not None]
    if len(ups) < len(windows) or any(float(ups[0] @ u) < UPRIGHT for u in ups):
        return None
    return (float(ups[0][0]), float(ups[0][1]), float(ups[0][2]))


def _of_window(owner: Ints, values: Sequence[int]) -> Ints:
    out: Ints = np.where(owner >= 0, np.asarray(values, np.int64)[owner], -1)
    return out


def _rows(
    windows: Sequence[WindowTrack], places: Sequence[_Place], seams: Sequence[Seam]
) -> tuple[WindowRow, ...]:
    rows = []
    for i, (window, place) in enumerate(zip(windows, places, strict=True)):
        beside = seams[max(i - 1, 0) : i + 1]
        rows.append(
            WindowRow(
                window=window.window,
                start=window.span.start,
                stop=window.span.stop,
                estimator=window.track.estimator,
                valid_share=float(window.track.valid.mean()),
                world=place.world,
                segment=place.segment if window.lengths else -1,
                scale=place.scale if window.lengths else None,
                scale_spread=math.sqrt(place.variance) if window.lengths else None,
                scale_kept=place.kept,
                reasons=tuple(dict.fromkeys(str(s.reason) for s in beside if s.reason)),
            )
        )
    return tuple(rows)

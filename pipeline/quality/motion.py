"""How a clip moves: what its pictures hold, and the rates of its camera from one new picture to the next.

From the frame table, the poses and the tracked points (where there are any), and the hard cuts (where they
were looked for). Pure arithmetic: nothing is decoded. Source: spec/faults.md W7, P8, D2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from pipeline.ingest import HELD, held_runs
from pipeline.media import MediaTable
from pipeline.pose.tracks import Tracks
from schemas.pose import PoseTrack, Scale

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Run = tuple[int, int]

KNOT_S = 1 / 45
"""Shortest step of a rate: twice a frame at 60 fps, a frame at 40 fps and below, so that one camera gives one
figure whatever its frame rate."""
FROZEN_S = 0.1
"""Held pictures for this long are a stop or a freeze, for less a stutter: the shortest stops between two key
presses in the pack last 0.13 s, captures repeat a picture once or twice (0.03-0.07 s)."""
NEAR_S = 0.25
"""Reach of the motion that a held picture is compared with."""
MOVES = 0.5
"""Change of gray@320, in luma levels, from which a picture moves; pack: waiting 0.0-0.3, walking 2-22."""
FULL = 0.6
"""A picture is held inside motion when the nearest change on both sides is at least this share of the median
around. Where a camera swings back through rest (5 held frames of nav04), or a player comes to a stop, it is
0.0-0.5 on one side. Over the pack's 51 longer holds only bad05_frozen, keys of MiniWorld that start and stop
at full speed (7) and pushing against a wall (4) are held inside motion."""
VIEW_DEG = 115.0
"""Turn, in degrees, counted for a shift of the whole picture by its width where the camera is not known: that
of a focal length of half the width, a view of 90 degrees."""
FEWEST_POINTS = 8


@dataclass(frozen=True, slots=True)
class Motion:
    """How a clip of F frames moves.

    seconds: float64 [F]; change: float64 [F], luma levels; repeat: bool [F], bit-equal to the frame before;
    held: bool [F], shows what the frame before shows, encoder noise aside.
    stutter: bool [F], held for less than FROZEN_S inside motion; still, frozen: [start, stop) of pictures
    that stand for FROZEN_S and longer, all of them and those inside motion.
    lost: int64 [F], source frames that the working copy left out before the frame.
    cut: bool [F], or None where nobody looked.
    knots: int64 [N], frames between which rates are taken: new pictures, KNOT_S apart.
    turn: float64 [N - 1, 3], rotation vector in world axes from knot to knot, degrees a second; travel: the
    same for position, metres a second, None where metres are not known; NaN where either pose is not known.
    slide: the same shape, how the tracked points move on the screen, in degrees a second by VIEW_DEG; None
    where none were tracked, NaN where a step was not followed.
    knot_s: median time from knot to knot, in seconds.
    """

    seconds: Floats
    change: Floats
    repeat: Bools
    held: Bools
    stutter: Bools
    still: tuple[Run, ...]
    frozen: tuple[Run, ...]
    lost: Ints
    cut: Bools | None
    knots: Ints
    turn: Floats
    travel: Floats | None
    slide: Floats | None
    knot_s: float

    def inside(self, rates: Floats, start: int, stop: int) -> Floats:
        """Rates whose two knots lie in [start, stop)."""
        return rates[(self.knots[:-1] >= start) & (self.knots[1:] < stop)]


def motion(
    table: MediaTable, track: PoseTrack | None, cut: Bools | None, shift: Floats | None = None
) -> Motion:
    """Motion of a whole clip. table, track: F frames each; cut: bool [F], a hard cut lies before the frame;
    shift: float64 [F - 1, 2], see `picture_shift`.

    Rates come from relative rotations (log map) between new pictures, so a repeated picture is no stop and
    the step behind it no spike. Raises ValueError when the lengths differ.
    """
    frames = table.frames
    count = len(frames)
    lengths = [len(x) for x in (track, cut) if x is not None]
    lengths += [len(shift) + 1] if shift is not None else []
    if any(n != count for n in lengths):
        raise ValueError(f"{count} frames, but {lengths} poses, cuts, points: run this clip's stages again")
    seconds, change = frames.seconds, table.change.astype(np.float64)
    step = float(np.median(np.diff(seconds))) if count > 1 else 0.0
    held = frames.repeat | (table.change < HELD)
    held[:1] = False
    source = np.diff(frames.source_index)
    usual = int(np.median(source)) if len(source) else 1
    lost = np.concatenate([[0], np.maximum(0, source - usual)]).astype(np.int64)
    knots = _knots(seconds, held)
    turn, travel = _rates(track, seconds, knots, step)
    stutter, still, frozen = _holds(change, held, step)
    return Motion(
        seconds=seconds,
        change=change,
        repeat=frames.repeat,
        held=held,
        stutter=stutter,
        still=still,
        frozen=frozen,
        lost=lost,
        cut=cut,
        knots=knots,
        turn=turn,
        travel=travel,
        slide=None if shift is None else _slide(shift, seconds, knots),
        knot_s=float(np.median(np.diff(seconds[knots]))) if len(knots) > 1 else 0.0,
    )


def picture_shift(tracks: Tracks) -> Floats:
    """Median shift of the followed points of each step k -> k + 1, as a share of the picture's width,
    float64 [F - 1, 2]; NaN where fewer than FEWEST_POINTS were followed."""
    at, to, known = tracks.steps()
    shift = np.full((len(at), 2), np.nan)
    enough = known.sum(axis=1) >= FEWEST_POINTS
    shift[enough] = np.nanmedian(to[enough] - at[enough], axis=1)
    return shift


def _holds(change: Floats, held: Bools, step: float) -> tuple[Bools, tuple[Run, ...], tuple[Run, ...]]:
    """(stutter, still, frozen) of a clip; see Motion."""
    stutter = np.zeros(len(held), np.bool_)
    still, frozen = [], []
    reach = math.ceil(NEAR_S / step) if step else 0
    new = ~held
    new[:1] = False  # nothing comes before frame 0: its change is no change
    moved = np.flatnonzero(new)
    for start, stop in held_runs(held):
        split = int(np.searchsorted(moved, stop))
        before, after = moved[:split], moved[split:]
        within = False
        if len(before) and len(after):
            near = change[np.concatenate([before[before > start - reach], after[after < stop + reach]])]
            usual = max(MOVES, FULL * float(np.median(near))) if len(near) else math.inf
            within = min(change[before[-1]], change[after[0]]) >= usual
        if (stop - start - 1) * step < FROZEN_S:
            stutter[start + 1 : stop] = within
            continue
        still.append((start, stop))
        if within:
            frozen.append((start, stop))
    return stutter, tuple(still), tuple(frozen)


def _knots(seconds: Floats, held: Bools) -> Ints:
    knots: list[int] = []
    for k in np.flatnonzero(~held).tolist():
        if not knots or seconds[k] - seconds[knots[-1]] >= KNOT_S:
            knots.append(k)
    return np.asarray(knots, np.int64)


def _rates(
    track: PoseTrack | None, seconds: Floats, knots: Ints, step: float
) -> tuple[Floats, Floats | None]:
    """(turn, travel) a second from knot to knot; see Motion. No rate crosses a frame without a pose: where an
    estimator goes on behind one, it goes on from a guess."""
    first, then = knots[:-1], knots[1:]
    if track is None:
        return np.full((len(first), 3), np.nan), None
    took = seconds[then] - seconds[first]
    turn, travel = np.full((len(first), 3), np.nan), np.full((len(first), 3), np.nan)
    # A picture that stands for long hides what the camera did; a pose behind it tells only the sum.
    known = track.valid[first] & track.valid[then] & (took <= max(FROZEN_S, 3.5 * step))
    if track.world is not None:
        known &= track.world[first] == track.world[then]
    a, b, span = first[known], then[known], took[known, None]
    turn[known] = _rotation_vectors(track.rotation[a], track.rotation[b]) / span
    travel[known] = (track.translation[b] - track.translation[a]) / span
    return turn, travel if track.scale is Scale.METRE else None


def _rotation_vectors(a: Floats, b: Floats) -> Floats:
    """World-axes rotation vectors from a to b, in degrees; float64 [N, 3]."""
    return np.asarray(Rotation.from_matrix(b @ a.transpose(0, 2, 1)).as_rotvec(degrees=True))


def _slide(shift: Floats, seconds: Floats, knots: Ints) -> Floats:
    """Rates of the picture's shift from knot to knot; see Motion."""
    way = np.concatenate([[[0.0, 0.0]], np.cumsum(np.where(np.isnan(shift), 0.0, shift), axis=0)])
    lost = np.concatenate([[0], np.cumsum(np.isnan(shift).any(axis=1))])
    first, then = knots[:-1], knots[1:]
    rates = np.zeros((len(first), 3))
    rates[:, :2] = VIEW_DEG * (way[then] - way[first]) / (seconds[then] - seconds[first])[:, None]
    rates[lost[then] > lost[first]] = np.nan
    return rates

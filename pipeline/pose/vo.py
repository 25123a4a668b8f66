"""Visual odometry on a CPU: rotation and direction of travel of every step of a clip, from its point tracks.

`solve` needs tracks and a camera, and can run again with another camera without decoding. Every step in doubt
has its reason. The length of a step is not known: in a track each step of travel counts 1 and each turn on
the spot 0, and its scale is unknown. Deterministic. Source: spec/faults.md P1, P7, P8, W7.

Where looking up slides the picture (`Look.SHEAR`), the camera that draws stays level: yaw is its turn, and
pitch is the angle of the horizon, so that a pose says where the player looks, as a logged pose does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from pipeline.pose.focal import HORIZON_SPREAD, NOISE_PX, Camera, loose_prior, median_shift, scaled
from pipeline.pose.tracks import COLUMNS, Tracks
from pipeline.pose.vo_fit import (
    Bools,
    Floats,
    Look,
    Motion,
    Points,
    Prior,
    normal_equations,
    residuals,
    rotation,
)
from pipeline.pose.vo_horizon import smooth
from pipeline.pose.vo_search import KEPT, Rows, batches, misfit, put, search, settle, turn_only
from schemas.pose import PoseTrack, Scale
from schemas.timeline import Span

VO = "vo-1"

SOLVABLE = 8
FEWEST = 15
"""Points without which a step is not solved, and not believed. Of 5,563 solved steps of nav01, 02, 05 and 08,
0.1 % have 8 to 14; a third of these are off by more than 2 degrees."""
LEAST_AGREE = 0.4
FIT = 3.0
"""A point agrees within 3 times the noise (0.75 px). Of the same steps 2 % have less than 40 % of points that
agree; 19 % of these are off by more than 1 degree, 1.4 % of the others."""
WORST_SIGMA_DEG = 0.3
"""Median 0.03 degrees, 95 % below 0.10. 0.6 % lie above 0.3; 42 % of these are off by more than 1 degree."""
STILL_RATIO = 3.5
"""A step is a turn on the spot when the best turn's median residual is within this multiple of the best
motion's: turns on the spot 1.8-3.5 (10-90 %), steps that travel 3-12 (5 %) and 15-24 (median). Where it is
one, yaw without travel is right to 0.01-0.03 degrees, with travel to 0.09-0.12."""
STATIC = 2.0
"""Shift, in units of the noise (0.5 px), under which a point stands still on the screen."""
OVERLAY_SHARE, OVERLAY_SEEN, SCENE_SHIFT_PX = 0.6, 30, 1.5
"""A cell of the picture is an overlay (status bar, menu, weapon at rest) when, of 30 points or more seen
there in steps whose median point moves 1.5 px, 60 % stood still."""
USABLE_MISFIT = 0.6
SINGULAR = 1e-6


class Doubt(StrEnum):
    """Why the motion of a step is not known."""

    NONE = ""
    FEW_POINTS = "few_points"  # a cut, darkness, blur, a wall without texture
    DISAGREE = "disagree"  # the points follow no one camera motion
    IMPRECISE = "imprecise"  # the points leave the turn open


@dataclass(frozen=True, slots=True)
class Steps:
    """Motion of the S = F - 1 steps k -> k + 1 of a clip.

    yaw_deg, pitch_deg, roll_deg: float64 [S], right, up, clockwise positive: the rotation vector in camera
        axes; where the picture slides, pitch is the change of the horizon's angle and roll 0.
    direction: float64 [S, 3], unit vector of travel in camera axes of frame k + 1 (level axes where the
        picture slides); 0 for a turn on the spot.
    pitch_at_deg: float64 [S], pitch in frame k where the picture slides, else NaN.
    sigma_deg: float64 [S], standard deviation of yaw; agree: float64 [S], share of points that fit.
    repeat: bool [S], the picture did not change: no motion, and none should be believed of the game.
    doubt: one a step. A step in doubt keeps its best guess here, NaN where nothing could be solved; only
        rows of `valid` are measurements.
    """

    yaw_deg: Floats
    pitch_deg: Floats
    roll_deg: Floats
    direction: Floats
    pitch_at_deg: Floats
    sigma_deg: Floats
    agree: Floats
    repeat: Bools
    doubt: tuple[Doubt, ...]
    camera: Camera

    @property
    def valid(self) -> Bools:
        """bool [S]: steps without doubt."""
        return np.array([d is Doubt.NONE for d in self.doubt], np.bool_)


def solve(tracks: Tracks, camera: Camera) -> Steps:
    """Motion of every step of a clip."""
    at, to, known = tracks.steps()
    noise = NOISE_PX / tracks.width
    known = known & ~overlay(at, to, known, noise)
    count = known.sum(axis=1)
    repeat = tracks.repeat[1:]
    busy = np.flatnonzero((count >= SOLVABLE) & ~repeat)
    order = np.argsort(~known[busy], axis=1, kind="stable")[:, : int(count.max(initial=1))]
    pick = (busy[:, None], order)
    points = scaled(at[pick], to[pick], known[pick], camera, noise)
    motion, sigma, agree = _fit(camera.look, points)
    return _report(motion, sigma, agree, busy, count, repeat, camera)


def overlay(at: Floats, to: Floats, known: Bools, noise: float) -> Bools:
    """Points in cells of the picture that stand still while the rest moves; bool [S, P]."""
    cell = np.where(known[..., None], np.floor(at * COLUMNS), 0).astype(np.intp)
    cell = (cell[..., 1] - cell[..., 1].min(initial=0)) * 2 * COLUMNS + cell[..., 0] + COLUMNS
    moving = median_shift(at, to, known) > noise * SCENE_SHIFT_PX / NOISE_PX
    used = known & moving[:, None]
    still = used & (np.hypot(to[..., 0] - at[..., 0], to[..., 1] - at[..., 1]) < STATIC * noise)
    cells = int(cell.max(initial=0)) + 1
    seen = np.bincount(cell[used], minlength=cells)
    stuck = np.bincount(cell[still], minlength=cells)
    return np.asarray(known & ((seen >= OVERLAY_SEEN) & (stuck > OVERLAY_SHARE * seen))[cell])


def _fit(look: Look, points: Points) -> tuple[Motion, Floats, Floats]:
    steps = len(points.a)
    prior = loose_prior(look, steps)
    if not steps:
        return Motion(np.zeros((0, 3)), np.zeros((0, 3))), np.zeros(0), np.zeros(0)
    motion, costs = search(look, _moving(points), prior)
    if look is Look.SHEAR:
        prior = _horizon(points, motion.take(np.arange(steps) * KEPT), costs[::KEPT], prior)
    motion, _ = settle(look, points, prior, motion)
    turn = turn_only(look, points, prior, motion)
    on_the_spot = misfit(look, points, turn) < STILL_RATIO * misfit(look, points, motion)
    put(motion, on_the_spot, turn.take(np.flatnonzero(on_the_spot)))
    return motion, *_trust(look, points, motion, prior)


def _moving(points: Points) -> Points:
    """Without the points that stand still on the screen, where most points do not: compression holds dark
    walls still, and a search that sees them finds no turn but travel to the side."""
    shift = np.hypot(*np.moveaxis(points.b - points.a, -1, 0))
    still = points.known & (shift < STATIC * points.noise)
    few = 2 * still.sum(axis=1) < points.known.sum(axis=1)
    return replace(points, known=points.known & ~(still & few[:, None]))


def _horizon(points: Points, motion: Motion, costs: Floats, prior: Prior) -> Prior:
    """The prior with the horizon that the clip's turns show."""
    information = np.zeros(len(costs))
    for rows in batches(len(costs)):
        covariance = _covariance(Look.SHEAR, points, motion, rows, loose_prior(Look.SHEAR, len(rows)))
        information[rows] = 1 / covariance[:, 2, 2] - HORIZON_SPREAD**-2
    good = costs < USABLE_MISFIT * points.known.sum(axis=1)
    middle, spread = smooth(motion.warp[:, 0], motion.warp[:, 2], information, good)
    out = Prior(prior.mean.copy(), prior.precision.copy())
    out.mean[:, 2] = middle
    out.precision[:, 2] = 1 / spread**2
    return out


def _covariance(look: Look, points: Points, motion: Motion, rows: Rows, prior: Prior) -> Floats:
    part, moved = points.take(rows), motion.take(rows)
    h, _, _ = normal_equations(look, moved, part, residuals(look, moved, part), prior)
    return np.asarray(np.linalg.inv(h + SINGULAR * np.eye(5)))


def _trust(look: Look, points: Points, motion: Motion, prior: Prior) -> tuple[Floats, Floats]:
    sigma, agree = np.zeros(len(motion.warp)), np.zeros(len(motion.warp))
    for rows in batches(len(sigma)):
        variance = _covariance(look, points, motion, rows, prior.take(rows))[:, 1, 1]
        sigma[rows] = np.degrees(np.sqrt(variance))
        part = points.take(rows)
        fits = residuals(look, motion.take(rows), part).squared < (FIT * part.noise) ** 2
        agree[rows] = (fits & part.known).sum(axis=1) / part.known.sum(axis=1)
    return sigma, agree


def _report(
    motion: Motion, sigma: Floats, agree: Floats, busy: Rows, count: Rows, repeat: Bools, camera: Camera
) -> Steps:
    steps = len(repeat)

    def spread(values: Floats, unsolved: float = float("nan"), repeated: float = 0.0) -> Floats:
        out = np.full((steps, *values.shape[1:]), unsolved)
        out[repeat] = repeated
        out[busy] = values
        return out

    yaw = np.degrees(motion.warp[:, 1])
    pitch, roll, pitch_at = (
        np.degrees(motion.warp[:, 0]),
        np.degrees(motion.warp[:, 2]),
        np.full(steps, np.nan),
    )
    if camera.look is Look.SHEAR:
        horizon, slide = motion.warp[:, 2], motion.warp[:, 0]
        pitch, roll = np.degrees(np.arctan(horizon + slide) - np.arctan(horizon)), np.zeros_like(yaw)
        pitch_at = spread(np.degrees(np.arctan(horizon)), repeated=float("nan"))
    sigma, agree = spread(sigma), spread(agree, 0.0, 1.0)
    doubt = np.full(steps, Doubt.NONE, dtype=object)
    doubt[sigma > WORST_SIGMA_DEG] = Doubt.IMPRECISE
    doubt[agree < LEAST_AGREE] = Doubt.DISAGREE
    doubt[(count < FEWEST) & ~repeat] = Doubt.FEW_POINTS
    return Steps(
        yaw_deg=spread(yaw),
        pitch_deg=spread(pitch),
        roll_deg=spread(roll),
        direction=spread(motion.direction),
        pitch_at_deg=pitch_at,
        sigma_deg=sigma,
        agree=agree,
        repeat=repeat,
        doubt=tuple(Doubt(d) for d in doubt),
        camera=camera,
    )


def window_track(steps: Steps, window: Span) -> PoseTrack:
    """Poses of the frames of one window, camera-to-world, its first frame the world; scale unknown.

    The frame in which a step in doubt arrives is invalid, so that no rate is ever taken from it; frames
    behind it stand where the step's best guess puts them. Behind a step without any guess (a cut, darkness)
    nothing more of the window can be placed, and all of it is invalid. up: known where the picture slides.
    Raises ValueError when the window does not lie within the clip.
    """
    f = len(window)
    if window.stop > len(steps.doubt) + 1:
        raise ValueError(f"window {window} ends behind the clip's {len(steps.doubt) + 1} frames: replan it")
    part = slice(window.start, window.stop - 1)
    angles = np.radians(np.stack([steps.pitch_deg[part], steps.yaw_deg[part], steps.roll_deg[part]], 1))
    solved = np.cumprod(np.concatenate([[1], np.isfinite(angles).all(axis=1)])).astype(np.bool_)
    valid = solved & np.concatenate([[True], steps.valid[part]])
    angles[~solved[1:]] = 0.0
    travel = np.where(solved[1:, None], steps.direction[part], 0.0)
    if steps.camera.look is Look.SHEAR:
        up, turned, level = _level_rotations(steps, window, angles)
    else:
        up, turned = None, np.tile(np.eye(3), (f, 1, 1))
        for k, step in enumerate(rotation(angles)):
            turned[k + 1] = turned[k] @ step
        level = turned
    moved = np.einsum("nij,nj->ni", level[1:], travel)
    position = np.concatenate([np.zeros((1, 3)), np.cumsum(moved, axis=0)])
    return PoseTrack(
        rotation=np.where(valid[:, None, None], turned, np.nan),
        translation=np.where(valid[:, None], position, np.nan),
        valid=valid,
        scale=Scale.UNKNOWN,
        estimator=VO,
        up=up,
    )


def _level_rotations(
    steps: Steps, window: Span, angles: Floats
) -> tuple[tuple[float, float, float], Floats, Floats]:
    """(up, camera rotations, rotations of level axes), the world being the first camera."""
    seen = steps.pitch_at_deg[window.start : window.stop - 1]
    first = np.flatnonzero(np.isfinite(seen))
    # The first frame's own pitch; before the first step that was solved nothing moved.
    pitch = np.radians(seen[first[0]]) if len(first) else 0.0
    pitches = pitch + np.concatenate([[0.0], np.cumsum(angles[:, 0])])
    yaws = np.concatenate([[0.0], np.cumsum(angles[:, 1])])
    zero = np.zeros_like(yaws)
    into_first = rotation(np.array([[pitch, 0.0, 0.0]]))[0].T
    level = into_first @ rotation(np.stack([zero, yaws, zero], 1))
    up = -into_first[:, 1]
    return (
        (float(up[0]), float(up[1]), float(up[2])),
        level @ rotation(np.stack([pitches, zero, zero], 1)),
        level,
    )

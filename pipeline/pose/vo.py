"""Visual odometry on a CPU: rotation and direction of travel of every step of a clip, from its point tracks.

`solve` needs tracks and a camera, and can be run again with another camera without decoding. Every step has
its own reason when it is in doubt. The length of a step is not known: tracks are of unknown scale, each step
of travel counts one, each turn on the spot none. Deterministic. Source: spec/faults.md P1, P7, P8, W7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from pipeline.pose.focal import Camera
from pipeline.pose.tracks import Tracks
from pipeline.pose.vo_fit import (
    Bools,
    Floats,
    Look,
    Motion,
    Points,
    Prior,
    normal_equations,
    residuals,
)
from pipeline.pose.vo_horizon import SPREAD, smooth
from pipeline.pose.vo_search import KEPT, batches, misfit, put, search, settle, turn_only

VO = "vo-1"
NOISE_PX = 0.25
"""Residual of the working picture at which a point counts half. Half of all points lie within 0.2-0.4 px."""
MOST_POINTS = 192
"""Points used of a step; more cost time and gave nothing."""


class Doubt(StrEnum):
    """Why the motion of a step is not known."""

    NONE = ""
    FEW_POINTS = "few_points"  # a cut, darkness, a wall without texture, blur
    DISAGREE = "disagree"  # most points follow no camera motion
    IMPRECISE = "imprecise"  # the points leave the turn open


@dataclass(frozen=True, slots=True)
class Steps:
    """Motion of the S = F - 1 steps of a clip; a step in doubt holds NaN.

    yaw_deg, pitch_deg, roll_deg: float64 [S], right, up and clockwise positive; with a picture that slides,
        pitch is the change of the horizon's angle and roll is 0.
    direction: float64 [S, 3], unit vector of travel in camera axes (OpenCV) of the frame arrived at, level
        axes where the picture slides; zero for a turn on the spot.
    pitch_at_deg: float64 [F], absolute pitch where the picture slides, else NaN.
    sigma_deg: float64 [S], standard deviation of yaw by the points' agreement.
    agree: float64 [S], share of points that fit. repeat: bool [S], the picture did not change: no motion.
    doubt: one per step.
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
        return np.array([d is Doubt.NONE for d in self.doubt], np.bool_)


FEWEST = 15
LEAST_AGREE = 0.3
WORST_SIGMA_DEG = 0.4
ROLL_SPREAD = 0.05
SLIDE_SPREAD = 0.1
STILL_RATIO = 3.5
STATIC = 2.0
SEARCHONLY = True
DROPSHARE = 0.5
FIT = 3.0


def solve(tracks: Tracks, camera: Camera) -> Steps:
    at, to, known = tracks.steps()
    steps = len(at)
    noise = NOISE_PX / tracks.width
    enough = known.sum(axis=1) >= FEWEST
    repeat = tracks.repeat[1:]
    busy = enough & ~repeat
    points = _points(at[busy], to[busy], known[busy], camera, noise)
    motion, sigma, agree = _fit(camera.look, points)
    return _report(motion, sigma, agree, busy, enough, repeat, camera)


def _points(at: Floats, to: Floats, known: Bools, camera: Camera, noise: float) -> Points:
    order = np.argsort(~known, axis=1, kind="stable")[:, : min(MOST_POINTS, int(known.sum(1).max(initial=1)))]
    rows = np.arange(len(at))[:, None]
    known = known[rows, order]
    a = np.where(known[..., None], at[rows, order], 0.0) / camera.focal
    b = np.where(known[..., None], to[rows, order], 0.0) / camera.focal
    a[..., 1] /= camera.aspect
    b[..., 1] /= camera.aspect
    return Points(a, b, known, noise / camera.focal)


def _fit(look: Look, points: Points) -> tuple[Motion, Floats, Floats]:
    prior = _loose(look, len(points.a))
    motion, costs = search(look, _moving(points), prior)
    if not SEARCHONLY: points = _moving(points)
    if look is Look.SHEAR:
        prior = _horizon(points, motion.take(np.arange(len(points.a)) * KEPT), costs[::KEPT], prior)
    motion, costs = settle(look, points, prior, motion)
    still = turn_only(look, points, prior, motion)
    rests = misfit(look, points, still) < STILL_RATIO * misfit(look, points, motion)
    put(motion, rests, still.take(np.flatnonzero(rests)))
    sigma, agree = _trust(look, points, motion, prior)
    return motion, sigma, agree


def _moving(points: Points) -> Points:
    still = points.known & (np.hypot(*np.moveaxis(points.b - points.a, -1, 0)) < STATIC * points.noise)
    drop = still & (still.sum(1) < DROPSHARE * points.known.sum(1))[:, None]
    return replace(points, known=points.known & ~drop)


def _loose(look: Look, steps: int) -> Prior:
    spread = (SLIDE_SPREAD, np.inf, SPREAD if look is Look.SHEAR else ROLL_SPREAD)
    precision = np.broadcast_to([s**-2.0 for s in spread], (steps, 3)).copy()
    return Prior(np.zeros((steps, 3)), precision)


def _horizon(points: Points, motion: Motion, costs: Floats, prior: Prior) -> Prior:
    information = np.zeros(len(costs))
    for rows in batches(len(costs)):
        part, moved = points.take(rows), motion.take(rows)
        h, _, _ = normal_equations(Look.SHEAR, moved, part, residuals(Look.SHEAR, moved, part), None)
        h[:, 2, 2] += SPREAD**-2
        covariance = np.linalg.inv(h + 1e-6 * np.eye(5))
        information[rows] = 1 / covariance[:, 2, 2] - SPREAD**-2
    good = costs < 0.6 * points.known.sum(axis=1)
    mean, spread = smooth(motion.warp[:, 0], motion.warp[:, 2], information, good)
    out = Prior(prior.mean.copy(), prior.precision.copy())
    out.mean[:, 2] = mean
    out.precision[:, 2] = 1 / (spread**2 + 0.01**2)
    return out


def _trust(look: Look, points: Points, motion: Motion, prior: Prior) -> tuple[Floats, Floats]:
    sigma, agree = np.zeros(len(motion.warp)), np.zeros(len(motion.warp))
    for rows in batches(len(sigma)):
        part, moved = points.take(rows), motion.take(rows)
        res = residuals(look, moved, part)
        h, _, _ = normal_equations(look, moved, part, res, prior.take(rows))
        sigma[rows] = np.degrees(np.sqrt(np.linalg.inv(h + 1e-6 * np.eye(5))[:, 1, 1]))
        fits = part.known & (res.squared < (FIT * part.noise) ** 2)
        agree[rows] = fits.sum(axis=1) / part.known.sum(axis=1)
    return sigma, agree


def _report(motion, sigma, agree, busy, enough, repeat, camera):
    raise NotImplementedError

"""Focal length of a game from its own footage: turns on the spot show it, whatever the game says of itself.

In a turn without travel every point moves by the same angle, so that points towards the sides move further in
pixels than those in the middle: by how much is the focal length. No distance enters. The engine's own field
of view may be wrong (the navigation clips: 90 degrees reported, 106 drawn).

Height of pixels: where looking up slides the picture (`Look.SHEAR`) no motion in it depends on how tall
pixels are, so `aspect` stays 1 unless it is told; yaw does not depend on it, pitch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.pose.tracks import Tracks
from pipeline.pose.vo_fit import Bools, Floats, Look, Motion, Points, Prior, warp
from pipeline.pose.vo_search import Rows, anneal, batches, join, misfit
from schemas.quality import Unknown

NOISE_PX = 0.25
"""Residual, in pixels of the working picture, at which a point counts half. Half of all points of a step lie
within 0.2-0.4 px of the motion."""
HORIZON_SPREAD = 0.3
"""Standard deviation of the horizon before anything is seen, in focal lengths: pitch within about 17 deg."""
ROLL_SPREAD = 0.01
SLIDE_SPREAD = 0.1
"""Of roll and of pitch in one step, in radians. Weak: a roll of 1 degree costs as much as 3 of 110 points."""

FEWEST_POINTS = 30
LEAST_SHIFT = 0.015
"""Median shift of a step's points, as a share of the width, to be looked at: 10 px at 640, a turn of 1.5-2
degrees. Below, 0.3 px of noise moves the focal length of one step by more than 2 %."""
MOST_STEPS = 800
COARSE = np.geomspace(0.25, 1.6, 10)
"""Focal lengths tried first, as shares of the width: views of 127 to 35 degrees."""
TURN_MISFIT = 0.035
"""A step is a turn on the spot when the median residual of the best turn is less than this share of its
median shift. With the true focal length, turns on the spot have 0.01-0.03, steps that also travel 0.1-0.9."""
MOST_TURNS = 120
ENOUGH_TURNS = 12
"""Spread (MAD) of one turn's focal length is 0.5-1 %; the median of 12 is good to about 0.4 %."""
DECIDED = 3.0
"""Standard errors by which one kind of camera must explain turns better than the other to be believed."""


@dataclass(frozen=True, slots=True)
class Camera:
    """How a game draws. focal: fx as a share of its width; look: what looking up does; aspect: fy / fx."""

    focal: float
    look: Look
    aspect: float = 1.0


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns on the spot of one clip. focal: float64 [N], of each; shear: float64 [N], by how many points the
    sliding picture explains it better than the tilting camera."""

    focal: Floats
    shear: Floats


@dataclass(frozen=True, slots=True)
class Calibration:
    """Camera of one game at one shape of picture.

    focal: median, or None with `reason`; n, mad: turns behind it and their spread, as a share. look_known:
    False where no turn was seen with the horizon off the middle; then `tilt` stands, the ordinary camera, and
    either serves.
    """

    focal: float | None
    n: int
    mad: float
    look: Look
    look_known: bool
    reason: Unknown | None

    @property
    def camera(self) -> Camera | None:
        return None if self.focal is None else Camera(self.focal, self.look)


def pool(clips: Sequence[Turns]) -> Calibration:
    """One calibration from the turns of a game's clips, all of one shape of picture (the share of the width
    that a focal length is changes with it)."""
    focal = np.concatenate([np.zeros(0), *(c.focal for c in clips)])
    shear = np.concatenate([np.zeros(0), *(c.shear for c in clips)])
    n = len(focal)
    if n < ENOUGH_TURNS:
        return Calibration(None, n, float("nan"), Look.TILT, False, Unknown.UNCALIBRATED)
    middle = float(np.median(focal))
    error = float(shear.std()) / np.sqrt(n) + 1e-9
    known = abs(float(shear.mean())) > DECIDED * error
    look = Look.SHEAR if known and shear.mean() > 0 else Look.TILT
    mad = float(np.median(np.abs(focal / middle - 1)))
    return Calibration(middle, n, mad, look, known, None)


def find_turns(tracks: Tracks) -> Turns:
    """The turns on the spot of one clip, at most 120, with the focal length each shows. 4-10 s a clip."""
    at, to, known = tracks.steps()
    shift = median_shift(at, to, known)
    seen = np.flatnonzero((known.sum(axis=1) >= FEWEST_POINTS) & (shift > LEAST_SHIFT))
    if len(seen) < ENOUGH_TURNS:
        return Turns(np.zeros(0), np.zeros(0))
    seen = np.unique(seen[np.linspace(0, len(seen) - 1, min(len(seen), MOST_STEPS)).astype(np.intp)])
    steps = _Sample(at[seen], to[seen], known[seen], shift[seen], NOISE_PX / tracks.width)
    coarse = [np.sort(steps.misfit(f, (8.0, 4.0)))[: ENOUGH_TURNS * 3].mean() for f in COARSE]
    focal, span = float(COARSE[int(np.argmin(coarse))]), 1.3
    for _ in range(4):
        focal, span = steps.narrow(focal, span), max(1.04, span**0.5)
    return steps.turns(focal)


@dataclass(frozen=True)
class _Sample:
    at: Floats
    to: Floats
    known: Bools
    shift: Floats
    noise: float

    def take(self, rows: Rows) -> _Sample:
        return _Sample(self.at[rows], self.to[rows], self.known[rows], self.shift[rows], self.noise)

    def misfit(self, focal: float, widths: tuple[float, ...] = (8.0, 4.0, 2.0)) -> Floats:
        """Median residual of each step's best turn, as a share of its shift."""
        points = scaled(self.at, self.to, self.known, Camera(focal, Look.SHEAR), self.noise)
        motion, _ = best_turn(Look.SHEAR, points, widths)
        return misfit(Look.SHEAR, points, motion) * self.noise / self.shift

    def best(self, focal: float) -> Rows:
        """Steps that are turns on the spot by this focal length; a few at least while it is wrong."""
        share = self.misfit(focal)
        order = np.argsort(share, kind="stable")
        count = int(np.clip((share < TURN_MISFIT).sum(), 2 * ENOUGH_TURNS, MOST_TURNS))
        return np.asarray(order[:count])

    def costs(self, focals: Floats, look: Look) -> Floats:
        """Robust cost of each step's best turn at each focal length, [N, len(focals)]."""
        every = (8.0, 4.0, 2.0, 1.0)
        return np.stack(
            [
                best_turn(look, scaled(self.at, self.to, self.known, Camera(f, look), self.noise), every)[1]
                for f in focals
            ],
            axis=1,
        )

    def narrow(self, focal: float, span: float) -> float:
        focals = focal * np.geomspace(1 / span, span, 7)
        total = self.take(self.best(focal)).costs(focals, Look.SHEAR).sum(axis=0)
        i = int(np.clip(total.argmin(), 1, len(focals) - 2))
        x = np.log(focals)
        a, b, _ = np.polyfit(x[i - 1 : i + 2], total[i - 1 : i + 2], 2)
        return float(np.exp(np.clip(-b / (2 * a) if a > 0 else x[i], x[0], x[-1])))

    def turns(self, focal: float) -> Turns:
        turns = self.take(np.flatnonzero(self.misfit(focal) < TURN_MISFIT)[:MOST_TURNS])
        if not len(turns.shift):
            return Turns(np.zeros(0), np.zeros(0))
        focals = focal * np.geomspace(1 / 1.06, 1.06, 5)
        cost = turns.costs(focals, Look.SHEAR)
        x = np.log(focals / focal)
        a, b, _ = np.polyfit(x, cost.T, 2)
        peak = -b / (2 * np.where(a > 0, a, 1.0))
        usable = (a > 0) & (np.abs(peak) < 0.15)  # the rest are too small a turn to have a minimum
        better = turns.costs(focals[2:3], Look.TILT)[:, 0] - cost[:, 2]
        return Turns(focal * np.exp(peak[usable]), better[usable])


def scaled(at: Floats, to: Floats, known: Bools, camera: Camera, noise: float) -> Points:
    """Bearings of points given as shares of the width; those not known are put at the middle."""
    scale = camera.focal * np.array([1.0, camera.aspect])
    a = np.where(known[..., None], at, 0.0) / scale
    b = np.where(known[..., None], to, 0.0) / scale
    return Points(a, b, known, noise / camera.focal)


def median_shift(at: Floats, to: Floats, known: Bools) -> Floats:
    """Median shift of the known points of each step, as a share of the width; 0 where none is known."""
    size = np.where(known, np.hypot(to[..., 0] - at[..., 0], to[..., 1] - at[..., 1]), np.nan)
    out = np.zeros(len(size))
    some = known.any(axis=1)
    out[some] = np.nanmedian(size[some], axis=1)
    return out


def loose_prior(look: Look, steps: int) -> Prior:
    """What is known of a step before any point is looked at."""
    spread = (SLIDE_SPREAD, np.inf, HORIZON_SPREAD if look is Look.SHEAR else ROLL_SPREAD)
    return Prior(np.zeros((steps, 3)), np.broadcast_to([s**-2.0 for s in spread], (steps, 3)).copy())


def best_turn(look: Look, points: Points, widths: tuple[float, ...]) -> tuple[Motion, Floats]:
    """The turn without travel that best explains each step, from its points' median change of azimuth."""
    motions, costs = [], []
    for rows in batches(len(points.a)):
        part, prior = points.take(rows), loose_prior(look, len(rows))
        azimuth = np.arctan(part.a[..., 0]) - np.arctan(part.b[..., 0])
        p = np.zeros((len(rows), 3))
        p[:, 1] = np.nanmedian(np.where(part.known, azimuth, np.nan), axis=1)
        at, _ = warp(look, p, part.a)
        p[:, 0] = np.nanmedian(np.where(part.known, part.b[..., 1] - at[..., 1], np.nan), axis=1)
        motion, cost = anneal(look, Motion(p, np.zeros_like(p)), part, prior, widths)
        motions.append(motion)
        costs.append(cost)
    return join(motions), np.concatenate(costs)

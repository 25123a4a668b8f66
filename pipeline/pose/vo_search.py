"""Where to begin: starts for the fit of `vo_fit`, and the way from coarse to fine.

The robust cost has many hollows. From three starts and at its final width alone, 7 % of the steps of a clip
ended more than 2 degrees off; 80 % of those had a better hollow at the true turn. So: a grid of starts, a
cost that is first wide and then narrow, and the neighbouring steps' motions as further starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.pose.vo_fit import (
    Bools,
    Floats,
    Look,
    Motion,
    Points,
    Prior,
    cost,
    refine,
    residuals,
    warp,
)

Rows = npt.NDArray[np.intp]

BATCH = 128
"""Steps solved together: 128 x 7 starts x 112 points stay in the cache of one core."""
YAW_QUANTILES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
WIDE = (8.0, 4.0)
NARROW = (2.0, 1.0)
ROUNDS = 4
KEPT = 3
PASSES = 2


def batches(steps: int) -> Iterator[Rows]:
    for i in range(0, steps, BATCH):
        yield np.arange(i, min(steps, i + BATCH))


def anneal(
    look: Look, motion: Motion, points: Points, prior: Prior, widths: tuple[float, ...]
) -> tuple[Motion, Floats]:
    """Refine at falling widths of the robust cost, in units of the noise; (motion, cost at the last)."""
    costs = np.zeros(len(motion.warp))
    for width in widths:
        wide = replace(points, noise=points.noise * width)
        motion, costs = refine(look, motion, wide, prior, ROUNDS)
    return motion, costs


def search(look: Look, points: Points, prior: Prior) -> tuple[Motion, Floats]:
    """The KEPT best motions of each of M steps, each taken by itself; ([M * KEPT], costs [M * KEPT])."""
    found = [_search(look, points.take(rows), prior.take(rows)) for rows in batches(len(points.a))]
    return join([m for m, _ in found]), np.concatenate([c for _, c in found])


def _search(look: Look, points: Points, prior: Prior) -> tuple[Motion, Floats]:
    rows = np.arange(len(points.a))
    count = len(YAW_QUANTILES)
    motion = _starts(look, replace(points, noise=points.noise * WIDE[0]), prior)
    many = np.repeat(rows, count)
    motion, costs = anneal(look, motion, points.take(many), prior.take(many), WIDE)
    chosen = _best(costs, count, KEPT)
    many = np.repeat(rows, KEPT)
    motion, costs = anneal(look, motion.take(chosen), points.take(many), prior.take(many), NARROW)
    order = _best(costs, KEPT, KEPT)
    return motion.take(order), costs[order]


def _best(costs: Floats, count: int, keep: int) -> Rows:
    """Indices of the `keep` cheapest of each group of `count`, cheapest first."""
    order = np.argsort(costs.reshape(-1, count), axis=1, kind="stable")[:, :keep]
    return np.asarray((np.arange(len(order))[:, None] * count + order).ravel())


def _starts(look: Look, points: Points, prior: Prior) -> Motion:
    """For each step and each of the 7 quantiles of its points' change of azimuth (far points have the true
    one, wherever in the order they stand): the slide that goes with it and the best of 10 directions."""
    azimuth = np.where(points.known, np.arctan(points.a[..., 0]) - np.arctan(points.b[..., 0]), np.nan)
    yaws = np.nanquantile(azimuth, YAW_QUANTILES, axis=1)
    around = np.arange(8) * np.pi / 4
    travels = np.stack([np.sin(around), np.zeros(8), np.cos(around)], -1)
    travels = np.concatenate([travels, [[0, 1.0, 0], [0, -1.0, 0]]])
    starts = []
    for yaw in yaws:
        p = prior.mean.copy()
        p[:, 0], p[:, 1] = 0.0, yaw
        at, _ = warp(look, p, points.a)
        p[:, 0] = np.nanmedian(np.where(points.known, points.b[..., 1] - at[..., 1], np.nan), axis=1)
        costs = [
            cost(residuals(look, Motion(p, np.broadcast_to(t, p.shape)), points), points) for t in travels
        ]
        starts.append(Motion(p, travels[np.argmin(costs, axis=0)]))
    return Motion(
        np.stack([m.warp for m in starts], 1).reshape(-1, 3),
        np.stack([m.direction for m in starts], 1).reshape(-1, 3),
    )


def settle(look: Look, points: Points, prior: Prior, motion: Motion) -> tuple[Motion, Floats]:
    """The motions of M steps in a row that explain the points and continue each other; (motion, costs [M]).

    motion: [M * KEPT] of `search`. Candidates of a step are those and its neighbours' best motions, refined.
    """
    steps = len(points.a)
    own = np.arange(steps)
    candidates = [_refined(look, points, prior, motion.take(own * KEPT + i)) for i in range(KEPT)]
    best, costs = candidates[0]
    for _ in range(PASSES):
        for offset in (-1, 1):
            near = best.take(np.clip(own + offset, 0, steps - 1))
            candidates.append(_refined(look, points, prior, near))
        warps = np.stack([m.warp for m, _ in candidates], 1)
        travels = np.stack([m.direction for m, _ in candidates], 1)
        every = np.stack([c for _, c in candidates], 1)
        path = _continued(warps, travels, every)
        best, costs = Motion(warps[own, path], travels[own, path]), every[own, path]
    return best, costs


def _refined(look: Look, points: Points, prior: Prior, motion: Motion) -> tuple[Motion, Floats]:
    found, costs = [], []
    for rows in batches(len(motion.warp)):
        near = Motion(motion.warp[rows].copy(), motion.direction[rows])
        if look is Look.SHEAR:
            near.warp[:, 2] = prior.mean[rows, 2]
        m, c = anneal(look, near, points.take(rows), prior.take(rows), (WIDE[1], *NARROW))
        found.append(m)
        costs.append(c)
    return join(found), np.concatenate(costs)


VEER, SWERVE, SWERVE_RAD = 10.0, 5.0, 0.05
"""A near wall that fills the view has two motions that fit equally (travel and turn trade places); the one
that goes on as before is right. Off by more than 2 degrees: 1.2 % of nav02's steps without, 0.7 % with; 0.2
and 0 % of nav10's. Both are small against the 40-70 points by which a wrong motion of a good view loses."""


def _continued(warps: Floats, travels: Floats, costs: Floats) -> Rows:
    """Which candidate of each step: the cheapest chain, [M]. warps, travels: [M, K, 3]; costs: [M, K].

    To veer by 90 degrees costs VEER points; to change the turn by SWERVE_RAD or more, SWERVE.
    """
    steps, _ = costs.shape
    total = costs.copy()
    back = np.zeros(costs.shape, np.intp)
    for k in range(1, steps):
        veer = 1 - travels[k - 1] @ travels[k].T
        swerve = np.minimum(1, np.abs(warps[k - 1, :, None, 1] - warps[k, None, :, 1]) / SWERVE_RAD)
        reach = total[k - 1][:, None] + VEER * veer + SWERVE * swerve
        back[k] = reach.argmin(axis=0)
        total[k] += reach.min(axis=0)
    path = np.zeros(steps, np.intp)
    if steps:
        path[-1] = total[-1].argmin()
    for k in range(steps - 1, 0, -1):
        path[k - 1] = back[k, path[k]]
    return path


def turn_only(look: Look, points: Points, prior: Prior, motion: Motion) -> Motion:
    """The motion of each step that best explains its points without travel."""
    found = []
    for rows in batches(len(motion.warp)):
        still = Motion(motion.warp[rows], np.zeros((len(rows), 3)))
        found.append(anneal(look, still, points.take(rows), prior.take(rows), (*WIDE, *NARROW))[0])
    return join(found)


def misfit(look: Look, points: Points, motion: Motion) -> Floats:
    """Median residual of each step's points, in units of the noise; [M]."""
    out = np.zeros(len(motion.warp))
    for rows in batches(len(out)):
        part = points.take(rows)
        size = np.sqrt(residuals(look, motion.take(rows), part).squared) / part.noise
        out[rows] = np.nanmedian(np.where(part.known, size, np.nan), axis=1)
    return out


def put(into: Motion, rows: Rows | Bools, motion: Motion) -> None:
    into.warp[rows] = motion.warp
    into.direction[rows] = motion.direction


def join(parts: list[Motion]) -> Motion:
    return Motion(np.concatenate([m.warp for m in parts]), np.concatenate([m.direction for m in parts]))

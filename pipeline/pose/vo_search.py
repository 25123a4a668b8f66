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
    """Best motion of each of M steps, taken by itself, with its cost [M]."""
    found = [_search(look, points.take(rows), prior.take(rows)) for rows in batches(len(points.a))]
    return join([m for m, _ in found]), np.concatenate([c for _, c in found])


def _search(look: Look, points: Points, prior: Prior) -> tuple[Motion, Floats]:
    rows = np.arange(len(points.a))
    motion, count = _starts(look, replace(points, noise=points.noise * WIDE[0]), prior), len(YAW_QUANTILES)
    for widths, kept in ((WIDE, 3), (NARROW, 1)):
        many = np.repeat(rows, count)
        motion, costs = anneal(look, motion, points.take(many), prior.take(many), widths)
        order = np.argsort(costs.reshape(-1, count), axis=1, kind="stable")[:, :kept]
        chosen = (rows[:, None] * count + order).ravel()
        motion, costs, count = motion.take(chosen), costs[chosen], kept
    return motion, costs


def _starts(look: Look, points: Points, prior: Prior) -> Motion:
    """For each step and each of the 7 quantiles of its points' change of azimuth (far points have the true one,
    wherever in the order they stand): the slide that goes with it and the best of 10 directions of travel."""
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
    """Best motion of each of M steps in a row, from its own and its two neighbours' motions as starts."""
    best, costs = Motion(motion.warp.copy(), motion.direction.copy()), np.full(len(motion.warp), np.inf)
    for rows in batches(len(costs)):
        for offset in (0, -1, 1):
            near = motion.take(np.clip(rows + offset, 0, len(costs) - 1))
            if look is Look.SHEAR:
                near.warp[:, 2] = prior.mean[rows, 2]
            trial, c = anneal(look, near, points.take(rows), prior.take(rows), (WIDE[1], *NARROW))
            better = c < costs[rows]
            put(best, rows[better], trial.take(np.flatnonzero(better)))
            costs[rows[better]] = c[better]
    return best, costs


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

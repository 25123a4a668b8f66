"""Chunks at which a turn comes back to what was seen before, and chunks that show what never was.

Only headings count, so only turns on the spot do (the panoramas). A column of latents is an angle; what of a
chunk is in neither the first nor the last latent is hidden, and memory alone can know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.learn.world import VIEW
from schemas.action import YAW

COLUMNS = 16
LEAST_HIDDEN = 0.2
"""Least share of a chunk's columns that is hidden."""
KNOWN, UNKNOWN = 0.95, 0.05
"""Of what is hidden: at least so much was seen before (a return), or at most (the placebo)."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Place:
    """A chunk of a clip: `clip` as given, behind `history` chunks. hidden: bool [4, 16], columns of its
    latents that are in neither the first nor the last latent."""

    clip: int
    history: int
    hidden: Bools


def find(
    rows: dict[int, npt.NDArray[np.float32]], histories: range, chunk: int
) -> tuple[list[Place], list[Place]]:
    """(returns, placebos): of each clip the first of either. rows: float32 [T, 6] action rows by clip."""
    back: list[Place] = []
    new: list[Place] = []
    for clip, actions in rows.items():
        heading = np.cumsum(actions[:, YAW].astype(np.float64))
        found = [_place(clip, heading, h, chunk) for h in histories if chunk * (h + 1) <= len(actions)]
        told = [(place, seen) for place, seen in found if place.hidden.mean() >= LEAST_HIDDEN]
        back += [p for p, seen in told if seen >= KNOWN][:1]
        new += [p for p, seen in told if seen <= UNKNOWN][:1]
    return back, new


def _place(clip: int, heading: npt.NDArray[np.float64], history: int, chunk: int) -> tuple[Place, float]:
    """A chunk, and the share of its hidden columns that some latent between the first and last has shown."""
    first = chunk * history
    offsets = (np.arange(COLUMNS) + 0.5) / COLUMNS * VIEW - VIEW / 2
    angles = heading[first : first + chunk, None] + offsets
    hidden = ~(_shows(heading[0], angles) | _shows(heading[first - 1], angles))
    seen = np.any([_shows(heading[k], angles) for k in range(1, first - 1)], axis=0)
    share = float(seen[hidden].mean()) if hidden.any() else 0.0
    return Place(clip, history, hidden), share


def _shows(heading: float, angles: npt.NDArray[np.float64]) -> Bools:
    """Which angles a picture that looks along `heading` shows whole columns of."""
    off = (angles - heading + 180.0) % 360.0 - 180.0
    return np.asarray(np.abs(off) <= VIEW / 2, np.bool_)

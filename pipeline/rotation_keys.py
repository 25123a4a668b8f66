"""Rate of a turn key as a function of the time since the press. Source: spec/faults.md C2, C7.

Games ramp: Doom turns at half its walking speed, a quarter of its running speed, for the first five tics of a
press. The rate is piecewise constant; where it changes is found, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.rotation_robust import LEAST_STEPS, NOISE_SHARE, Value, middle
from schemas.action import RampLevel

Floats = npt.NDArray[np.float64]

LEAST_LEVEL = 10
"""Steps that a level of a ramp needs: a level is seen once a press, so two presses of five frames."""
LONGEST_RAMP_S = 2.0
"""Where a ramp may end. Later changes are not the press's."""
GRAIN_S = 0.005
"""Ages nearer to each other than this are not told apart: a sixth of a frame, and what a clock jitters."""


@dataclass(frozen=True)
class Held:
    """N steps with a key held. rate: [N], deg/s to the key's side. since_press: [N], seconds from the press
    to the step's start, where a change of direction is a new press. since_idle: the same, where only letting
    go of both keys ends a press. side: [N], -1 or 1. clip: [N], index of the recording."""

    rate: Floats
    since_press: Floats
    since_idle: Floats
    side: Floats
    clip: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rate)

    def take(self, chosen: npt.NDArray[np.bool_]) -> Held:
        return Held(
            *(getattr(self, n)[chosen] for n in ("rate", "since_press", "since_idle", "side", "clip"))
        )


@dataclass(frozen=True)
class Ramp:
    """levels: by time, at least one. restarts: as in `InputRate`. cost: sum of absolute residuals."""

    levels: tuple[RampLevel, ...]
    steady: Value
    restarts: bool
    cost: float


def ramp(held: Held) -> Ramp | None:
    """Levels of a press; None below the minimum of steps. Of two readings of "since the press" the one that
    explains the steps better: in Doom a change of direction does not start the ramp again."""
    if len(held) < LEAST_STEPS:
        return None
    new, old = (_levels(ages, held.rate, restarts) for ages, restarts in _readings(held))
    return old if old.cost < new.cost else new


def _readings(held: Held) -> tuple[tuple[Floats, bool], tuple[Floats, bool]]:
    return (held.since_press, True), (held.since_idle, False)


def _levels(ages: Floats, rate: Floats, restarts: bool) -> Ramp:
    order = np.argsort(ages, kind="stable")
    ages, rate = ages[order], rate[order]
    edges = [0, *sorted(_cuts(ages, rate, 0, len(rate))), len(rate)]
    parts = [rate[a:b] for a, b in pairwise(edges)]
    found = [middle(part) for part in parts]
    starts = [0.0] + [float(ages[e]) for e in edges[1:-1]]
    levels = tuple(
        RampLevel(from_s=start, value=v.value, n=v.n, mad=v.mad)
        for start, v in zip(starts, found, strict=True)
    )
    cost = float(sum(np.abs(part - v.value).sum() for part, v in zip(parts, found, strict=True)))
    return Ramp(levels, found[-1], restarts, cost)


def _cuts(ages: Floats, rate: Floats, start: int, stop: int) -> list[int]:
    """Where the rate changes within [start, stop) of the steps in order of age: the cut that leaves the least
    absolute residual, if it parts two levels that differ beyond doubt; then the same on either side."""
    grain = np.round(ages[start:stop] / GRAIN_S)
    firsts = np.flatnonzero(np.diff(grain) > 0) + start + 1
    firsts = firsts[
        (firsts - start >= LEAST_LEVEL) & (stop - firsts >= LEAST_LEVEL) & (ages[firsts] <= LONGEST_RAMP_S)
    ]
    if len(firsts) == 0:
        return []
    costs = [_residual(rate[start:cut]) + _residual(rate[cut:stop]) for cut in firsts]
    cut = int(firsts[int(np.argmin(costs))])
    left, right = middle(rate[start:cut]), middle(rate[cut:stop])
    doubt = max(NOISE_SHARE * abs(right.value), 4 * float(np.hypot(left.error, right.error)))
    if abs(left.value - right.value) <= doubt:
        return []
    return [*_cuts(ages, rate, start, cut), cut, *_cuts(ages, rate, cut, stop)]


def _residual(rate: Floats) -> float:
    return float(np.abs(rate - np.median(rate)).sum())

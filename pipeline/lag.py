"""Does the camera answer an input in the frame where the log says it was pressed?

Source: spec/faults.md W3: one frame of constant lag between log and picture shows nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_LAG = 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lag:
    """frames: the shift at which input and turn agree best; positive: the camera answers later than the log
    says. score: their correlation there. scores: correlation at -3..+3; NaN where it cannot be measured."""

    frames: int
    score: float
    scores: tuple[float, ...]


def scan(signal: Floats, turned: Floats) -> Lag | None:
    """Best lag of a turn input against the turn of the camera; None when either never changes.

    signal: float64 [F], signed input held from frame t to t+1. turned: float64 [F], degrees from t to t+1.
    NaN in either leaves the frame out. Of equal scores, the smallest shift.
    """
    scores = tuple(_correlation(signal, turned, shift) for shift in range(-MAX_LAG, MAX_LAG + 1))
    shifts = [s - MAX_LAG for s, score in enumerate(scores) if not np.isnan(score)]
    if not shifts:
        return None
    best = max(shifts, key=lambda s: (round(scores[s + MAX_LAG], 9), -abs(s)))
    return Lag(best, scores[best + MAX_LAG], scores)


def _correlation(signal: Floats, turned: Floats, shift: int) -> float:
    n = len(signal)
    a = signal[max(0, -shift) : n - max(0, shift)]
    b = turned[max(0, shift) : n - max(0, -shift)]
    both = ~(np.isnan(a) | np.isnan(b))
    if both.sum() < 2 or np.ptp(a[both]) == 0 or np.ptp(b[both]) == 0:
        return float("nan")
    return float(np.corrcoef(a[both], b[both])[0, 1])

"""Robust statistics of a rotation rate. Source: spec/faults.md C2: a plain median is dragged to zero by idle
frames, a mean up by cuts; the median of a mouse's turn speed is 4 % low where its gain per count is right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_STEPS = 30
"""Steps below which nothing is called calibrated."""
WORST_ERROR = 0.02
"""Largest standard error of a calibrated value, as a share of it."""
NOISE_SHARE = 0.05
"""Two values nearer to each other than this share are one: `vo` is off by up to 3 % in single rooms."""
MODES_APART = 0.1
"""Recordings of one game that differ by more than this do not share a sensitivity."""
MINOR_MODE = 0.15
"""Share of the steps, or of those of all recordings, that a second sensitivity needs to be one. Zooms and
vehicles below this are outliers of the first."""
_TUKEY = 4.685  # 95 % efficient for Gaussian noise
_MAD_SIGMA = 1.4826
_SMALLEST_SIGMA_DEG = 0.003  # an engine's angle is a whole number of 360/65536 degrees, say


@dataclass(frozen=True)
class Value:
    """An estimate: n values, their median absolute deviation, standard error of the value."""

    value: float
    n: int
    mad: float
    error: float

    @property
    def calibrated(self) -> bool:
        return self.n >= LEAST_STEPS and self.error <= WORST_ERROR * abs(self.value)


def middle(values: Floats) -> Value:
    """Median of N >= 1 values. On rates from `vo` it was as near to the truth as a biweight mean (0.2-0.4 %)
    and, unlike the half-sample mode, steady for N < 100."""
    value = float(np.median(values))
    mad = float(np.median(np.abs(values - value)))
    return Value(value, len(values), mad, 1.2533 * _MAD_SIGMA * mad / np.sqrt(len(values)))


def gain(columns: Floats, turned: Floats) -> tuple[Value, Floats]:
    """Degrees per count over N steps, through the origin: Tukey's biweight from a least-absolute start.

    columns: [N, 3], counts of the step before, of the step and of the step after. The sum of the three
    coefficients is the gain: a log that is read at another phase than the picture, or a smoothed mouse,
    spreads a count over two steps, and a fit to the step's own counts would come out low by regression
    dilution. Also returns the counts that reach each step by that fit, [N].
    """
    counts = columns[:, 1]
    sure = counts != 0
    ratio = turned[sure] / counts[sure]
    order = np.argsort(ratio, kind="stable")
    weight = np.cumsum(np.abs(counts[sure])[order])
    start = float(ratio[order][np.searchsorted(weight, weight[-1] / 2)])
    fit = np.array([0.0, start, 0.0])
    covariance = np.zeros((3, 3))
    for _ in range(30):
        rest = turned - columns @ fit
        sigma = max(_MAD_SIGMA * float(np.median(np.abs(rest))), _SMALLEST_SIGMA_DEG)
        weights = np.clip(1 - (rest / (_TUKEY * sigma)) ** 2, 0.0, None) ** 2
        # A ridge of 1e-9 of the trace keeps constant counts solvable: then only the sum is determined.
        normal = columns.T @ (weights[:, None] * columns)
        normal += 1e-9 * np.trace(normal) * np.eye(3)
        fit = np.linalg.solve(normal, columns.T @ (weights * turned))
        covariance = sigma**2 * np.linalg.inv(normal)
    value = float(fit.sum())
    mad = float(np.median(np.abs(ratio - value)))
    error = float(np.sqrt(max(0.0, float(covariance.sum()))))
    reaching = columns @ fit / value if value else counts
    return Value(value, int(sure.sum()), mad, error), reaching


def two_modes(values: Floats, within: Floats) -> tuple[float, float] | None:
    """Two clusters of N positive rates, smaller first, when each holds `MINOR_MODE` of them or more.

    within: [N], how far a value may be from its cluster's, as a share of it (the noise of that step).
    """
    first = _densest(values, within)
    near = np.abs(values / first - 1) <= within
    rest = ~near
    if rest.sum() < max(LEAST_STEPS / 2, MINOR_MODE * len(values)):
        return None
    second = _densest(values[rest], within[rest])
    other = rest & (np.abs(values / second - 1) <= within)
    apart = max(first, second) / min(first, second) - 1
    if apart < 2 * MODES_APART or min(near.sum(), other.sum()) < MINOR_MODE * len(values):
        return None
    pair = sorted((float(np.median(values[near])), float(np.median(values[other]))))
    return pair[0], pair[1]


def _densest(values: Floats, within: Floats) -> float:
    """The value with most others around it."""
    ordered = np.sort(values)
    width = 1 + float(np.median(within))
    count = np.searchsorted(ordered, ordered * width, side="right") - np.arange(len(ordered))
    best = int(np.argmax(count))
    return float(np.median(ordered[best : best + count[best]]))

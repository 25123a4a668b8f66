"""Means with bootstrap intervals, paired where two worlds played the same cases.

Cases that begin with the same picture are alike, so starts are drawn, not cases. Source: issue of evaluation;
DESIGN rule 9 (every draw has a key).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DRAWS = 2000
"""The ends of an interval move by 2 % of its width from key to key."""
LEVEL = 0.95


def keyed(seed: int, *role: str | int) -> np.random.Generator:
    """A generator that depends on the seed and the role alone."""
    digest = hashlib.sha256("|".join(map(str, (seed, *role))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


@dataclass(frozen=True)
class Interval:
    """A mean over n cases of `groups` starts, and the 95 % interval of it. low, high: NaN with one start;
    everything NaN without a case."""

    mean: float
    low: float
    high: float
    n: int
    groups: int

    def clear_of(self, value: float) -> bool:
        """Does the interval lie wholly above or below a value. An interval that is not known does not."""
        return self.low > value or self.high < value

    def row(self) -> dict[str, float | int | None]:
        """For JSON, which has no NaN."""
        values = {"mean": self.mean, "low": self.low, "high": self.high}
        return {
            **{k: v if math.isfinite(v) else None for k, v in values.items()},
            "n": self.n,
            "groups": self.groups,
        }


def interval(values: Sequence[float] | Floats, groups: Sequence[str], seed: int = 0) -> Interval:
    """Mean and percentile bootstrap of it over starts. values: one a case, NaN where a case says nothing.

    groups: start of each case. A start weighs as much as it has cases.
    """
    given = np.asarray(values, np.float64)
    known = np.isfinite(given)
    names, of = np.unique(np.asarray(groups)[known], return_inverse=True)
    n, count = int(known.sum()), len(names)
    if not n:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    mean = float(given[known].mean())
    if count == 1:
        return Interval(mean, math.nan, math.nan, n, 1)
    sums, sizes = np.bincount(of, given[known], count), np.bincount(of, minlength=count)
    drawn = keyed(seed, "bootstrap").integers(0, count, (DRAWS, count))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), n, count)


def paired(
    left: Sequence[float] | Floats, right: Sequence[float] | Floats, groups: Sequence[str], seed: int = 0
) -> Interval:
    """Mean of left - right, case by case. Raises ValueError unless both have the same cases."""
    if len(left) != len(right):
        raise ValueError(f"{len(left)} cases against {len(right)}: pairs must be of the same cases")
    return interval(np.asarray(left, np.float64) - np.asarray(right, np.float64), groups, seed)

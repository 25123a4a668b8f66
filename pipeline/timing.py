"""From the times at which a source shows its frames to a constant rate: which source frame each slot shows.

Source: spec/faults.md D1, D4, W7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

# A Matroska clock of 1 ms is off by at most 0.03 frame at 60 fps; a dropped frame is off by 1.
TOLERANCE = Fraction(1, 10)


@dataclass(frozen=True, slots=True)
class Timing:
    """rate: frames a second, exact; constant: every frame lies within 0.1 frame of its place k/rate, or the
    places that are empty lie in damage; source_index: int64 [N], source frame that slot k shows;
    ok: bool [N], False where that frame, or the time of the slot, lies in damage; factor: how often the
    source's rate was divided."""

    rate: Fraction
    constant: bool
    source_index: npt.NDArray[np.int64]
    ok: npt.NDArray[np.bool_]
    factor: int


def plan(
    pts: npt.NDArray[np.int64],
    ok: npt.NDArray[np.bool_],
    damaged: Sequence[tuple[int, int]],
    time_base: Fraction,
    rates: Sequence[Fraction],
    max_fps: float,
) -> Timing:
    """Constant-rate timing of a source of F >= 1 frames.

    pts: int64 [F], increasing; ok: bool [F]; damaged: spans of PTS; rates: the header's guesses, which are
    believed only where the PTS agree with them. The rate of a source that has none is that of its median
    step. Slot k, at k/rate after the first frame, shows the frame nearest in PTS; of two, the earlier.
    A rate above max_fps is divided by 2 until it is not: even frames stay.
    """
    rate, places = _rate(pts, time_base, rates)
    constant = places is not None and _holes_are_damage(places, pts[0], rate, time_base, damaged)
    factor = 1
    while rate / factor > max_fps:
        factor *= 2
    slow = rate / factor
    # Exact integers: frame time and slot time, both in units of 1 / (time_base.den * slow.num) s.
    at = (pts - pts[0]) * (time_base.numerator * slow.numerator)
    step = time_base.denominator * slow.denominator
    slots = int((2 * int(at[-1]) + step) // (2 * step)) + 1 if factor == 1 else int(at[-1]) // step + 1
    if factor > 1 and constant and places is not None:
        slots = int(places[-1]) // factor + 1
    target = np.arange(slots, dtype=np.int64) * step
    right = np.minimum(np.searchsorted(at, target), len(at) - 1)
    left = np.maximum(right - 1, 0)
    source = np.where(np.abs(at[left] - target) <= np.abs(at[right] - target), left, right)
    fine = ok[source].copy()
    ticks = pts[0] + target // (time_base.numerator * slow.numerator)
    for start, stop in damaged:
        fine &= (ticks < start) | (ticks >= stop)
    return Timing(slow, constant, source.astype(np.int64), fine, factor)


def _rate(
    pts: npt.NDArray[np.int64], time_base: Fraction, rates: Sequence[Fraction]
) -> tuple[Fraction, npt.NDArray[np.int64] | None]:
    """The rate, and the place of every frame at it, or None where no rate fits all frames."""
    if len(pts) == 1:
        return (rates[0] if rates else Fraction(1)), np.zeros(1, np.int64)
    median = int(np.median(np.diff(pts)))
    by_median = 1 / (median * time_base)
    average = Fraction(len(pts) - 1, int(pts[-1] - pts[0])) / time_base
    for rate in (*rates, by_median, average):
        places = _places(pts, time_base, rate)
        if places is not None:
            return rate, places
    # Of the header's rates, one that the median step cannot be told from is the exact one (1001s, ms clocks).
    near = [r for r in rates if abs(1 / (r * time_base) - median) < 1]
    return (near[0] if near else by_median), None


def _places(pts: npt.NDArray[np.int64], time_base: Fraction, rate: Fraction) -> npt.NDArray[np.int64] | None:
    scaled = (pts - pts[0]) * (time_base.numerator * rate.numerator)
    step = time_base.denominator * rate.denominator
    places = (2 * scaled + step) // (2 * step)
    off = np.abs(scaled - places * step)
    fits = np.all(off * TOLERANCE.denominator <= step * TOLERANCE.numerator) and np.all(np.diff(places) > 0)
    # The median step must be one place: a rate twice as fast would fit too.
    return places if fits and np.median(np.diff(places)) == 1 else None


def _holes_are_damage(
    places: npt.NDArray[np.int64],
    first: int,
    rate: Fraction,
    time_base: Fraction,
    damaged: Sequence[tuple[int, int]],
) -> bool:
    holes = np.setdiff1d(np.arange(int(places[-1]) + 1), places)
    ticks = first + holes * (rate.denominator * time_base.denominator) // (
        rate.numerator * time_base.numerator
    )
    inside = np.zeros(len(holes), np.bool_)
    for start, stop in damaged:
        inside |= (ticks >= start) & (ticks < stop)
    return bool(inside.all())

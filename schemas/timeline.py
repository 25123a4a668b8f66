"""The one place for index arithmetic: frames, windows, the 16 fps grid, latents, chunks, caption intervals.

Units, said once:
  frame     k-th presented frame of a clip at its native rate, k = 0..F-1
  grid      entry g = 0..G-1 of the 16 fps grid; entry g is the frame nearest in PTS to g/16 s
  latent    k = 0..T-1; latent 0 = grid entry 0, latent k = grid entries 4k-3..4k
  chunk     4 latents; a clip of m chunks has 16m-3 grid entries and 4m latents
  interval  5 s of caption, from the clip's start; the last one may be short
All spans are half-open. Times are exact (`Fraction`, or integer ticks of an exact time base).
Source: DESIGN 2; spec/worldplay2.md a.6, k; spec/faults.md W1, W5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

WINDOW = 150
OVERLAP = 10
GRID_RATE = 16
FRAMES_PER_LATENT = 4
LATENTS_PER_CHUNK = 4
GRID_PER_CHUNK = FRAMES_PER_LATENT * LATENTS_PER_CHUNK
CAPTION_INTERVAL_S = Fraction(5)


class TimelineError(ValueError):
    """A length, index or time that the timeline does not allow."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of indices [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise TimelineError(f"a span must satisfy 0 <= start < stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop

    def slice(self) -> slice:
        return slice(self.start, self.stop)


# --- pose and quality windows -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Windows over F frames. `leftover` frames lie behind the last regular window; when it is not zero the
    last window is back-aligned to end at F, so that every frame lies in a window."""

    spans: tuple[Span, ...]
    leftover: int


def windows(frames: int, size: int = WINDOW, overlap: int = OVERLAP) -> WindowPlan:
    """Windows of `size` frames at stride `size - overlap`; the tail is covered by one back-aligned window.

    frames: F >= 0. Fewer than `size` frames give no window and leftover = F.
    Raises TimelineError on a negative length or an overlap outside [0, size).
    Source: spec/faults.md W1; DESIGN 2.
    """
    if frames < 0:
        raise TimelineError(f"a clip cannot have {frames} frames")
    if not 0 <= overlap < size:
        raise TimelineError(f"overlap {overlap} must lie in [0, {size})")
    if frames < size:
        return WindowPlan((), frames)
    starts = range(0, frames - size + 1, size - overlap)
    leftover = frames - (starts[-1] + size)
    spans = [Span(s, s + size) for s in starts]
    if leftover:
        spans.append(Span(frames - size, frames))
    return WindowPlan(tuple(spans), leftover)


# --- the 16 fps grid --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """Mapping of the 16 fps grid onto source frames.

    frames: int64 [G], source frame of each entry; G = 16m - 3 for m chunks, or 0.
    jitter_s: float64 [G], PTS of the chosen frame minus the grid time, in seconds.
    repeats: entries that show the same source frame as the entry before (a source below 16 fps).
    """

    frames: npt.NDArray[np.int64]
    jitter_s: npt.NDArray[np.float64]
    repeats: int

    @property
    def latents(self) -> int:
        return latents_of(len(self.frames)) if len(self.frames) else 0


def chunks_in(entries: int) -> int:
    """Whole chunks in `entries` grid entries: the largest m with 16m - 3 <= entries."""
    if entries < 0:
        raise TimelineError(f"a grid cannot have {entries} entries")
    return (entries + FRAMES_PER_LATENT - 1) // GRID_PER_CHUNK


def latents_of(entries: int) -> int:
    """Latents of a trimmed grid: T = 4m for G = 16m - 3. Raises TimelineError for any other length.

    Source: spec/worldplay2.md a.1 (T_pix = 4T - 3); 125 entries = 32 latents, 1277 = 320.
    """
    m = chunks_in(entries)
    if entries <= 0 or entries != GRID_PER_CHUNK * m - (FRAMES_PER_LATENT - 1):
        raise TimelineError(f"{entries} grid entries are not a whole number of chunks (16m - 3)")
    return LATENTS_PER_CHUNK * m


def grid(pts: npt.ArrayLike, time_base: Fraction) -> Grid:
    """The 16 fps grid of a clip, trimmed to whole chunks.

    pts: int [F], strictly increasing presentation times in ticks of `time_base` seconds.
    Entry g is the frame nearest to pts[0] + g/16 s; of two equally near frames, the earlier. The grid ends
    at the last entry that is not later than the last frame. Exact integer arithmetic throughout.
    Raises TimelineError when pts do not increase.
    Source: DESIGN 2; spec/faults.md W5 (error at most half a frame everywhere, equality counts as inside).
    """
    ticks = np.asarray(pts, dtype=np.int64)
    if ticks.ndim != 1 or np.any(np.diff(ticks) <= 0):
        raise TimelineError("presentation times must be one strictly increasing row")
    if len(ticks) == 0:
        return Grid(np.zeros(0, np.int64), np.zeros(0), 0)
    # In units of time_base.numerator... : frame time = (pts - pts0) * num / den, grid time = g / 16.
    # Both times 16 * den: frame -> (pts - pts0) * num * 16, grid -> g * den.
    num, den = time_base.numerator, time_base.denominator
    at = (ticks - ticks[0]) * (num * GRID_RATE)
    entries = int(at[-1] // den) + 1
    keep = max(0, GRID_PER_CHUNK * chunks_in(entries) - (FRAMES_PER_LATENT - 1))
    target = np.arange(keep, dtype=np.int64) * den
    right = np.minimum(np.searchsorted(at, target, side="left"), len(at) - 1)
    left = np.maximum(right - 1, 0)
    chosen = np.where(np.abs(at[left] - target) <= np.abs(at[right] - target), left, right)
    jitter = (at[chosen] - target) / float(GRID_RATE * den)
    repeats = int(np.count_nonzero(np.diff(chosen) == 0))
    return Grid(chosen.astype(np.int64), jitter, repeats)


# --- latents and chunks -----------------------------------------------------------------------------------


def latent_entries(latent: int) -> Span:
    """Grid entries that latent k encodes: [0, 1) for k = 0, else [4k-3, 4k+1)."""
    if latent < 0:
        raise TimelineError(f"latent {latent} does not exist")
    last = FRAMES_PER_LATENT * latent
    return Span(max(0, last - FRAMES_PER_LATENT + 1), last + 1)


def latent_ends(frames: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Source frame at the end of every latent: grid entries 0, 4, 8, ...; int64 [T].

    frames: int64 [16m - 3], `Grid.frames`. Motion of latent k >= 1 runs from end k-1 to end k.
    """
    latents_of(len(frames))
    return frames[::FRAMES_PER_LATENT]


def chunk_latents(chunk: int) -> Span:
    """Latents of chunk i: [4i, 4i+4)."""
    return Span(LATENTS_PER_CHUNK * chunk, LATENTS_PER_CHUNK * (chunk + 1))


def latents_time(latents: Span) -> tuple[Fraction, Fraction]:
    """Start and end, in seconds from the clip's start, of the grid entries that these latents encode."""
    first = latent_entries(latents.start).start
    last = latent_entries(latents.stop - 1).stop
    return Fraction(first, GRID_RATE), Fraction(last, GRID_RATE)


# --- caption intervals ------------------------------------------------------------------------------------


def intervals(duration: Fraction) -> tuple[tuple[Fraction, Fraction], ...]:
    """Caption intervals that partition [0, duration) in steps of 5 s; the last one may be short.

    Source: spec/worldplay2.md k; DESIGN 2.
    """
    if duration <= 0:
        raise TimelineError(f"a clip cannot last {duration} s")
    edges: list[Fraction] = []
    t = Fraction(0)
    while t < duration:
        edges.append(t)
        t += CAPTION_INTERVAL_S
    return tuple(zip(edges, [*edges[1:], duration], strict=True))


def interval_at(duration: Fraction, time: Fraction) -> int:
    """Index of the interval that holds `time`, 0 <= time < duration."""
    if not 0 <= time < duration:
        raise TimelineError(f"time {float(time):.3f} s lies outside a clip of {float(duration):.3f} s")
    return bisect_right([a for a, _ in intervals(duration)], time) - 1


def interval_of_latents(duration: Fraction, latents: Span) -> int:
    """Interval whose prompt these latents use: the one that holds the middle of their time."""
    start, end = latents_time(latents)
    return interval_at(duration, (start + end) / 2)


def nearest(times: Sequence[Fraction], time: Fraction) -> int:
    """Index of the nearest of `times` (increasing, not empty); of two equally near, the earlier."""
    i = bisect_right(times, time)
    if i == 0:
        return 0
    if i == len(times):
        return i - 1
    return i - 1 if time - times[i - 1] <= times[i] - time else i

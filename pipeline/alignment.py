"""Which rows of a log belong to which frames of a video.

Two ways, and the key map says which: rows are frames of the source (first_frame anchors row 0), or rows carry
a time. Nothing is zipped: frames that no row covers stay uncovered, whatever the lengths.
Source: spec/faults.md W3, W5, W7.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from pipeline.sources.keymap import LogPart, PosePart
from pipeline.sources.sidecar import Columns, SidecarError
from schemas.clip import FrameTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NANO = 10**9


@dataclass(frozen=True)
class Alignment:
    """Rows of a log of R rows against F frames.

    nearest: int64 [F], the row of each frame, at most half a frame of the slower clock away; -1 for none.
    start, stop: int64 [F], rows [start, stop) held from frame k to k+1; may be empty.
    rows: R. extra_rows: rows before the first or behind the last frame.
    drift_frames: how far a pairing by row number would be off at the last common row; 0 without a clock.
    """

    nearest: Ints
    start: Ints
    stop: Ints
    rows: int
    extra_rows: int
    drift_frames: float

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """bool [F], frames that have a row."""
        return self.nearest >= 0

    def at(self, values: Floats) -> Floats:
        """float64 [F], the value of each frame's row; NaN without one."""
        return np.where(self.known, values[self.nearest], np.nan)

    def total(self, values: Floats) -> Floats:
        """float64 [F], sum of the values over each step; NaN where a row is missing or empty."""
        return np.where(self.known & (self._over(np.isnan(values)) == 0), self._over(values), np.nan)

    def held(self, values: Floats) -> Floats:
        """float64 [F], 1 where the value is not zero in any row of the step, else 0; NaN as in `total`.

        A step without rows (a log slower than the video, a repeated picture) takes its nearest row.
        """
        empty = self.start == self.stop
        alone = self.at(values)
        several = self.total((values != 0) + np.where(np.isnan(values), np.nan, 0.0))
        chosen = np.where(empty, alone, several)
        return np.where(np.isnan(chosen), np.nan, (chosen != 0).astype(np.float64))

    def _over(self, values: npt.NDArray[np.generic]) -> Floats:
        clean = np.where(np.isnan(values.astype(np.float64)), 0.0, values.astype(np.float64))
        sums = np.concatenate(([0.0], np.cumsum(clean)))
        out: Floats = sums[self.stop] - sums[self.start]
        return out


def align(table: FrameTable, part: LogPart | PosePart, columns: Columns, path: str) -> Alignment:
    """Rows of a log against the frames of the media file, on the clock of the recording that it belongs to.

    With `row: previous` a row brought its frame about, so it belongs to the step before. Raises SidecarError
    when the clock runs backwards or has gaps (two recordings in one log must be split), or is nowhere near
    the video.
    """
    shift = 1 if isinstance(part, LogPart) and part.row == "previous" else 0
    if not part.time:
        rows = len(next(iter(columns.values())))
        return _by_frame(table, part.first_frame - shift, rows)
    times = columns[part.time]
    if np.isnan(times).any():
        raise SidecarError(f"{path} row {int(np.flatnonzero(np.isnan(times))[0])} has no time")
    if np.any(np.diff(times) < 0):
        row = int(np.flatnonzero(np.diff(times) < 0)[0]) + 1
        raise SidecarError(f"{path} row {row}: the clock runs backwards; split the recording there")
    seconds = times - part.clock_start - float(table.origin)
    if np.abs(seconds).max() > (limit := _longest(table)):
        far = seconds[np.argmax(np.abs(seconds))]
        raise SidecarError(
            f"{path}: its clock is {far:g} s away from frame 0 (at most {limit}); set clock_start"
        )
    return _by_time(table, seconds, shift)


def _by_frame(table: FrameTable, first: int, rows: int) -> Alignment:
    source = table.source_index - first
    after = np.concatenate((source[1:], source[-1:] + 1))
    start, stop = np.clip(source, 0, rows), np.clip(after, 0, rows)
    covered = (source >= 0) & (np.maximum(after, source + 1) <= rows)
    used = int(stop[-1] - start[0]) if len(source) else 0
    return Alignment(np.where(covered, source, -1), start, stop, rows, rows - used, 0.0)


def _longest(table: FrameTable) -> int:
    """Seconds from frame 0 that `_by_time` can hold exactly in its units."""
    den = table.time_base.denominator
    return int(2**61 // (_NANO * (den // gcd(den, _NANO))))


def _by_time(table: FrameTable, seconds: Floats, shift: int) -> Alignment:
    """Exact: both clocks in units of 1 / lcm(den, 1e9) s, doubled so that halves are whole."""
    rows = len(seconds)
    num, den = table.time_base.numerator, table.time_base.denominator
    g = gcd(den, _NANO)
    frames = 2 * table.pts * (num * (_NANO // g))
    log = 2 * np.rint(seconds * _NANO).astype(np.int64) * (den // g)
    log = log[: rows - shift]
    step = int(np.median(np.diff(frames))) if len(frames) > 1 else 2 * num * (_NANO // g)
    row_step = int(np.median(np.diff(log))) if len(log) > 1 else step
    if len(log) == 0:
        none = np.zeros(len(frames), np.int64)
        return Alignment(none - 1, none, none, rows, rows, 0.0)
    right = np.minimum(np.searchsorted(log, frames, side="left"), len(log) - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(log[left] - frames) <= np.abs(log[right] - frames), left, right)
    # Of two rates the slower sets what half a frame is: a 29 Hz log of a 30 fps video is up to 17.2 ms away.
    near = 2 * np.abs(log[nearest] - frames) <= max(step, row_step)
    # A row holds for row_step; it belongs to the step in which the middle of its hold lies. With equal rates
    # that is the nearest frame, and a jitter of less than half a frame cannot move a row to its neighbour.
    middle = log + row_step // 2
    edges = np.searchsorted(middle, np.concatenate((frames, frames[-1:] + step)), side="left")
    # A part of a recording begins somewhere in the log; a log of the whole begins with it.
    first = int(np.searchsorted(log, 0)) if table.origin else 0
    common = min(len(log) - first, len(frames)) - 1
    return Alignment(
        nearest=np.where(near, nearest + shift, -1),
        start=edges[:-1] + shift,
        stop=edges[1:] + shift,
        rows=rows,
        extra_rows=rows - int(edges[-1] - edges[0]),
        drift_frames=round(float(log[first + common] - frames[common]) / step, 3) if common >= 0 else 0.0,
    )

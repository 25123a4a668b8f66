"""What damage in one packet spoils: everything decoded from it up to the next key frame.

Kept in presentation time, so that a frame that never came out marks its place too.
Source: spec/faults.md D4.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

NO_TIME = -(1 << 63)
END = 1 << 62
REORDER = 16  # no codec shows a frame more than 16 after its place in decode order


class Packets:
    """The packets of one stream in decode order, and which of them are damaged.

    counted: the container (AVI) stores no presentation times and those that the demuxer guesses are wrong
    with B-frames; the k-th frame then has the time of the k-th packet, and what lies behind the first damage
    cannot be placed.
    """

    def __init__(self, counted: bool) -> None:
        self.counted = counted
        self._pts = array("q")
        self._key = bytearray()
        self._shown = bytearray()
        self._flagged: set[int] = set()
        self._times: set[int] = set()
        self._ends_early = False
        self._began_at: int | None = None

    def __len__(self) -> int:
        return len(self._pts)

    @property
    def hidden(self) -> int:
        return len(self._shown) - sum(self._shown)

    def add(self, packet: Any) -> None:
        time = packet.dts if self.counted else packet.pts
        self._pts.append(NO_TIME if time is None else time)
        self._key.append(bool(packet.is_keyframe))
        self._shown.append(not packet.is_discard)

    def begins_inside(self) -> None:
        """The packet handed over last, a key frame inside the file, is where reading began."""
        self._began_at = self._pts[-1]

    def time_of(self, frame: int) -> int | None:
        """Where times are counted: that of the k-th frame."""
        time = self._pts[frame] if frame < len(self) else NO_TIME
        return None if time == NO_TIME else time

    def flag_last(self) -> None:
        """The packet handed over last is damaged."""
        self._flagged.add(max(0, len(self) - 1))

    def flag(self, pts: int) -> None:
        """The packet that is presented at this time is damaged."""
        self._times.add(pts)

    def ends_early(self) -> None:
        """The file could not be read to its end."""
        self._ends_early = True

    def damage(
        self, frames: npt.NDArray[np.int64], stop: int = END
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Presentable packets that gave no frame, and the damaged half-open spans of PTS, merged.

        frames: int64 [F], increasing PTS of the frames that came out. stop: PTS at which decoding was ended;
        of packets from there on no frame is expected. A pass that began at a key frame inside the file
        expects none before it either: leading pictures of an open group refer to what was not read.
        A damaged packet spoils what is decoded after it up to the next key packet: from the earliest PTS
        among these up to the key's PTS (so leading pictures of an open group are inside).
        """
        pts = np.asarray(self._pts, np.int64)
        key = np.frombuffer(bytes(self._key), np.bool_)
        shown = np.frombuffer(bytes(self._shown), np.bool_)
        if self.counted:
            return self._counted_damage(pts, len(frames), stop)
        timed = pts != NO_TIME
        begin = self._began_at if self._began_at is not None else NO_TIME
        gone = shown & timed & ~np.isin(pts, frames) & (pts >= begin) & (pts < stop)
        bad = set(self._flagged) | set(np.flatnonzero(gone).tolist())
        if self._times:
            bad |= set(np.flatnonzero(np.isin(pts, np.fromiter(self._times, np.int64))).tolist())
        keys = np.flatnonzero(key)
        spans: list[tuple[int, int]] = []
        for at in sorted(bad):
            behind = keys[np.searchsorted(keys, at, side="right") :]
            stop = int(behind[0]) if len(behind) else len(pts)
            inside = pts[at:stop][timed[at:stop]]
            low = int(inside.min()) if len(inside) else END
            spans.append((low, int(pts[stop]) if stop < len(pts) else END))
        spans += [(t, t + 1) for t in sorted(self._times - set(pts.tolist()))]
        if self._ends_early:
            spans.append((int(pts[timed].max()) + 1 if timed.any() else 0, END))
        return int(gone.sum()), _merged(spans)

    def _counted_damage(
        self, times: npt.NDArray[np.int64], frames: int, stop: int
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        shown = np.frombuffer(bytes(self._shown), np.bool_)
        lost = max(0, int(np.count_nonzero(shown & (times < stop))) - frames)
        flagged = [*self._flagged, *np.flatnonzero(np.isin(times, list(self._times))).tolist()]
        if not (lost or flagged or self._ends_early):
            return 0, ()
        first = max(0, min(flagged, default=0) - REORDER)
        return lost, ((int(times[first]), END),)


def _merged(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(s for s in spans if s[0] < s[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)

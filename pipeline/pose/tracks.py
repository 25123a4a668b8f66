"""Point tracks of a clip: the dear part of visual odometry, made once in the decode pass.

`Tracker` is an observer of `pipeline.frames.frame_pass`. It follows corners from frame to frame with
pyramidal Lucas-Kanade and keeps where each of them was: nothing of the camera is needed, so that the motion
can be solved again with another focal length without decoding. Source: spec/faults.md W7.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.picture import Picture, native_planes

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

WORK_WIDTH = 640
COLUMNS = 16
"""Grid of square cells, 16 a row: 144 at 16:9. One corner is sought in every empty cell."""
CROWD = 2
"""Most points kept in one cell; older ones stay."""
STEPS_PER_PIXEL = 64
"""Positions are stored in 1/64 pixel of the working picture: finer than the noise of 0.1 px."""
EMPTY = np.uint16(65535)
LEVELS = 3
PATCH = 21
"""A 21-pixel patch over 3 halvings reaches 80 px, the shift at the edge of a 106 degree view in a turn of 7
degrees a frame."""
ROUND_TRIP_PX = 0.5
"""A point whose way there and back misses its start by more is dropped. On the navigation clips the way back
of 90 % of points ends within 0.1 px."""
CORNER = 1e-5
"""Smallest eigenvalue, as OpenCV scales it, of a corner worth following: low, for flat walls often show
nothing better, and the fit that follows weighs points by how well they agree."""
EDGE = 8
"""Corners nearer to the border (px) than this lose their patch at once."""


@dataclass(frozen=True, slots=True)
class Tracks:
    """Where P points were in each of F frames.

    at: uint16 [F, P, 2], x and y in 1/64 px of the working picture; 65535 where the slot is empty.
    linked: bool [F, P], the slot shows the same point of the scene as in the frame before.
    repeat: bool [F], the working picture equals the one before, bit for bit.
    width, height: of the working picture: the frame's own, or scaled to 640 wide where it is wider.
    """

    at: npt.NDArray[np.uint16]
    linked: Bools
    repeat: Bools
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.at)

    def steps(self) -> tuple[Floats, Floats, Bools]:
        """(from [S, P, 2], to [S, P, 2], known [S, P]) of the S = F - 1 steps k -> k + 1: offsets from the
        picture's centre as a share of its width; NaN where the point was not followed."""
        if len(self) < 2:
            empty = np.zeros((0, self.at.shape[1], 2))
            return empty, empty, empty[..., 0] > 0
        centre = np.array([self.width - 1, self.height - 1]) / 2
        known = self.linked[1:]
        at = (self.at / STEPS_PER_PIXEL - centre) / self.width
        hide = np.where(known, 0.0, np.nan)[..., None]
        return at[:-1] + hide, at[1:] + hide, known


class Tracker:
    """Observer that makes the `Tracks` of one clip. About 3 ms a frame of 640x360 on one core."""

    def __init__(self) -> None:
        self._last: npt.NDArray[np.uint8] | None = None
        self._at: npt.NDArray[np.float32] = np.zeros((0, 2), np.float32)
        self._live: Bools = np.zeros(0, np.bool_)
        self._rows: list[npt.NDArray[np.uint16]] = []
        self._links: list[Bools] = []
        self._repeat: list[bool] = []
        self._size = (0, 0)

    def see(self, index: int, picture: Picture) -> None:
        luma = _working(native_planes(picture.limited)[0])
        if self._last is None:
            self._begin(luma)
        linked = np.zeros(len(self._live), np.bool_)
        same = self._last is not None and np.array_equal(self._last, luma)
        if same:
            linked = self._live.copy()
        elif self._last is not None and self._live.any():
            linked = self._follow(self._last, luma)
        self._live = linked.copy()
        if not same:
            self._thin()
            self._seek(luma, ~linked)
        row = np.full((len(linked), 2), EMPTY)
        shown = self._live | linked
        row[shown] = np.rint(self._at[shown] * STEPS_PER_PIXEL).astype(np.uint16)
        self._rows.append(row)
        self._links.append(linked)
        self._repeat.append(same)
        self._last = luma

    def tracks(self) -> Tracks:
        """Raises ValueError when no frame was seen."""
        if not self._rows:
            raise ValueError("no frame was seen: run the tracker in a decode pass first")
        width, height = self._size
        return Tracks(
            np.stack(self._rows), np.stack(self._links), np.array(self._repeat, np.bool_), width, height
        )

    def _begin(self, luma: npt.NDArray[np.uint8]) -> None:
        height, width = luma.shape
        self._size = (width, height)
        self._cell = max(2 * EDGE, width // COLUMNS)
        self._grid = (-(-height // self._cell), -(-width // self._cell))
        slots = self._grid[0] * self._grid[1]
        self._at = np.zeros((slots, 2), np.float32)
        self._live = np.zeros(slots, np.bool_)

    def _follow(self, last: npt.NDArray[np.uint8], now: npt.NDArray[np.uint8]) -> Bools:
        """Move the live points on; which of them arrived."""
        live = np.flatnonzero(self._live)
        start = self._at[live]
        patch = (PATCH, PATCH)
        there, found, _ = cv2.calcOpticalFlowPyrLK(
            last, now, start, None, winSize=patch, maxLevel=LEVELS, minEigThreshold=1e-6
        )
        back, returned, _ = cv2.calcOpticalFlowPyrLK(
            now,
            last,
            there,
            start.copy(),
            winSize=patch,
            maxLevel=0,
            minEigThreshold=1e-6,
            flags=cv2.OPTFLOW_USE_INITIAL_FLOW,
        )
        width, height = self._size
        x, y = there[:, 0], there[:, 1]
        inside = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
        good = (found[:, 0] == 1) & (returned[:, 0] == 1) & inside
        good &= np.hypot(*(back - start).T) < ROUND_TRIP_PX
        linked = np.zeros(len(self._live), np.bool_)
        linked[live[good]] = True
        self._at[live[good]] = there[good]
        return linked

    def _cells(self) -> npt.NDArray[np.intp]:
        """Cell of every slot's point."""
        cell = (self._at / self._cell).astype(np.intp)
        return np.asarray(cell[:, 1] * self._grid[1] + cell[:, 0])

    def _thin(self) -> None:
        """Let go of points beyond two in a cell."""
        live = np.flatnonzero(self._live)
        cells = self._cells()[live]
        order = np.argsort(cells, kind="stable")
        ordered = cells[order]
        rank = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        self._live[live[order[rank >= CROWD]]] = False

    def _seek(self, luma: npt.NDArray[np.uint8], free: Bools) -> None:
        """Put the best corner of every empty cell into a slot that is free and was not followed to here."""
        rows, columns = self._grid
        half = cv2.resize(luma, (luma.shape[1] // 2, luma.shape[0] // 2), interpolation=cv2.INTER_AREA)
        score = cv2.cornerMinEigenVal(half, 5)
        height, width = score.shape
        edge = EDGE // 2
        side = self._cell // 2
        padded = np.zeros((rows * side, columns * side), np.float32)
        bottom, right = min(height, rows * side) - edge, min(width, columns * side) - edge
        padded[edge:bottom, edge:right] = score[edge:bottom, edge:right]
        cells = padded.reshape(rows, side, columns, side).transpose(0, 2, 1, 3).reshape(rows * columns, -1)
        best = cells.argmax(axis=1)
        empty = cells.max(axis=1) > CORNER
        empty[self._cells()[self._live]] = False
        wanted = np.flatnonzero(empty)
        slots = np.flatnonzero(free & ~self._live)[: len(wanted)]
        wanted = wanted[: len(slots)]
        x = wanted % columns * side + best[wanted] % side
        y = wanted // columns * side + best[wanted] // side
        self._at[slots] = np.stack([x, y], axis=1) * 2.0 + 0.5
        self._live[slots] = True


def _working(luma: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    height, width = luma.shape
    if width <= WORK_WIDTH:
        return np.ascontiguousarray(luma)
    size = (WORK_WIDTH, max(1, round(height * WORK_WIDTH / width)))
    return np.asarray(cv2.resize(luma, size, interpolation=cv2.INTER_AREA), np.uint8)

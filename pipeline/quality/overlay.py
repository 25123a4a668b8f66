"""What is painted over the world: black bars, a static overlay (HUD, text, logo), and the flags that name it.

An overlay stays where it is while the world behind it moves: the mean of its gradients over the clip is as
long as the mean of their lengths. A weapon in hand bobs and is no overlay; one that never moves is.
Nothing is claimed of a clip whose picture hardly moves. Flags are kept beside the scores, never filtered
by default. Source: spec/faults.md Q2; spec/formats.md 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.quality.measures import Bytes, Floats, Gradients, by_cell

Bools = npt.NDArray[np.bool_]

BLACK = 24
"""Limited-range luma that a black bar hardly passes: 16, and the ringing of a codec."""
GREY, TINT = 128.0, 8
"""Chroma of black, and the distance from it from which on a dark pixel has a colour (the sky of event07)."""
LIT = 0.02
"""Share of a row's pixels that ringing into a bar does not reach (q_letterbox60: 0.3 % in 4 rows)."""
THINNEST_BAR = 0.01
"""Share of the picture's side: thinner bars are rows that an encoder padded."""
MOVED_LEVELS, MOVED_SHARE = 2, 0.1
"""The world moved since the sample before when a tenth of the small picture changed by 2 levels. A weapon's
idle animation does not reach that, a turn of one degree does."""
FEWEST_MOVED = 16
"""Moved samples under which a scene that happens to stay in place looks like an overlay."""
COHERENT = 0.8
"""Length of the mean gradient to the mean length: at least 0.9 on 82 % of the status bar's edges in bad03,
under 0.8 everywhere in nav01-nav12, in which the weapon reaches 0.7."""
FAINTEST = 1.5
"""Mean gradient (luma levels a px) of an overlay's edge; the regulariser `DAMPING` is added to mean
lengths, so that rounding in flat parts is not coherent."""
DAMPING = 0.3
MOVING, MOVING_SHARE = 6.0, 0.7
"""Temporal standard deviation (levels) of a cell that moves, and the share of the world's cells that must.
A camera that stands (tc_nasa: 0.58) or turns on the spot in a bare arena (event07: 0.23) holds the
edges of the world in place; in play it is 0.86 to 1."""
CELL_SHARE = 0.05
"""Share of coherent pixels that makes a cell part of the overlay."""
STROKE = 6
"""Widest stroke of a letter, px of the working picture."""
STROKE_SHARE = 0.06
SEEN_THROUGH = 0.45
"""Motion beside the edges of a mark, as a share of the motion around it, from which on the world is seen
through it. Logos of 30 % white 0.53-0.80, opaque text and status bars 0.14-0.24, a weapon lit by the
world 0.59: but a weapon reaches the border of the picture, and a logo does not."""
BORDER = 4
LARGEST_MARK, LEAST_PART = 0.04, 0.001
"""Area of a mark; and least share of the picture in the edges of a part of an overlay: what holds still by
chance in a clip of 260 frames has up to 0.0006, a logo or a line of text 0.007 and more."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Black bars in pixels of the media file, over the whole clip."""

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Flags:
    """known: the picture moved enough to tell an overlay from the world; all else is 0 where it did not.

    hud_share: share of the area inside the bars under a static overlay. text_share: the part of it that has
    rows of strokes as letters do (drawn ornaments have them too, so it is an upper bound). watermark: the
    overlay holds a small mark through which the world is seen moving.
    """

    known: bool = False
    hud_share: float = 0.0
    text_share: float = 0.0
    watermark: bool = False


class Bars:
    """Rows and columns of the working picture that were lit in some sample: `LIT` of their pixels are not
    black. Dark blue is not."""

    def __init__(self) -> None:
        self._rows: Bools | None = None
        self._columns: Bools | None = None

    def see(self, work: Bytes, chroma: Sequence[Bytes]) -> None:
        """work [h, w]; chroma: the U and V planes at any size."""
        size = work.shape[1], work.shape[0]
        light = cv2.threshold(work, BLACK, 255, cv2.THRESH_BINARY)[1]
        half = size[0] // 2, max(1, size[1] // 2)
        u, v = (cv2.resize(plane, half, interpolation=cv2.INTER_AREA) for plane in chroma)
        colour = cv2.max(cv2.absdiff(u, GREY), cv2.absdiff(v, GREY))
        colour = cv2.threshold(colour, TINT, 255, cv2.THRESH_BINARY)[1]
        light |= cv2.resize(colour, size, interpolation=cv2.INTER_NEAREST)
        rows = np.asarray(cv2.reduce(light, 1, cv2.REDUCE_AVG)).ravel() > 255 * LIT
        columns = np.asarray(cv2.reduce(light, 0, cv2.REDUCE_AVG)).ravel() > 255 * LIT
        self._rows = rows if self._rows is None else self._rows | rows
        self._columns = columns if self._columns is None else self._columns | columns

    def crop(self, width: int, height: int) -> Crop:
        """In pixels of a picture width x height, rounded up. No bars where the whole clip is black."""
        if self._rows is None or self._columns is None or not (self._rows.any() and self._columns.any()):
            return Crop()
        return Crop(*_bar(self._rows, height), *_bar(self._columns, width))


def _bar(lit: Bools, size: int) -> tuple[int, int]:
    at = np.flatnonzero(lit)
    ends = int(at[0]), len(lit) - 1 - int(at[-1])
    first, last = (math.ceil(n * size / len(lit)) if n >= THINNEST_BAR * len(lit) else 0 for n in ends)
    return first, last


class Static:
    """Sums over samples in which the world moved: of gradients, and of the picture and its square."""

    def __init__(self) -> None:
        self._gx: Floats | None = None
        self._last: Bytes | None = None
        self._count = 0

    def see(self, fine: Gradients, work: Bytes, small: Bytes) -> None:
        """fine: gradients of the working picture; small: the same picture, a quarter the size."""
        if self._last is not None:
            changed = np.count_nonzero(cv2.absdiff(small, self._last) >= MOVED_LEVELS)
            if changed < MOVED_SHARE * small.size:
                return
        self._last = small
        self._count += 1
        if self._gx is None:
            self._gx, self._gy, self._length = fine.gx.copy(), fine.gy.copy(), fine.length.copy()
            self._pixels, self._places = _Spread(work), _Spread(small)
            return
        self._gx += fine.gx
        self._gy += fine.gy
        self._length += fine.length
        self._pixels.add(work)
        self._places.add(small)

    def overlay(self, active: Bools) -> tuple[Bools, Flags]:
        """(cells under an overlay [rows, 40], flags). active: cells inside the bars."""
        nothing = np.zeros_like(active), Flags()
        if self._gx is None or self._count < FEWEST_MOVED:
            return nothing
        n, rows = self._count, len(active)
        gx, gy = np.float32(1 / n) * self._gx, np.float32(1 / n) * self._gy
        strength = np.sqrt(gx * gx + gy * gy)  # the same bytes wherever the arrays lie, unlike cv2.magnitude
        held = (strength > FAINTEST) & (strength > COHERENT * (self._length / n + DAMPING))
        moving = by_cell(self._places.deviation(n), rows)
        dense = by_cell(held.astype(np.float32), rows)
        cells = (dense > CELL_SHARE) & active
        world = active & ~cells
        if not world.any() or np.mean(moving[world] >= MOVING) < MOVING_SHARE:
            return nothing
        filled = cv2.morphologyEx(cells.astype(np.uint8), cv2.MORPH_CLOSE, np.ones((3, 3), np.uint8)) > 0
        parts = [part for part in _parts(filled & active) if dense[part].sum() >= LEAST_PART * dense.size]
        filled = np.logical_or.reduce(parts) if parts else np.zeros_like(active)
        area, motion, around = int(active.sum()), self._pixels.deviation(n), _around(moving, world)
        flags = Flags(
            known=True,
            hud_share=round(float(filled.sum() / area), 4),
            text_share=round(float((_strokes(gx, held, rows) & filled).sum() / area), 4),
            watermark=any(_is_mark(part, held, motion, around) for part in parts),
        )
        return filled, flags


class _Spread:
    """Sum and sum of squares of pictures of one size, for their standard deviation over time."""

    def __init__(self, picture: Bytes) -> None:
        self._sum = picture.astype(np.float32)
        self._square = self._sum * self._sum

    def add(self, picture: Bytes) -> None:
        cv2.accumulate(picture, self._sum)
        cv2.accumulateSquare(picture, self._square)

    def deviation(self, count: int) -> Floats:
        """float32, the size of the pictures."""
        mean = self._sum / np.float32(count)
        return np.asarray(np.sqrt(np.maximum(self._square / np.float32(count) - mean * mean, 0)), np.float32)


def _around(motion: Floats, world: Bools) -> Floats:
    """Mean motion of the world's cells in the 7x7 cells around each."""
    weight = world.astype(np.float32)
    total = cv2.boxFilter(
        motion * weight, cv2.CV_32F, (7, 7), normalize=False, borderType=cv2.BORDER_CONSTANT
    )
    count = cv2.boxFilter(weight, cv2.CV_32F, (7, 7), normalize=False, borderType=cv2.BORDER_CONSTANT)
    return np.asarray(total / np.maximum(count, 1), np.float32)


def _strokes(gx: Floats, held: Bools, rows: int) -> Bools:
    """Cells with many edges that an opposite edge follows within a stroke, beside another such cell."""
    reach = np.ones((1, 2 * STROKE + 1), np.uint8)
    rising, falling = (held & (gx > 0)).astype(np.uint8), (held & (gx < 0)).astype(np.uint8)
    paired = (rising & cv2.dilate(falling, reach)) | (falling & cv2.dilate(rising, reach))
    dense = by_cell(paired.astype(np.float32), rows) > STROKE_SHARE
    beside = np.zeros_like(dense)
    beside[:, 1:] |= dense[:, :-1]
    beside[:, :-1] |= dense[:, 1:]
    return dense & beside


def _parts(cells: Bools) -> list[Bools]:
    count, labels = cv2.connectedComponents(cells.astype(np.uint8), connectivity=8)
    return [labels == label for label in range(1, count)]


def _is_mark(part: Bools, held: Bools, motion: Floats, around: Floats) -> bool:
    """Is a part of the overlay small, off the border, and does the world move on both sides of its edges?"""
    height, width = held.shape
    at = held & (cv2.resize(part.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST) > 0)
    touches = at[:BORDER].any() or at[-BORDER:].any() or at[:, :BORDER].any() or at[:, -BORDER:].any()
    if touches or part.sum() > LARGEST_MARK * part.size or not at.any():
        return False
    # The least motion within 2 px of an edge: inside an opaque thing nothing moves.
    least = cv2.erode(motion, np.ones((5, 5), np.uint8))
    return bool(least[at].mean() >= SEEN_THROUGH * around[part].mean())

"""Menus and loading cards, seen: a world that stands still with something drawn over it, or instead of it.

A still stretch begins with a step in which much changes, and goes on without change but for a cursor. How it
is entered and left tells what it is:
    over    the world before is still there, exactly or dimmed, with something new drawn over a part of it
    gone    nothing of it is left
    motion  it moved: the player stopped, or set off
A stretch that something was drawn over to begin, and that ends when that is gone again, is a menu; so is one
at the recording's start that ends like this. One that is gone on both sides is a menu where the place behind
is the place before, else a loading card. So is black, however it comes and goes. A menu over a world that
goes on is known from the log alone. Holds at most 34 small pictures. Source: spec/faults.md C5; DESIGN 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.clips.scene import SAME, Gray, sameness, small
from pipeline.picture import Picture

Floats = npt.NDArray[np.float32]

MOVED = 10  # luma levels: a pixel that changes by more has changed
# Shares of changed pixels, of gray@320. A cursor of 12x20 of 640x360 pixels is 0.2 %, bad04's next page 6 %.
STILL_STEP = 0.01  # from frame to frame
STILL_ALL = 0.04  # from the first picture of the stretch
JUMP = 0.06  # the step into a card; a monster that moves in front of a still player is up to 5 %
BACK = 0.02  # a picture that is shown again
# Sameness of the frames before and behind a card that are one place. Of 62 menus in recorded sessions one is
# below, at 0.08, and the next at 0.23; of 20 loading cards the greatest is 0.15.
PLACE = 0.2
SHORTEST = 20  # frames of a card, 0.6 s at 35 fps; the pictures of a moving monster last up to 10
BLACK = (20.0, 0.75)  # luma, limited range: mean and spread of a picture of nothing; a night has more
SHORTEST_BLACK = 8  # frames; a blink or a single lost picture is no loading
LONGEST_CHAIN = 32
CELL = 8  # pixels of gray@320
TEXTURE = 3.0
KEPT_LEVELS = 2.5  # a cell is kept when gain and offset explain it to this many levels
KEPT_CORRELATION = 0.8
KEPT = 0.35  # share of the textured cells that are kept; a status bar and a weapon alone are below 0.25
NEW_LEVELS = 6.0  # a cell shows something new when that much is not explained
NEW = 0.02  # share of all cells; a light that goes out leaves none
# A new cell was there before, elsewhere, when it is found within this many pixels with this correlation.
NEAR = 10
FOUND = 0.9
MOVED_CELLS = 0.3  # share of the new cells that moved there
STAYED_CELLS = 0.5  # share of the new cells that are still there behind a stretch: then they were the world
SOUGHT = 48  # new cells looked for


class Card(StrEnum):
    MENU = "menu"
    LOADING = "loading"


class Step(StrEnum):
    """How a still stretch is entered or left."""

    OVER = "over"
    DIMMED = "dimmed"  # still there, and nothing new
    GONE = "gone"
    MOTION = "motion"
    END = "end"  # of the recording


@dataclass(frozen=True, slots=True)
class Shown:
    """Frames [start, stop) of a card; covered: share of the picture that it changes; back: behind it lies the
    place before it."""

    start: int
    stop: int
    card: Card
    covered: float
    back: bool


@dataclass(slots=True)
class _Stretch:
    start: int
    first: Gray
    before: Gray | None
    jumped: float  # share of pixels changed by the step into it
    stop: int = 0


class Stills:
    """Observer. `cards`: what was recognised. `still`: bool a frame, it is like the one before and like the
    first of its stretch. `black`: bool a frame."""

    def __init__(self) -> None:
        self.cards: list[Shown] = []
        self.still: list[bool] = []
        self.black: list[bool] = []
        self._last: Gray | None = None
        self._stretch: _Stretch | None = None
        self._chain: list[_Stretch] = []  # stretches that follow one another at once
        self._world: Gray | None = None  # a still picture that was no card

    def see(self, index: int, picture: Picture) -> None:
        gray = picture.gray
        mean, spread = (float(v[0, 0]) for v in cv2.meanStdDev(gray))
        self.black.append(mean <= BLACK[0] and spread < BLACK[1])
        last, stretch = self._last, self._stretch
        still = False
        if last is None or stretch is None:
            self._stretch = _Stretch(index, gray, None, 1.0)
        else:
            moved = share_moved(last, gray)
            still = moved < STILL_STEP and share_moved(stretch.first, gray) < STILL_ALL
            if not still:
                self._end(stretch, index, gray)
                self._stretch = _Stretch(index, gray, last, moved)
        self.still.append(still)
        self._last = gray

    def finish(self) -> None:
        """The recording is over."""
        if self._stretch is not None:
            self._end(self._stretch, len(self.still), None)
            self._judge(len(self._chain), None)
        self.cards.sort(key=lambda shown: shown.start)

    def _end(self, stretch: _Stretch, stop: int, after: Gray | None) -> None:
        """A stretch is over, and `after` is the first picture behind it."""
        stretch.stop = stop
        if self._chain and share_moved(self._chain[-1].first, stretch.first) < JUMP:
            stretch = self._chain.pop()  # still that card: another of its rows is marked
            stretch.stop = stop
        elif stop - stretch.start < SHORTEST:
            self._judge(len(self._chain), stretch.first)
            return
        elif stretch.jumped < JUMP or self._is_world(stretch):
            self._judge(len(self._chain), stretch.first)
            self._world = stretch.first
            return
        self._chain.append(stretch)
        if after is None:
            return
        if step(stretch.first, after) is Step.MOTION and not self._vanishes(after):
            # The world moves on from here, so this was the world, and what came before lay over it.
            self._chain.pop()
            self._judge(len(self._chain), stretch.first)
            self._world = stretch.first
            return
        # Where a picture comes back, what was shown in between lay over it.
        pictures = [self._chain[0].before, *(s.first for s in self._chain[:-1])]
        for count, picture in enumerate(pictures):
            if picture is not None and share_moved(picture, after) < BACK:
                self._judge(len(self._chain) - count, after)
                return
        if len(self._chain) == LONGEST_CHAIN:
            self._chain.clear()

    def _is_world(self, stretch: _Stretch) -> bool:
        """Did motion lead here, or was this picture the still world a moment ago, before a shot, say?"""
        if self._world is not None and share_moved(self._world, stretch.first) < BACK:
            return True
        return stretch.before is not None and step(stretch.before, stretch.first) is Step.MOTION

    def _vanishes(self, after: Gray) -> bool:
        """Was something drawn over the world when the chain began, and is it gone in `after`?"""
        first = self._chain[0]
        if first.before is None or step(first.before, first.first) is not Step.OVER:
            return False
        new = _cells(first.before, first.first)[1]
        return _share_found(after, first.first, new) < STAYED_CELLS

    def _judge(self, count: int, after: Gray | None) -> None:
        """Name the last `count` stretches of the chain; after: the first picture behind them."""
        if count == 0:
            return
        kept, chain = self._chain[:-count], self._chain[-count:]
        self._chain = kept
        before = chain[0].before
        world = after if before is None else before
        if world is None:
            return
        opens = Step.END if before is None else step(before, chain[0].first)
        closes = Step.END if after is None else step(after, chain[-1].first)
        back = before is not None and after is not None and is_back(before, after)
        card = name(opens, closes, back)
        if card is not None:
            self.cards += [Shown(s.start, s.stop, card, share_moved(world, s.first), back) for s in chain]


def name(opens: Step, closes: Step, back: bool) -> Card | None:
    """What a still stretch is, by how it is entered and left; back: the place before is shown again."""
    if opens is Step.OVER or (opens is Step.END and closes is Step.OVER):
        return Card.MENU
    if opens is closes is Step.GONE:
        return Card.MENU if back else Card.LOADING
    return None


def step(world: Gray, card: Gray) -> Step:
    """What became of the world, uint8 [h, 320], in a card."""
    kept, new = _cells(world, card)
    if kept >= KEPT:
        if new.mean() < NEW:
            return Step.DIMMED
        return Step.MOTION if _share_found(world, card, new) > MOVED_CELLS else Step.OVER
    return Step.GONE if sameness(small(world), small(card)) < SAME else Step.MOTION


def is_back(before: Gray, after: Gray) -> bool:
    """Do both show one place?"""
    return sameness(small(before), small(after)) >= PLACE


def share_moved(a: Gray, b: Gray) -> float:
    """Share of the pixels that changed."""
    return float(cv2.countNonZero(cv2.compare(cv2.absdiff(a, b), MOVED, cv2.CMP_GT))) / a.size


def _cells(world: Gray, card: Gray) -> tuple[float, npt.NDArray[np.bool_]]:
    """Share of the world's textured cells that the card keeps; bool [cells], those that show what is new."""
    w, c = _split(world), _split(card)
    w, c = w - w.mean(axis=1, keepdims=True), c - c.mean(axis=1, keepdims=True)
    spread_w, spread_c = w.std(axis=1), c.std(axis=1)
    product = np.maximum(spread_w * spread_c, 1e-6)
    correlation = np.clip((w * c).mean(axis=1) / product, 0.0, 1.0)
    unexplained = spread_c * np.sqrt(1.0 - correlation**2)
    textured = spread_w > TEXTURE
    kept = textured & (correlation > KEPT_CORRELATION) & (unexplained < KEPT_LEVELS)
    share = float(kept.sum() / textured.sum()) if textured.any() else 1.0 - share_moved(world, card)
    return share, np.asarray(unexplained > NEW_LEVELS, np.bool_)


def _share_found(world: Gray, card: Gray, new: npt.NDArray[np.bool_]) -> float:
    """Share of the new cells of a card that the world shows nearby."""
    columns = card.shape[1] // CELL
    cells = np.flatnonzero(new)
    cells = cells[:: max(1, len(cells) // SOUGHT)]
    found = 0
    for cell in cells:
        y, x = max(0, int(cell) // columns * CELL - CELL // 2), max(0, int(cell) % columns * CELL - CELL // 2)
        block = card[y : y + 2 * CELL, x : x + 2 * CELL]
        top, left = max(0, y - NEAR), max(0, x - NEAR)
        window = world[top : y + 2 * CELL + NEAR, left : x + 2 * CELL + NEAR]
        found += float(cv2.matchTemplate(window, block, cv2.TM_CCOEFF_NORMED).max()) > FOUND
    return found / len(cells)


def _split(gray: Gray) -> Floats:
    """float32 [cells, 64]."""
    rows, columns = gray.shape[0] // CELL, gray.shape[1] // CELL
    cut = gray[: rows * CELL, : columns * CELL].astype(np.float32)
    cells = cut.reshape(rows, CELL, columns, CELL).swapaxes(1, 2)
    return cells.reshape(rows * columns, CELL * CELL)

"""Does a clip close its loop: does the view of its start come back after it was left?

Views are matched, steps are not summed, so drift cannot hide or fake a closure. `Views` observes a decode
pass; `find_loop` compares the first views with all later ones. Deterministic. Source: docs/poses.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.picture import Picture

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

STRIDE = 8
"""Frames between views: 0.23 s at 35 fps. A view that came back is held or passed more slowly than that."""
MOST_VIEWS = 512
"""Views kept, at most 8.2 MB. When there are more every second one goes: 137 s at 30 fps are seen at stride
8, five minutes at stride 32."""
CELLS, POINTS_PER_CELL = (8, 5), 10
"""Columns and rows of the picture, and the points kept of each cell. The strongest points of a dark picture
lie on one bright thing: at the start of loop04 58 of 65 on the weapon, which "closed" a turn of 58 deg."""
CANDIDATES = 1500
START_FRAMES = 32
"""Any view of the first 0.9 s (at 35 fps) may be the one that comes back."""
DISTINCT = 0.8
"""A point's best match must be nearer than this share of the second best: walls repeat their texture."""
STRAY_PX = 2.0
OVERLAY_PX, OVERLAY_SHARE = 1.5, 0.5
"""A point that is found at the same place in half of all views is painted on the screen (weapon, HUD)."""
FEWEST = 30
"""Points of a start view, overlays left out, under which nothing is claimed."""
CLOSED = 0.25
"""Share of the start view's points found again. Over 24,745 pairs of views of 13 clips: all 80 of one pose
(0.05 of the median depth, 2 deg) pass, and all 88 that pass lie within 0.3 of the depth and 3.6 deg. Closed
loops have 0.38-0.64; the highest of the other clips is 0.17, of a room with the same wall all round."""
LEFT, LEFT_VIEWS = 0.15, 5
"""The view was left when so few points are found in so many views in a row."""
MOST_SHIFT = 0.1
"""Median displacement of the points in picture widths; more is another view of the same things."""


class LoopReason(StrEnum):
    """Why there is no closure: the first is an answer, the others say that there can be none."""

    NONE = ""
    NOT_SEEN_AGAIN = "not_seen_again"
    NEVER_LEFT = "never_left"
    FEW_POINTS = "few_points"


@dataclass(frozen=True, slots=True)
class LoopClosure:
    """first, later: frames that show the same view. score: share of the points of `first` found in `later`,
    0..1. shift: their median displacement in picture widths."""

    first: int
    later: int
    score: float
    shift: float


@dataclass(frozen=True, slots=True)
class LoopSearch:
    """A closure, or the reason why there is none."""

    closure: LoopClosure | None
    reason: LoopReason = LoopReason.NONE


@dataclass(frozen=True, slots=True)
class View:
    """points: float32 [N, 2], in pixels of the 320-wide picture; descriptors: uint8 [N, 32]; N <= 400."""

    frame: int
    points: Floats
    descriptors: npt.NDArray[np.uint8]
    width: int


class Views:
    """Observer of a decode pass: the points of every eighth frame, in bounded memory."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self._stride = STRIDE
        self._detector = cv2.ORB.create(nfeatures=CANDIDATES, nlevels=4, fastThreshold=7)
        # Local contrast brings out dark rooms, of which the threshold of the detector sees nothing otherwise.
        self._contrast = cv2.createCLAHE(clipLimit=4.0, tileGridSize=CELLS)

    def see(self, index: int, picture: Picture) -> None:
        if index % self._stride:
            return
        gray = self._contrast.apply(picture.gray)
        keys = _best_of_cells(self._detector.detect(gray, None), gray.shape)
        keys, descriptors = self._detector.compute(gray, keys)
        points = np.array([k.pt for k in keys], np.float32).reshape(-1, 2)
        if descriptors is None:
            descriptors = np.zeros((0, 32), np.uint8)
        self.views.append(View(index, points, descriptors, gray.shape[1]))
        if len(self.views) > MOST_VIEWS:
            self.views = self.views[::2]
            self._stride *= 2


def _best_of_cells(keys: Sequence[cv2.KeyPoint], shape: tuple[int, ...]) -> list[cv2.KeyPoint]:
    height, width = shape
    columns, rows = CELLS
    free = np.full((rows, columns), POINTS_PER_CELL)
    chosen = []
    for key in sorted(keys, key=lambda k: (-k.response, k.pt)):
        cell = int(key.pt[1] * rows / height), int(key.pt[0] * columns / width)
        if free[cell] > 0:
            free[cell] -= 1
            chosen.append(key)
    return chosen


def find_loop(views: list[View]) -> LoopSearch:
    """The earliest later view that shows a start view about as well as the best one does.

    views: of `Views`, in order. A view came back when at least `CLOSED` of a start view's points, overlays
    left out, are found again under one homography and hardly displaced, after a stretch in which it was gone.
    """
    starts = [v for v in views if v.frame < START_FRAMES]
    later = views[len(starts) :]
    found = [f for f in (_look_for(start, later) for start in starts) if f is not None]
    if not found:
        rich = any(len(start.points) >= FEWEST for start in starts)
        return LoopSearch(None, LoopReason.NEVER_LEFT if rich else LoopReason.FEW_POINTS)
    score = np.stack([f.score for f in found])
    best = score.max(axis=0)
    gone = _gone_before(best < LEFT)
    if gone is None:
        return LoopSearch(None, LoopReason.NEVER_LEFT)
    back = np.where(gone, best, 0.0)
    if back.max() < CLOSED:
        return LoopSearch(None, LoopReason.NOT_SEEN_AGAIN)
    at = int(np.flatnonzero(back >= 0.9 * back.max())[0])
    which = found[int(np.argmax(score[:, at]))]
    return LoopSearch(LoopClosure(which.frame, later[at].frame, float(best[at]), float(which.shift[at])))


@dataclass(frozen=True, slots=True)
class _Found:
    """How much of one start view each of V later views shows. score, shift: float64 [V]."""

    frame: int
    score: npt.NDArray[np.float64]
    shift: npt.NDArray[np.float64]


def _look_for(start: View, later: list[View]) -> _Found | None:
    """None when the start view has too few points that are not painted on the screen."""
    if not later or len(start.points) < FEWEST:
        return None
    pairs = [_match(start, view) for view in later]
    stays = np.zeros(len(start.points))
    for (mine, theirs), view in zip(pairs, later, strict=True):
        moved = np.linalg.norm(start.points[mine] - view.points[theirs], axis=1)
        stays[mine[moved < OVERLAY_PX]] += 1
    scene = stays < OVERLAY_SHARE * len(later)
    points = int(scene.sum())
    if points < FEWEST:
        return None
    score, shift = np.zeros(len(later)), np.full(len(later), np.inf)
    for i, ((mine, theirs), view) in enumerate(zip(pairs, later, strict=True)):
        keep = scene[mine]
        a, b = start.points[mine[keep]], view.points[theirs[keep]]
        if len(a) < LEFT * points:
            continue
        agree = _one_plane(a, b)
        moved = np.linalg.norm(a[agree] - b[agree], axis=1) / start.width
        if len(moved) and np.median(moved) <= MOST_SHIFT:
            score[i], shift[i] = len(moved) / points, np.median(moved)
    return _Found(start.frame, score, shift)


def _match(a: View, b: View) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows of matching points of both views, by descriptor alone."""
    if len(a.points) < 2 or len(b.points) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    near = cv2.BFMatcher(cv2.NORM_HAMMING).knnMatch(a.descriptors, b.descriptors, k=2)
    good = [m for m, other in near if m.distance < DISTINCT * other.distance]
    return np.array([m.queryIdx for m in good], np.int64), np.array([m.trainIdx for m in good], np.int64)


def _one_plane(a: Floats, b: Floats) -> Bools:
    """bool [N], pairs that follow one homography: what a turn on the spot does, and nearly what a small step
    does. The sampler has a fixed seed of its own."""
    if len(a) < 4:
        return np.zeros(len(a), np.bool_)
    params = cv2.UsacParams()
    params.threshold = STRAY_PX
    params.confidence = 0.999
    params.maxIterations = 500
    params.randomGeneratorState = 1
    _, mask = cv2.findHomography(a, b, params)
    return np.zeros(len(a), np.bool_) if mask is None else np.asarray(mask).ravel() > 0


def _gone_before(low: Bools) -> Bools | None:
    """Views behind the first run of LEFT_VIEWS or more without the start view; None when there is none."""
    at = 0
    for is_low, run in groupby(low):
        length = len(list(run))
        at += length
        if is_low and length >= LEFT_VIEWS:
            out: Bools = np.arange(len(low)) >= at
            return out
    return None

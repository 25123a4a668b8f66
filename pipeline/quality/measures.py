"""What one picture shows, cell by cell: edges, noise, the grid of a codec. Pure arithmetic on planes.

Every measure is a sum or a mean over cells (40 across the picture), so that what turns out to be an
overlay or a black bar when the whole clip has been seen can still be left out. Source: spec/faults.md Q1,
Q2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

COLUMNS = 40
"""Cells across the picture; a cell is 16 px of the working picture, 32 px at 1280x720."""
WORK_WIDTH = 640
BLOCK = 8
BAND = 128
FINE, MIDDLE, COARSE = 1.2, 2.0, 3.4
"""Scales (px of the working picture) at which edges are seen. A gradient that was blurred by s falls from
scale a to scale b by ((s^2 + b^2) / (s^2 + a^2))^p: p is a half at a lone step, 1 in fine texture, and
contrast does not matter. The ratio of two such falls, in logs, does not know p either: it tells s
alone, whatever the style. Near together, for a chequered floor merges at coarse scales and looks soft
(nav12: 0.59 with scales 1.2, 2.4, 4.8, 0.65 with these)."""
HALVING = 1.9
"""Variance (px^2) that the coarse scale gains from being measured at half size: by averaging 2x2 (0.25),
slopes over 4 px (1.0 more than over 2), and enlarging (0.7)."""
NEAR = 9
"""Side (in 4 px) of the neighbourhood in which an edge must be strong, at least half of the strongest.
Local, so that HUD text does not decide which edges of the world count."""
LEAST_GRADIENT = 0.8
"""Luma levels a px, after smoothing, under which nothing is called an edge: a step of 2.4 levels."""
NOISE_GRADIENT = 0.8
"""Gradient that smoothed white noise of sigma 1 hardly ever passes: 4 of its own sigmas."""
LAPLACE = np.array([1, -2, 1], np.float32)
"""Immerkaer's residual is the product of two of these, blind to steps and ramps along the axes."""
TO_SIGMA = float(np.sqrt(np.pi / 2) / 6)
"""From the mean absolute residual of white noise to its sigma."""
VISIBLE_STEP = 2.5
"""Luma levels across the side of a block that count as a visible edge. Lower, and a picture of few levels
(dark, flat) shows its rounding; higher, and the blocks of dark scenes are missed."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of the working picture smoothed at the fine scale: gx, gy and their length, float32 [h, 640]."""

    gx: Floats
    gy: Floats
    length: Floats


def rows_of(width: int, height: int) -> int:
    """Rows of cells of a picture."""
    return max(1, round(height * COLUMNS / width))


def resized(plane: Bytes, columns: int, rows: int) -> Bytes:
    """A plane at another size: area-averaged where it shrinks, linear where it grows."""
    how = cv2.INTER_AREA if plane.shape[1] >= columns else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(plane, (columns, rows), interpolation=how), np.uint8)


def block_means(values: npt.NDArray[np.generic]) -> Floats:
    """float32 [h // 8, w // 8]: means over the whole 8x8 blocks of values [h, w]."""
    rows, columns = values.shape[0] // BLOCK, values.shape[1] // BLOCK
    whole = values[: rows * BLOCK, : columns * BLOCK]
    return np.asarray(cv2.resize(whole, (columns, rows), interpolation=cv2.INTER_AREA), np.float32)


def by_cell(values: npt.NDArray[np.generic], rows: int) -> Floats:
    """float32 [..., rows, 40]: means over cells of values [..., h, w], each shared by the cells it
    touches."""
    down, across = _shares(values.shape[-2], rows), _shares(values.shape[-1], COLUMNS)
    planes = values.reshape(-1, *values.shape[-2:]).astype(np.float32)
    # By OpenCV: for these small products numpy's BLAS starts a thread a core, and takes ten times the CPU.
    means = [cv2.gemm(cv2.gemm(down, p, 1, None, 0), across, 1, None, 0, flags=cv2.GEMM_2_T) for p in planes]
    return np.stack(means).reshape(*values.shape[:-2], rows, COLUMNS)


@functools.lru_cache(maxsize=64)
def _shares(size: int, cells: int) -> Floats:
    """float32 [cells, size]: how much each of `size` equal parts counts in the mean of each cell."""
    part, cell = np.arange(size + 1) / size, np.arange(cells + 1) / cells
    overlap = np.minimum(cell[1:, None], part[None, 1:]) - np.maximum(cell[:-1, None], part[None, :-1])
    return np.asarray(np.maximum(overlap, 0) * cells, np.float32)


class Scales:
    """Gradients of working pictures of one size. What `of` gives holds until its next call: with 6 MB of new
    arrays a picture the allocator returns them to the system, and page faults double the time."""

    def __init__(self, height: int, width: int) -> None:
        self._smooth, self._x, self._y, gx, gy, length, self._middle, self._coarse = np.zeros(
            (8, height, width), np.float32
        )
        self._fine = Gradients(gx, gy, length)

    def of(self, work: Bytes) -> tuple[Gradients, Floats, Floats]:
        """Gradients at the fine scale; lengths [h, 640] at the middle and coarse scales."""
        smooth, fine = self._smooth, self._fine
        height, width = smooth.shape
        np.copyto(smooth, work)
        cv2.GaussianBlur(smooth, (9, 9), FINE, dst=smooth)
        _slopes(smooth, 0.5, fine.gx, fine.gy, fine.length)
        cv2.GaussianBlur(smooth, (13, 13), math.sqrt(MIDDLE**2 - FINE**2), dst=smooth)
        _slopes(smooth, 0.5, self._x, self._y, self._middle)
        half = cv2.resize(smooth, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
        cv2.GaussianBlur(half, (13, 13), math.sqrt(COARSE**2 - MIDDLE**2 - HALVING) / 2, dst=half)
        length = _slopes(half, 0.25)
        cv2.resize(length, (width, height), dst=self._coarse, interpolation=cv2.INTER_LINEAR)
        return fine, self._middle, self._coarse


def _slopes(
    picture: Floats,
    scale: float,
    gx: Floats | None = None,
    gy: Floats | None = None,
    length: Floats | None = None,
) -> Floats:
    """Length of the gradient, written to `length` where given; its parts go to gx and gy."""
    x = cv2.Sobel(picture, cv2.CV_32F, 1, 0, dst=gx, ksize=1, scale=scale)
    y = cv2.Sobel(picture, cv2.CV_32F, 0, 1, dst=gy, ksize=1, scale=scale)
    # Not cv2.magnitude: its last digit depends on where in memory the arrays lie (7 of 16 places differ).
    total = np.multiply(x, x, out=length)
    return np.asarray(np.sqrt(np.add(total, np.square(y), out=total), out=total), np.float32)


def edge_cells(lengths: tuple[Floats, Floats, Floats], noise: float, rows: int) -> Floats:
    """float32 [4, rows, 40]: pixels on strong edges, and the sums of their gradients at the three scales,
    each weighted by the fine one: the walls of nav12 are plain and soft by nature, its tiles tell how
    sharp it is.

    lengths: of the gradients of the working picture, fine, middle, coarse. noise: its sigma.
    """
    height, width = lengths[0].shape
    # Of 4x4 px the strongest, then of 9x9 such places: a neighbourhood of 36 px at a tenth of the price.
    quarter = cv2.dilate(lengths[0], np.ones((4, 4), np.uint8))[2::4, 2::4]
    near = cv2.dilate(np.ascontiguousarray(quarter), np.ones((NEAR, NEAR), np.uint8))
    least = np.maximum(0.5 * near, max(LEAST_GRADIENT, NOISE_GRADIENT * noise))
    least = cv2.resize(least, (width, height), interpolation=cv2.INTER_NEAREST)
    at = np.flatnonzero(cv2.compare(lengths[0], least, cv2.CMP_GT))
    cell = _cell_of(height, width, rows)[at]
    sums = [np.bincount(cell, minlength=rows * COLUMNS)]
    weight = lengths[0].ravel()[at]
    sums += [np.bincount(cell, weight * length.ravel()[at], rows * COLUMNS) for length in lengths]
    return np.stack(sums).reshape(4, rows, COLUMNS).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _cell_of(height: int, width: int, rows: int) -> npt.NDArray[np.intp]:
    """Number of the cell of every pixel, row by row."""
    down, across = np.arange(height) * rows // height, np.arange(width) * COLUMNS // width
    return np.asarray((down[:, None] * COLUMNS + across).ravel(), np.intp)


def residuals(plane: Bytes) -> Floats:
    """float32 [2, h // 8, w // 8]: by block, mean and mean square of the absolute residual. The mean times
    `TO_SIGMA` is the sigma of white noise. Band by band: a band stays in the cache."""
    rows, means = plane.shape[0] // BLOCK * BLOCK, []
    for top in range(0, rows, BAND):
        bottom, above = min(top + BAND, rows), min(top, 1)
        signed = cv2.sepFilter2D(plane[top - above : bottom + 1], cv2.CV_32F, LAPLACE, LAPLACE)
        band = np.abs(signed, out=signed)[above : above + bottom - top]
        means.append((block_means(band), block_means(cv2.multiply(band, band, dst=band))))
    return np.concatenate([np.stack(pair) for pair in means], axis=1)


def block_sides(luma: Bytes) -> Floats:
    """float32 [3, h // 8, w // 8]: visible block sides on the 8-px grid, half-way between its lines, and
    elsewhere, as a share of the places looked at, over both directions.

    A side is 8 px long, and visible when the mean step across it passes `VISIBLE_STEP` and twice the mean
    absolute step on either hand.
    """
    upright = _upright_sides(luma)
    lying = _upright_sides(np.ascontiguousarray(cv2.transpose(luma))).transpose(0, 2, 1)
    return np.asarray((upright + lying) / 2, np.float32)


def _upright_sides(luma: Bytes) -> Floats:
    rows, columns = luma.shape[0] // BLOCK, luma.shape[1] // BLOCK
    luma = luma[: rows * BLOCK]
    band = _sums(luma)
    jumps = _sums(cv2.absdiff(luma[:, 1:], luma[:, :-1]))
    step = cv2.absdiff(band[:, 2:-1], band[:, 1:-2])
    visible = np.zeros((rows, luma.shape[1]), np.bool_)
    visible[:, 2:-1] = (step >= VISIBLE_STEP * BLOCK) & (step > 2 * np.maximum(jumps[:, :-2], jumps[:, 2:]))
    place = visible[:, : columns * BLOCK].reshape(rows, columns, BLOCK)
    elsewhere = place[:, :, [1, 2, 3, 5, 6, 7]].mean(axis=2, dtype=np.float32)
    return np.stack([place[:, :, 0], place[:, :, BLOCK // 2], elsewhere])


def _sums(values: Bytes) -> npt.NDArray[np.uint16]:
    """uint16 [h // 8, w]: sums over 8 rows."""
    bands = values.reshape(-1, BLOCK, values.shape[1])
    return np.asarray(bands.sum(axis=1, dtype=np.uint16), np.uint16)

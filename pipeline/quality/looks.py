"""How a clip looks: raw measures of every twentieth frame, taken in the observe pass and kept in looks.npz.

`Look` is an observer of `pipeline.frames.frame_pass`. It measures by cell, and decides at the end which cells
are black bars or a static overlay: those are left out of every measure. Noise and blocks are measured at
native size, the rest on a working picture 640 wide. `pipeline.quality.axes` makes scores of the raws.
Source: spec/faults.md Q1, Q2, Q5; figures: docs/quality.md.
"""

from __future__ import annotations

import io
import math
from dataclasses import astuple, dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.picture import Picture, native_planes
from pipeline.quality.aesthetics import PROXY, Scorer, proxy
from pipeline.quality.axes import RAWS
from pipeline.quality.measures import (
    COLUMNS,
    TO_SIGMA,
    WORK_WIDTH,
    Bytes,
    Floats,
    Scales,
    block_means,
    block_sides,
    by_cell,
    edge_cells,
    residuals,
    resized,
    rows_of,
)
from pipeline.quality.overlay import Bars, Bools, Crop, Flags, Static
from pipeline.stage import Unit
from schemas import SCHEMA_VERSION

LOOKS = "looks.npz"
STRIDE, EARLY = 20, (4, 8)
"""Frames between samples: a window of 150 frames holds at least 7, at a quarter of the price of decoding
them. The early ones give a clip of 9 frames three."""
NATIVE_STRIDE = 40
"""Frames between samples measured at native size as well: half of the cost lies there."""
SMALL = 4
"""Working pixels in the side of a pixel of the small picture, 160 wide."""
FLATTEST = 20
"""Percentile of the cells by luma residual: flat ones show noise, the rest shows texture as well."""
UNCLIPPED = (20, 230)
"""Mean luma of a cell in which noise is not cut off."""
FEWEST_EDGES = 60
"""Strong edge pixels under which a frame does not tell how sharp it is: a bare wall, a black frame."""
LEAST_CONTRAST = 8.0
"""Luma levels between the 2nd and 98th percentile under which a picture counts as bare."""
STRUCTURE = 0.06
"""Gradient a small pixel, as a share of that contrast, at which a place counts half as structure."""
WEBER = 4.0
"""Luma levels added to both ends of a ratio of luma: those nearer to black are not told apart."""
WHITE, BLACK = 233, 18
"""Luma from which on a pixel is lost in white, or in black."""
JUDGED = 80
"""Frames between those that a learned scorer is shown: a window of 150 frames holds at least one."""
SIDE_FLOOR = 0.005
"""Share of visible block sides added to both terms of their ratio; 0.002-0.06 are met by chance."""


@dataclass(frozen=True, slots=True)
class Looks:
    """Raw measures of S samples of a clip of F frames.

    at: int64 [S], frame of each sample, increasing from 0. raws: float32 [S, R], columns `axes.RAWS`; NaN
    where a frame does not show the measure. crop, flags: of the whole clip. aesthetics_by: who judged the
    last column.
    """

    frames: int
    at: npt.NDArray[np.int64]
    raws: Floats
    crop: Crop
    flags: Flags
    aesthetics_by: str


@dataclass(frozen=True, slots=True)
class _Sample:
    """What is kept of a frame: edges float32 [4, rows, 40] of `edge_cells`, native float32 [7, rows, 40] of
    `_native` in every other sample, the small luma, and its chroma float32 [2, rows, 40]."""

    frame: int
    edges: Floats
    native: Floats | None
    small: Bytes
    chroma: Floats


class Look:
    """Observer that makes the `Looks` of one clip. Keeps 56 kB a sample of a 16:9 picture.

    scorer: a learned judge of aesthetics; None takes the proxy.
    """

    def __init__(self, scorer: Scorer | None = None) -> None:
        self._scorer = scorer
        self._samples: list[_Sample] = []
        self._judged: list[float] = []
        self._bars, self._static = Bars(), Static()
        self._scales: Scales | None = None
        self._frames = 0
        self._size = (0, 0)

    def see(self, index: int, picture: Picture) -> None:
        self._frames = index + 1
        if index % STRIDE and index not in EARLY:
            return
        planes = native_planes(picture.limited)
        luma = planes[0]
        height, width = luma.shape
        self._size = width, height
        rows = rows_of(width, height)
        work = resized(luma, WORK_WIDTH, max(SMALL, round(height * WORK_WIDTH / width)))
        small = resized(work, WORK_WIDTH // SMALL, work.shape[0] // SMALL)
        native = _native(planes, rows) if index % NATIVE_STRIDE == 0 else None
        noise = float(np.percentile(residuals(work)[0], FLATTEST)) * TO_SIGMA
        if self._scales is None:
            self._scales = Scales(*work.shape)
        fine, middle, coarse = self._scales.of(work)
        edges = edge_cells((fine.length, middle, coarse), noise, rows)
        chroma = np.stack([by_cell(block_means(p), rows) for p in planes[1:3]])
        self._bars.see(work, planes[1:3])
        self._static.see(fine, work, small)
        if self._scorer is not None:
            shown = index % JUDGED == 0
            self._judged.append(self._scorer.judge(self._visible(picture)) if shown else np.nan)
        self._samples.append(_Sample(index, edges, native, small, chroma))

    def looks(self) -> Looks:
        """Raises ValueError when no frame was seen."""
        if not self._samples:
            raise ValueError("no frame was seen: run the observer in a decode pass first")
        crop = self._bars.crop(*self._size)
        inside = _inside(crop, *self._size, rows=self._samples[0].edges.shape[1])
        covered, flags = self._static.overlay(inside)
        # Smoothing and the neighbourhood of an edge reach one cell beyond the overlay.
        reached = cv2.dilate(covered.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0
        world = inside & ~reached
        if not world.any():
            world = inside
        scale = WORK_WIDTH / SMALL / self._size[0]
        shown = _spread(world, self._samples[0].small.shape)
        native = [_native_raws(sample, world) for sample in self._samples]
        noise = scale * float(np.nanmedian([luma for luma, *_ in native]))
        rows = [
            _raws(s, measured, world, shown, noise) for s, measured in zip(self._samples, native, strict=True)
        ]
        raws = np.array(rows, np.float32)
        if self._scorer is not None:
            raws[:, RAWS.index("aesthetic")] = self._judged
        at = np.array([sample.frame for sample in self._samples], np.int64)
        name = PROXY if self._scorer is None else self._scorer.name
        return Looks(self._frames, at, raws, crop, flags, name)

    def _visible(self, picture: Picture) -> Bytes:
        """RGB without the bars known so far."""
        width, height = self._size
        crop = self._bars.crop(width, height)
        return picture.rgb[crop.top : height - crop.bottom, crop.left : width - crop.right]


def _native(planes: list[Bytes], rows: int) -> Floats:
    """float32 [7, rows, 40] at native size: luma noise, chroma noise, mean and mean square of the luma
    residual, block sides on the grid, half-way and elsewhere."""
    luma = residuals(planes[0])
    white = [_white_noise(plane, residuals(plane)[0], rows) for plane in planes[1:3]]
    noise = [_white_noise(planes[0], luma[0], rows), (white[0] + white[1]) / 2]
    sides = by_cell(block_sides(planes[0]), rows)
    return np.concatenate([noise, by_cell(luma, rows), sides]).astype(np.float32)


def _white_noise(plane: Bytes, size: Floats, rows: int) -> Floats:
    """Sigma by cell of what is in a plane and halves at half size, as white noise does and texture does not.
    size: block means of the residual of the plane."""
    half = cv2.resize(plane, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    full, coarse = by_cell(size, rows), by_cell(residuals(half)[0], rows)
    return np.asarray(np.sqrt(np.maximum(full**2 - coarse**2, 0) * (4 / 3)) * TO_SIGMA, np.float32)


def _inside(crop: Crop, width: int, height: int, rows: int) -> Bools:
    """Cells [rows, 40] that lie wholly inside the bars, one more cell away from a bar."""
    y = np.arange(rows + 1) * height / rows
    x = np.arange(COLUMNS + 1) * width / COLUMNS
    margin = width / COLUMNS
    top, left = crop.top + margin * (crop.top > 0), crop.left + margin * (crop.left > 0)
    bottom = height - crop.bottom - margin * (crop.bottom > 0)
    right = width - crop.right - margin * (crop.right > 0)
    tall = (y[:-1] >= top) & (y[1:] <= bottom + 1e-6)
    wide = (x[:-1] >= left) & (x[1:] <= right + 1e-6)
    inside = tall[:, None] & wide[None, :]
    return inside if inside.any() else np.ones_like(inside)


def _spread(cells: Bools, shape: tuple[int, ...]) -> Bools:
    """Cells [rows, 40] as pixels of a picture of that shape."""
    y, x = (np.arange(size) * count // size for size, count in zip(shape, cells.shape, strict=True))
    return np.asarray(cells[y][:, x], np.bool_)


def _raws(
    sample: _Sample, native: tuple[float, ...], world: Bools, shown: Bools, noise: float
) -> tuple[float, ...]:
    """The raw measures of one frame, in the order of `RAWS`. native: of `_native_raws`; world: the cells that
    count; shown: the same in the small picture; noise: sigma of the clip's noise in the small picture."""
    visible = sample.small[shown]
    low, high = (max(0.0, float(level) - 16) for level in np.percentile(visible, (2, 98)))
    return (
        _edge_ratio(*(float(total) for total in sample.edges[:, world].sum(axis=1))),
        _structure(sample.small, shown, max(high - low, LEAST_CONTRAST), noise),
        *native,
        float(np.log2((high + WEBER) / (low + WEBER))),
        float(np.mean(visible >= WHITE)),
        float(np.mean(visible <= BLACK)),
        proxy(visible.astype(np.float32), sample.chroma[:, world]),
    )


def _native_raws(sample: _Sample, world: Bools) -> tuple[float, float, float, float]:
    """Noise of luma and chroma, block sides, evenness; NaN in samples that were not measured at native
    size."""
    if sample.native is None:
        return np.nan, np.nan, np.nan, np.nan
    noise, chroma, size, energy, grid, half, elsewhere = sample.native[:, world]
    mean = by_cell(sample.small, len(world))[world]
    unclipped = (mean > UNCLIPPED[0]) & (mean < UNCLIPPED[1])
    if unclipped.mean() < 0.1:
        unclipped = np.ones_like(unclipped)
    flat = unclipped & (size <= np.percentile(size[unclipped], FLATTEST))
    off_grid = max(float(half.mean()), float(elsewhere.mean()))
    # 0.003 and its square: a picture that is flat everywhere counts as even.
    fine, rms = float(size.mean()) / 6 + 0.003, math.sqrt(float(energy.mean()) / 36 + 0.003**2)
    return (
        float(np.median(noise[flat])),
        float(np.median(chroma[flat])),
        (float(grid.mean()) + SIDE_FLOOR) / (off_grid + SIDE_FLOOR),
        fine / rms,
    )


def _edge_ratio(pixels: float, fine: float, middle: float, coarse: float) -> float:
    """How much edges lose from the fine to the middle scale, to what they lose from there to the coarse
    one, in logs. NaN where too few are seen."""
    if pixels < FEWEST_EDGES:
        return np.nan
    return math.log(max(fine / middle, 1.0)) / math.log(max(middle / coarse, 1.001))


def _structure(small: Bytes, shown: Bools, contrast: float, noise: float) -> float:
    """Share of the small picture's places with structure, each counted by how clearly it shows, 0 to 1.

    noise: sigma of white noise in the small picture; its share of the squared gradients is taken off.
    """
    picture = small.astype(np.float32)
    gx = cv2.Sobel(picture, cv2.CV_32F, 1, 0, ksize=1, scale=0.5)
    gy = cv2.Sobel(picture, cv2.CV_32F, 0, 1, ksize=1, scale=0.5)
    square = np.maximum(gx * gx + gy * gy - noise * noise, 0)[shown]
    return float(np.mean(square / (square + (STRUCTURE * contrast) ** 2)))


def write_looks(path: Path, looks: Looks) -> None:
    """One file; the same looks give the same bytes."""
    np.savez_compressed(
        path,
        schema_version=np.array(SCHEMA_VERSION),
        frames=np.array(looks.frames),
        at=looks.at,
        columns=np.array(RAWS),
        raws=looks.raws,
        crop=np.array(astuple(looks.crop)),
        known=np.array(looks.flags.known),
        shares=np.array([looks.flags.hud_share, looks.flags.text_share]),
        watermark=np.array(looks.flags.watermark),
        aesthetics_by=np.array(looks.aesthetics_by),
    )


def read_looks(unit: Unit) -> Looks:
    """The looks of a clip, from the observe stage's output."""
    data = unit.corpus.read(unit.receipts["observe"].output(LOOKS).path)
    with np.load(io.BytesIO(data), allow_pickle=False) as held:
        hud, text = (float(v) for v in held["shares"])
        return Looks(
            int(held["frames"]),
            held["at"],
            held["raws"],
            Crop(*(int(v) for v in held["crop"])),
            Flags(bool(held["known"]), hud, text, bool(held["watermark"])),
            str(held["aesthetics_by"]),
        )

"""Perceptual hashes of a clip, at pictures that any copy of the same footage has too.

A hash at every full second would compare different pictures as soon as one copy is cut 0.4 s later. Hashes
lie where the light of the picture turns instead: where its left or right half, its upper or lower half or one
diagonal is at its brightest for a moment. A re-encode, another size, another cut, a brighter or darker
version and a mark painted on all keep these moments. Source: docs/selection.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import imagehash
import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.ndimage import gaussian_filter1d
from scipy.signal import find_peaks

from pipeline.picture import Picture, native_planes

WIDTH, HEIGHT = 64, 36
BLOCK = 2048
"""Frames that are searched together: 4.7 MB of small pictures, whatever the length of the clip."""
SMOOTH_S = 0.1
APART_S = 0.25
"""Of two moments nearer than this the plainer one stays: 1.3 hashes a second of play (16 pack clips)."""
PROMINENCE = 0.03
"""How far the light turns, as a share of the picture's own contrast, so that exposure does not matter."""
FLAT = 1.0
"""Standard deviation of the small picture in grey levels, under which it shows nothing: fades, black, fog."""
FEW, FILL_S = 8, 0.5
"""A clip with fewer moments is hashed every half second from its start as well: copies of short clips mostly
start together."""
SAME = 4
"""Bits; a hash this near to the one before adds nothing (a menu, a player who waits)."""
LEVELS = (3, 95)
"""Percentiles between which a picture is hashed: what is painted on it, or burnt out, is mostly beyond. A
white logo over 1.5 % of a dark scene moves a hash by 14 bits without, by 6 with."""
BLACK = 24
"""Limited-range luma; rows and columns that never pass it are bars."""

Bits = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ClipHashes:
    """ms: uint32 [N], time from the first frame, increasing; bits: uint64 [N], pHash of the picture then."""

    ms: npt.NDArray[np.uint32]
    bits: Bits

    def __len__(self) -> int:
        return len(self.ms)


_RECORD = np.dtype([("ms", "<u4"), ("bits", "<u8")])
DIGITS = 2 * _RECORD.itemsize
"""Of one hash as text."""


def to_text(hashes: ClipHashes) -> str:
    """24 hex digits a hash. It travels in a receipt: a corpus is compared without opening a file a clip."""
    rows = np.empty(len(hashes), _RECORD)
    rows["ms"], rows["bits"] = hashes.ms, hashes.bits
    return rows.tobytes().hex()


def from_text(text: str) -> ClipHashes:
    """The inverse of `to_text`. Raises ValueError on anything else."""
    rows = np.frombuffer(bytes.fromhex(text), _RECORD)
    return ClipHashes(rows["ms"].copy(), rows["bits"].copy())


class Hashes:
    """Observer of a decode pass."""

    def __init__(self) -> None:
        self._start = 0.0
        self._times: list[float] = []
        self._small: list[npt.NDArray[np.uint8]] = []
        self._kept: list[tuple[float, npt.NDArray[np.uint8]]] = []
        self._blocks = 0

    def see(self, index: int, picture: Picture) -> None:
        if index == 0:
            self._start = picture.frame.time
        if len(self._times) == BLOCK:
            self._search(last=False)
        self._times.append(picture.frame.time - self._start)
        self._small.append(_small(picture))

    def hashes(self) -> ClipHashes:
        """What was seen. Call it once, after the pass."""
        self._search(last=True)
        if not self._kept:
            return ClipHashes(np.zeros(0, np.uint32), np.zeros(0, np.uint64))
        small = np.stack([picture for _, picture in self._kept])
        rows, columns = _inside(small)
        bits = np.array([_phash(p[rows, columns]) for p in small], np.uint64)
        ms = np.array([round(t * 1000) for t, _ in self._kept], np.uint32)
        chosen = _without_stills(bits)
        return ClipHashes(ms[chosen], bits[chosen])

    def _search(self, last: bool) -> None:
        times = np.array(self._times)
        if len(times) == 0:
            return
        small = np.stack(self._small)
        self._blocks += 1
        chosen = _moments(small, times)
        if last and self._blocks == 1 and len(chosen) < FEW:
            chosen = np.union1d(chosen, np.searchsorted(times, np.arange(0.0, times[-1] + 1e-9, FILL_S)))
        shows = small.std(axis=(1, 2)) > FLAT
        self._kept += [(self._times[i], self._small[i]) for i in chosen if shows[i]]
        self._times, self._small = [], []


def _small(picture: Picture) -> npt.NDArray[np.uint8]:
    """uint8 [36, 64]: limited-range luma, each cell the mean of four to seven by four to seven of its pixels.

    All pixels cost 1.25 ms a frame at 1080p, these 0.2 ms; 0.05 ms at 360p, hashing included."""
    luma = native_planes(picture.limited)[0]
    step = max(1, min(luma.shape[0] // HEIGHT, luma.shape[1] // WIDTH) // 4)
    some = np.ascontiguousarray(luma[::step, ::step])
    return np.asarray(cv2.resize(some, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA), np.uint8)


def _moments(small: npt.NDArray[np.uint8], times: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Frames at which the light turns. small: [F, h, w]; times: seconds [F]."""
    if len(times) < 3:
        return np.zeros(0, np.intp)
    half_h, half_w = HEIGHT // 2, WIDTH // 2
    parts = small.reshape(len(small), 2, half_h, 2, half_w).mean(axis=(2, 4))
    contrast = small.std(axis=(1, 2)) + 1.0
    signs = ([[1, -1], [1, -1]], [[1, 1], [-1, -1]], [[1, -1], [-1, 1]])
    frames = SMOOTH_S / float(np.median(np.diff(times)))
    plain = np.zeros(len(small))
    for sign in signs:
        light = gaussian_filter1d((parts * np.array(sign)).sum(axis=(1, 2)) / 4 / contrast, frames)
        for way in (light, -light):
            peaks, about = find_peaks(way, prominence=PROMINENCE)
            plain[peaks] = np.maximum(plain[peaks], about["prominences"])
    found = np.flatnonzero(plain)
    near = np.abs(times[found][:, None] - times[found][None, :]) <= APART_S
    plainer = plain[found][None, :] > plain[found][:, None]
    return np.asarray(found[~(near & plainer).any(axis=1)])


def _inside(small: npt.NDArray[np.uint8]) -> tuple[slice, slice]:
    """Rows and columns inside black bars; all of them where hardly anything is lit."""
    lit = small.max(axis=0) > BLACK
    rows, columns = np.flatnonzero(lit.any(axis=1)), np.flatnonzero(lit.any(axis=0))
    if len(rows) < HEIGHT // 2 or len(columns) < WIDTH // 2:
        return slice(None), slice(None)
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _phash(picture: npt.NDArray[np.uint8]) -> int:
    dark, bright = np.percentile(picture, LEVELS)
    levelled = (np.clip(picture, dark, bright) - dark) * (255 / max(bright - dark, 1.0))
    return int(str(imagehash.phash(Image.fromarray(levelled.astype(np.uint8)))), 16)


def _without_stills(bits: Bits) -> list[int]:
    kept: list[int] = []
    for i, value in enumerate(bits):
        if not kept or int(value ^ bits[kept[-1]]).bit_count() > SAME:
            kept.append(i)
    return kept

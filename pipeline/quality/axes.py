"""Raw measures of a clip's pictures to scores in [0, 1] on six visual axes; higher is better on every axis.

A score is a smooth monotone map of the median of its raw measures over the sampled frames of a window, so a
few bad frames neither veto a window nor hide in a mean, and a reader can make every score again from the raw
columns beside it. The maps are the same for all sources; what is good enough is policy (thresholds per
source). Source: spec/faults.md Q1, Q2, Q5; figures: docs/quality.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.quality.looks import Looks

AXES = ("sharpness", "detail", "noise", "compression", "dynamic_range", "aesthetics")
RAWS = (
    "edge_ratio",
    "structure",
    "noise_luma",
    "noise_chroma",
    "block_edges",
    "evenness",
    "stops",
    "white_share",
    "black_share",
    "aesthetic",
)

PROXY_PREFIX = "proxy-"
SHARP_MIDDLE, SHARP_WIDTH = 0.60, 0.04
"""Edge ratio. Sharp pictures of every style 0.64-0.86; drawn ones blurred by a sigma of 1 px of 640:
0.58-0.64, by 2: 0.47-0.51, by 4: 0.40; scaled up four times 0.51."""
STRUCTURE_HALF = 0.08
"""Structure. Doom 0.29-0.44, plain MiniWorld 0.20, drawn flat shapes 0.15-0.18, an even wall 0."""
NOISE_HALF = 2.0
"""Sigma (8-bit levels) that halves the score: grain that is seen at a glance."""
BLOCKS_FREE, BLOCKS_HALF = 1.25, 1.5
"""Ratio of block sides on the grid to those elsewhere: 0.8-1.25 without visible blocks, crf 38: 2.1, crf
51: 3.7, MPEG-4 at quantiser 31: 8.6."""
EVEN_HALF = 0.1
"""Evenness of fine texture: 0.8 for noise, 0.27-0.53 in clean play, less where a codec drops the weak part
of it. A mild witness: flat-shaded drawings have little of it by nature (0.17)."""
STOPS_HALF = 2.0
"""log2 of the ratio of bright to dark. Day and night scenes 2-4.4, dimmed to 0.35: 2.5, contrast of 10 %:
0.1."""
LAION_LOW, LAION_HIGH = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Axes:
    """Six scores in [0, 1], higher is better; who judged the last; the raw measures by name (`RAWS`).

    A raw that no frame of the window shows (no edge in sight) is None, and speaks for nothing: a window
    without an edge has sharpness 0.
    """

    sharpness: float
    detail: float
    noise: float
    compression: float
    dynamic_range: float
    aesthetics: float
    aesthetics_by: str
    raws: Mapping[str, float | None]


def score(looks: Looks, start: int, stop: int) -> Axes:
    """Scores of frames [start, stop): of the medians of the raw measures over the frames sampled there.

    Raises ValueError when the span lies outside the clip or holds no sampled frame (they are 20 apart).
    """
    if not 0 <= start < stop <= looks.frames:
        raise ValueError(f"frames [{start}, {stop}) are not in a clip of {looks.frames}")
    rows = looks.raws[(looks.at >= start) & (looks.at < stop)]
    if not len(rows):
        raise ValueError(f"no sampled frame in [{start}, {stop}): take 20 frames or more")
    raws = {name: _median(rows[:, k]) for k, name in enumerate(RAWS)}
    return Axes(
        sharpness=_sharpness(raws["edge_ratio"]),
        detail=_saturating(_known(raws, "structure"), STRUCTURE_HALF),
        noise=_noise(_known(raws, "noise_luma"), _known(raws, "noise_chroma")),
        compression=_compression(_known(raws, "block_edges"), _known(raws, "evenness")),
        dynamic_range=_range(*(_known(raws, name) for name in ("stops", "white_share", "black_share"))),
        aesthetics=_aesthetics(_known(raws, "aesthetic"), looks.aesthetics_by),
        aesthetics_by=looks.aesthetics_by,
        raws=raws,
    )


def _median(column: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float | None:
    known = column[~np.isnan(column)]
    return float(np.median(known)) if len(known) else None


def _known(raws: Mapping[str, float | None], name: str) -> float:
    value = raws[name]
    if value is None:
        raise ValueError(
            f"no sampled frame of the window has {name}: it is shorter than the judged ones are apart"
        )
    return value


def _saturating(value: float, half: float) -> float:
    """0 at 0, a half at `half`, towards 1."""
    return value / (value + half)


def _sharpness(edge_ratio: float | None) -> float:
    if edge_ratio is None:
        return 0.0
    return 1 / (1 + math.exp(-(edge_ratio - SHARP_MIDDLE) / SHARP_WIDTH))


def _noise(luma: float, chroma: float) -> float:
    sigma = math.hypot(luma, chroma)
    return 1 / (1 + sigma / NOISE_HALF)


def _compression(block_edges: float, evenness: float) -> float:
    visible = max(0.0, block_edges - BLOCKS_FREE)
    return _saturating(evenness, EVEN_HALF) / (1 + visible / BLOCKS_HALF)


def _range(stops: float, white: float, black: float) -> float:
    """Clipped white is lost, and glares; black counts half, for nights are black."""
    return _saturating(stops**2, STOPS_HALF**2) * (1 - white) ** 2 * (1 - black / 2)


def _aesthetics(value: float, by: str) -> float:
    if by.startswith(PROXY_PREFIX):
        return value
    return (value - LAION_LOW) / (LAION_HIGH - LAION_LOW)

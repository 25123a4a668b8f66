"""Smoothness of a window: how steadily its pictures and its camera move. Raw measures, and one score.

A measure that cannot be known is None, and the part of the score that rests on it is named in `unknown`; the
score is that of the worst part known. Figures: docs/quality.md.
Source: spec/faults.md W7, P8, D2; spec/formats.md 2 (peers measure the size of motion, not its steadiness).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.quality.motion import MOVES, Floats, Motion, Run
from schemas.quality import SMOOTHNESS_RAWS

NOISE_DEG, NOISE_TRAVEL = 0.3, 0.25
"""Turn in degrees, and travel in median steps, by which a step may be off without being shaken: `vo` is off
by 0.03-0.12 degrees a step."""
LEAST_STEP_M = 0.02
"""Travel in metres that a median step counts for at least: walking is 0.04-0.2, a player's idle bob 0.002."""
SKIP = (1.7, 4.5)
"""Step over those beside it at 1 to 3 lost frames; 1.5 is reached by wrong steps of `vo` (nav08)."""
SMOOTH_S = 0.08
"""Low pass under the jerk, standard deviation in seconds."""
FEWEST = 15
"""Steps, moving frames or instants without which a measure is not made."""
_OF_MOTION = ("shake", "travel", "stutter", "frozen")
"""Parts of which one at least must be known."""
_HALF = {
    # Raw value at which the score of a part is 0.5, and how steep it falls: 1 / (1 + (value / half) ** 2).
    # shake: windows of clean clips 0.00-0.05 (vo) and 0.00-0.02 (truth), of bad01_jitter 0.51-0.60 and
    # 0.55-0.58. The jerk has no part: run keys (17,000) and a flick of the mouse (42,000) reach the 17,000 of
    # bad01.
    "shake": ("shake", 0.15),
    "travel": ("travel_shake", 0.15),
    # Two repeats and a lost frame in 150 are 0.02; every picture three times is 0.67.
    "stutter": ("stutter_share", 0.06),
    # bad05_frozen 0.7; stops of keys without ramps, which look the same, up to 0.33 (nav12).
    "frozen": ("frozen_share", 0.5),
    "timing": ("pts_jitter", 0.25),
    "cut": ("cuts", 0.5),
}


@dataclass(frozen=True, slots=True)
class Smoothness:
    """score: [0, 1], higher is better; None where nothing is known of the motion: one frame, or a world at
    rest. by: the part that it comes from, or "". unknown: parts that could not be known, in order.
    motion_by: what the shake was measured on: "poses", "points" or "".
    raw: measures by name (SMOOTHNESS_RAWS); None where unknown."""

    score: float | None
    by: str
    unknown: tuple[str, ...]
    motion_by: str
    raw: Mapping[str, float | int | None]


def smoothness(clip: Motion, start: int, stop: int) -> Smoothness:
    """Measures and score of the frames [start, stop) of a clip. Raises ValueError outside the clip."""
    if not 0 <= start < stop <= len(clip.seconds):
        raise ValueError(f"window [{start}, {stop}) lies outside a clip of {len(clip.seconds)} frames")
    motion_by, turning = _turning(clip, start, stop)
    raw = {**turning, **_pictures(clip, start, stop)}
    parts = {part: _score(raw[name], half) for part, (name, half) in _HALF.items()}
    known = {part: score for part, score in parts.items() if score is not None}
    unknown = tuple(part for part, score in parts.items() if score is None)
    moves = any(part in known for part in _OF_MOTION)
    by = min(known, key=lambda part: known[part]) if moves else ""
    return Smoothness(known.get(by), by, unknown, motion_by, {name: raw[name] for name in SMOOTHNESS_RAWS})


def _score(value: float | int | None, half: float) -> float | None:
    return None if value is None else 1.0 / (1.0 + (value / half) ** 2)


def _clipped(runs: tuple[Run, ...], start: int, stop: int) -> list[Run]:
    """What lies of the runs in a window, where that is more than one frame."""
    cut = [(max(a, start), min(b, stop)) for a, b in runs]
    return [(a, b) for a, b in cut if b - a > 1]


def _pictures(clip: Motion, start: int, stop: int) -> dict[str, float | int | None]:
    count = stop - start
    inside = slice(start + 1, stop)  # what arrives in the first frame happened before the window
    if count < 2:
        return dict.fromkeys(SMOOTHNESS_RAWS.keys() - {"shake", "travel_shake", "jerk_deg_s3"})
    steps = np.diff(clip.seconds[start:stop])
    usual = float(np.median(steps))
    frozen, still = _clipped(clip.frozen, start, stop), _clipped(clip.still, start, stop)
    longest = max(frozen, key=lambda run: run[1] - run[0], default=None)
    stutters = int(clip.stutter[inside].sum())
    skips, lost = _skips(clip, start, stop)
    moving = int((clip.change[inside] >= MOVES).sum()) + stutters
    moves = moving >= FEWEST
    return {
        "stutter_share": min(1.0, (stutters + lost) / moving) if moves else None,
        "stutters": stutters,
        "skips": skips,
        "repeat_share": float(clip.repeat[inside].sum() / count),
        "held_share": float(clip.held[inside].sum() / count),
        "still_share": sum(b - a for a, b in still) / count,
        "frozen_share": sum(b - a for a, b in frozen) / count if moves else None,
        "frozen_s": (longest[1] - longest[0]) * usual if longest else 0.0,
        "frozen_start": longest[0] if longest else -1,
        "frozen_stop": longest[1] if longest else -1,
        "pts_jitter": float(np.abs(steps / usual - 1).mean()),
        "cuts": None if clip.cut is None else int(clip.cut[inside].sum()),
    }


def _skips(clip: Motion, start: int, stop: int) -> tuple[int, int]:
    """(steps over lost frames, frames lost in them): what the working copy left out, and single steps of
    about a whole multiple of the steps on both sides, which agree."""
    lost = clip.lost[start + 1 : stop]
    skips, frames = int((lost > 0).sum()), int(lost.sum())
    speed = np.linalg.norm(clip.inside(clip.turn, start, stop), axis=1)
    if len(speed) < 3:
        return skips, frames
    left, here, right = speed[:-2], speed[1:-1], speed[2:]
    beside = (left + right) / 2
    alike = np.abs(left - right) <= 0.25 * beside
    turning = beside * clip.knot_s >= 2 * NOISE_DEG
    ratio = np.divide(here, beside, out=np.zeros_like(here), where=turning)
    found = alike & turning & (ratio >= SKIP[0]) & (ratio <= SKIP[1])
    return skips + int(found.sum()), frames + int((np.rint(ratio[found]) - 1).sum())


def _turning(clip: Motion, start: int, stop: int) -> tuple[str, dict[str, float | int | None]]:
    """What the shake was measured on, and the measures of the camera's motion."""
    shake, by = None, ""
    for name, rates in (("poses", clip.turn), ("points", clip.slide)):
        if shake is None and rates is not None:
            shake = _shake(clip.inside(rates, start, stop) * clip.knot_s, NOISE_DEG)
            by = name if shake is not None else ""
    travel_shake = None
    if clip.travel is not None:
        travel = clip.inside(clip.travel, start, stop) * clip.knot_s
        size = np.linalg.norm(travel, axis=1)
        steps = size[np.isfinite(size) & (size > 0)]
        usual = max(LEAST_STEP_M, float(np.median(steps)) if len(steps) else 0.0)
        travel_shake = _shake(travel / usual, NOISE_TRAVEL)
    return by, {"shake": shake, "travel_shake": travel_shake, "jerk_deg_s3": _jerk(clip, start, stop)}


def _shake(steps: Floats, noise: float) -> float | None:
    """Share of the motion that a median of three takes away. steps: float64 [N, 3], motion from knot to knot.

    The next step of a hand or a key lies between its neighbours, whatever its size: square starts and stops,
    ramps and flicks keep their median. A step that jumps out of them on every frame is shaken. Noise under
    `noise` a step does not count, still steps count as that much motion, and no step counts for more than the
    95th percentile: a teleporter, or one blunder of an estimator, is no shaking. None where fewer than FEWEST
    steps, or less than half of them, are known.
    """
    if len(steps) < 3:
        return None
    three = np.stack([steps[:-2], steps[1:-1], steps[2:]])
    off = np.linalg.norm(steps[1:-1] - np.median(three, axis=0), axis=1)
    known = np.isfinite(off)
    if known.sum() < max(FEWEST, len(known) / 2):
        return None
    moved = np.linalg.norm(steps[1:-1], axis=1)[known]
    most = max(noise, float(np.percentile(moved, 95)))
    off = np.clip(off[known] - noise, 0.0, most)
    return float(off.sum() / np.clip(moved, noise, most).sum())


def _jerk(clip: Motion, start: int, stop: int) -> float | None:
    """95th percentile of the size of the angular jerk in deg/s^3: second derivative of the turn rate behind a
    Gaussian of SMOOTH_S, exact for rates that are constant from knot to knot, so frames may come at any
    time. Only instants whose surroundings (3 standard deviations) are known; None for fewer than FEWEST."""
    whole = np.flatnonzero((clip.knots[:-1] >= start) & (clip.knots[1:] < stop))
    if not len(whole):
        return None
    since, until = clip.seconds[clip.knots[whole]], clip.seconds[clip.knots[whole + 1]]
    rates = clip.turn[whole]
    known = np.isfinite(rates).all(axis=1)
    instants = np.arange(since[0] + 3 * SMOOTH_S, until[-1] - 3 * SMOOTH_S, 1 / 60)
    unclear = (since[~known] - 3 * SMOOTH_S, until[~known] + 3 * SMOOTH_S)
    near = (instants[:, None] > unclear[0]) & (instants[:, None] < unclear[1])
    instants = instants[~near.any(axis=1)]
    if len(instants) < FEWEST:
        return None
    slope = _slope(instants[:, None] - since[known]) - _slope(instants[:, None] - until[known])
    return float(np.percentile(np.linalg.norm(slope @ rates[known], axis=1), 95))


def _slope(u: Floats) -> Floats:
    """Derivative of the Gaussian of SMOOTH_S at u seconds."""
    bell = np.exp(-0.5 * (u / SMOOTH_S) ** 2) / (SMOOTH_S * math.sqrt(2 * math.pi))
    slope: Floats = -u / SMOOTH_S**2 * bell
    return slope

"""How two windows lie to each other, from the frames that both show: rotation, then scale, then translation.

All three map `right` onto `left`: R_left = R R_right, p_left = s R p_right + t. Rotation comes from
orientations alone, so it is known where the camera does not move. Nothing is drawn at random.
Source: DESIGN rule 4; spec/faults.md P1, P3, P8; docs/poses.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from schemas.estimate import Estimate
from schemas.pose import PoseTrack
from schemas.stitch import SeamReason

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

FEWEST = 4
"""Shared frames under which no scale is measured: 3 always fit (9 numbers, 4 unknowns) well enough to lie."""
OPEN, KEEP = 0.12, 0.18
"""The parallax gate, on the relative standard deviation of the scale that the overlap itself shows. It opens
at the first and, once open, closes at the second. Ten frames have 0.16 at a step of one noise, 0.05 at 3,
0.016 at 10. Both are multiplied by sqrt(1 - 3 / votes), since few frames fit anything: 0.10 and 0.15 for ten
votes, 0.06 and 0.09 for four. Of 40,000 overlaps of pure noise 4 pass the wider one."""
LOUDEST = 1.5
"""Without the frame that speaks loudest the scale must still pass so many times the gate. Of 300 overlaps
that stand but for one frame, 10 noises off in both windows, 177 were given a scale before, none since."""
STILL = 0.05
"""Share of a window's brisk step under which the overlap counts as standing: both windows see the same
pictures, so what is read as motion in a turn on the spot may agree between them (P1)."""
QUORUM = 0.4
"""Share of the shared frames that must agree. With 20 % of the frames of each window thrown off, one seam in
26 has fewer good ones; a quorum of a half would lose one in 9."""
MOST_REACH = 4.0
"""How much the variance of a frame may grow with its distance from the frames of the fit. Without a limit, 29
of 4,800 still overlaps took a frame that was thrown off for travel."""
TRIM = 3.0
"""Frames further from the mean than so many times the quorum's distance do not count (99 % is at 2.5)."""
_QUORUM_CHI3, _P99_CHI3 = 1.869, 11.34


class SpanMismatch(ValueError):
    """Two tracks that should cover the same frames do not."""


@dataclass(frozen=True, slots=True)
class Turn:
    """matrix: float64 [3, 3], R. residual_deg: median disagreement. agree: bool [F], frames that fit."""

    matrix: Floats
    residual_deg: float
    agree: Bools


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """estimate: s, its relative standard deviation as confidence. agree: bool [F], frames that fit."""

    estimate: Estimate[float]
    agree: Bools


@dataclass(frozen=True, slots=True)
class Shift:
    """t: float64 [3], in units of `left`. residual: rms of the agreeing frames, in units of `left`."""

    vector: Floats
    residual: float
    agree: Bools


def shared_frames(left: PoseTrack, right: PoseTrack) -> Bools:
    """bool [F], frames that are valid in both. Raises SpanMismatch when the lengths differ."""
    if len(left) != len(right):
        raise SpanMismatch(f"an overlap of {len(left)} frames on the left and {len(right)} on the right")
    shared: Bools = left.valid & right.valid
    return shared


def align_rotation(left: PoseTrack, right: PoseTrack) -> Estimate[Turn]:
    """Rotation that maps `right` onto `left`, from the orientations of their shared frames.

    left, right: F shared camera-to-world poses each, OpenCV axes.
    The frame that most others agree with, then the mean of those near it. Confidence is
    the median disagreement in degrees. Unknown with reason "no_overlap" when no frame is valid in both.
    Raises SpanMismatch when the tracks do not share frames. Source: spec/faults.md P1, P8.
    """
    shared = shared_frames(left, right)
    if not shared.any():
        return Estimate.unknown(SeamReason.NO_OVERLAP)
    each = Rotation.from_matrix(left.rotation[shared] @ right.rotation[shared].transpose(0, 2, 1))
    quat = each.as_quat()
    mean = each[_medoid(2 * np.arccos(np.minimum(np.abs(quat @ quat.T), 1.0)))]
    for _ in range(2):
        fits = _near((mean.inv() * each).magnitude(), 1e-7)
        mean = each[fits].mean()
    agree = shared.copy()
    agree[shared] = fits
    residual = float(np.degrees(np.median((mean.inv() * each[fits]).magnitude())))
    return Estimate(Turn(mean.as_matrix(), residual, agree), residual)


def align_scale(
    left: PoseTrack, right: PoseTrack, rotation: Floats, brisk: tuple[float, float], was_open: bool
) -> ScaleFit:
    """Unit of `right` in units of `left`, from distances travelled over the shared frames.

    rotation: float64 [3, 3] of `align_rotation`. brisk: step length that counts as brisk in each track's
    unit, 0 when unknown. was_open: the gate let the seam before pass.
    Every pair of frames that lie a third of the overlap apart proposes the ratio of its two distances; the
    proposal that a quorum of the frames follows best is refined on the frames that follow it. Ratios over one
    frame would have three times the spread (0.16 against 0.05 a seam at a step of 3 noises). Both tracks are
    treated alike, so noise stretches both distances and the ratio stays unbiased; a fit of one to the other
    would shrink it (P3). Unknown with reason "few_frames", "positions_disagree" or "scale_unobservable".
    Raises SpanMismatch when the tracks do not share frames. Source: spec/faults.md P1, P3.
    """
    shared = shared_frames(left, right)
    none = np.zeros(len(shared), np.bool_)
    if np.count_nonzero(shared) < FEWEST:
        return ScaleFit(Estimate.unknown(SeamReason.FEW_FRAMES), none)
    frames = np.flatnonzero(shared)
    a, b = left.translation[frames], right.translation[frames] @ rotation.T
    fits = _consensus(a, b)
    if fits is None:
        return ScaleFit(Estimate.unknown(SeamReason.SCALE_UNOBSERVABLE), none)
    n = int(np.count_nonzero(fits))
    if n < FEWEST or n < _quorum(len(frames)):
        return ScaleFit(Estimate.unknown(SeamReason.POSITIONS_DISAGREE), none)
    agree = none.copy()
    agree[frames[fits]] = True
    a, b, at = a[fits], b[fits], frames[fits]
    scale, spread, each = _measure(a, b)
    pace = np.sqrt(max(float(each.sum()), 0.0) / float(np.sum((at - at.mean()) ** 2)))
    stands = pace < STILL * max(brisk[0], scale * brisk[1])
    gate = (KEEP if was_open else OPEN) * math.sqrt(1 - 3 / n)
    rest = np.arange(n) != int(np.argmax(each))
    _, without, _ = _measure(a[rest], b[rest])
    if stands or spread > gate or without > LOUDEST * gate:
        return ScaleFit(Estimate.unknown(SeamReason.SCALE_UNOBSERVABLE), agree)
    return ScaleFit(Estimate(scale, spread), agree)


def _measure(a: Floats, b: Floats) -> tuple[float, float, Floats]:
    """(scale, its relative standard deviation, squared travel of each frame) of N >= 3 frames."""
    scale, shift = _fit(a, b)
    noise = float(np.sum((a - scale * b - shift) ** 2)) / (3 * len(a) - 4)
    each: Floats = scale * np.sum(_centred(a) * _centred(b), axis=1)
    travel = float(each.sum())
    return scale, math.sqrt(noise / travel) if travel > 0 else math.inf, each


def align_translation(left: PoseTrack, right: PoseTrack, rotation: Floats, scale: float) -> Shift:
    """Translation that maps `right` onto `left`, given rotation and scale; at least one frame is shared.

    The frame that most others agree with, then the mean of those near it.
    """
    shared = shared_frames(left, right)
    each = left.translation[shared] - scale * right.translation[shared] @ rotation.T
    mean = each[_medoid(np.linalg.norm(each[:, None] - each[None], axis=2))]
    for _ in range(2):
        fits = _near(np.linalg.norm(each - mean, axis=1), 1e-9 * (1 + float(np.abs(mean).max())))
        mean = each[fits].mean(axis=0)
    agree = shared.copy()
    agree[shared] = fits
    return Shift(mean, float(np.sqrt(np.mean(np.sum((each[fits] - mean) ** 2, axis=1)))), agree)


def _quorum(n: int) -> int:
    return max(1, math.ceil(QUORUM * n))


def _medoid(apart: Floats) -> int:
    """The one whose quorum of neighbours is nearest."""
    near = _quorum(len(apart)) - 1
    return int(np.argmin(np.partition(apart, near, axis=1)[:, near]))


def _near(away: Floats, floor: float) -> Bools:
    near = _quorum(len(away)) - 1
    out: Bools = away <= TRIM * np.partition(away, near)[near] + floor
    return out


def _consensus(a: Floats, b: Floats) -> Bools | None:
    """Frames that follow one scale and shift; None when no pair of frames is apart on both sides."""
    n = len(a)
    first, second = np.triu_indices(n, max(1, n // 3))
    da = np.linalg.norm(a[second] - a[first], axis=1)
    db = np.linalg.norm(b[second] - b[first], axis=1)
    apart = (da > 0) & (db > 0)
    if not apart.any():
        return None
    first, second = first[apart], second[apart]
    scales = da[apart] / db[apart]
    shifts = (a[first] + a[second]) / 2 - scales[:, None] * (b[first] + b[second]) / 2
    misfit = _misfit(a[None], b[None], scales[:, None], shifts[:, None])
    last = max(_quorum(n), FEWEST) - 1
    ranked = np.partition(misfit, last, axis=1)[:, last]
    best = int(np.argmin(ranked))
    # The best of many proposals fits few frames too well; 1 + 5 / (n - 4) is the usual factor.
    variance = ranked[best] / _QUORUM_CHI3 * (1 + 5 / max(n - 4, 1)) ** 2
    floor = 1e-18 * float(np.sum(_centred(a) ** 2)) / scales[best]
    fits: Bools = misfit[best] <= _P99_CHI3 * variance + floor
    for _ in range(10):
        m = int(np.count_nonzero(fits))
        if m < FEWEST:
            break
        scale, shift = _fit(a[fits], b[fits])
        if not np.isfinite(scale) or scale <= 0:
            return None
        errors = _misfit(a, b, np.asarray(scale), shift)
        variance = float(errors[fits].sum()) / (3 * m - 4)
        # A line through few frames is uncertain where it is extended, and so is their variance: 1 + 8 / dof
        # follows the 99 % point of the F distribution (3, dof) within 7 % for 8 dof and more. Without both,
        # a good overlap lost frames and the stated spread was 25 % too small.
        off = np.sum((b - b[fits].mean(axis=0)) ** 2, axis=1)
        reach = 1 + 1 / m + np.minimum(off / max(float(off[fits].sum()), 1e-300), MOST_REACH)
        before, fits = fits, errors <= _P99_CHI3 * variance * (1 + 8 / (3 * m - 4)) * reach + floor
        if np.array_equal(before, fits):
            break
    return fits


def _misfit(a: Floats, b: Floats, scale: Floats, shift: Floats) -> Floats:
    """Squared distance in the geometric mean of both units: neither a tiny nor a huge scale looks good."""
    out: Floats = np.sum((a - scale[..., None] * b - shift) ** 2, axis=-1) / scale
    return out


def _fit(a: Floats, b: Floats) -> tuple[float, Floats]:
    scale = float(np.sqrt(np.sum(_centred(a) ** 2) / max(float(np.sum(_centred(b) ** 2)), 1e-300)))
    return scale, a.mean(axis=0) - scale * b.mean(axis=0)


def _centred(points: Floats) -> Floats:
    out: Floats = points - points.mean(axis=0)
    return out

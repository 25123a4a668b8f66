"""Which steps of a clip may speak for a rotation rate, and why the others may not.

A step is left out for what the log, the pose track and the pictures show; never by file name, and never for
being far from an expected value alone. Source: spec/faults.md C2, C5, W3, W7.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pipeline import lag
from pipeline.rotation_inputs import Drive
from schemas.action import runs

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Mark(StrEnum):
    """What a step is to calibration."""

    USED = "used"
    IDLE = "idle"  # nothing pressed, nothing turned
    LOG_GAP = "log_gap"
    NO_POSE = "no_pose"
    AMBIGUOUS = "ambiguous"  # more than 90 degrees in one step
    REPEAT = "repeat"  # the picture repeats, or the step is beside one that does: half or twice the turn
    SHARED = "shared"  # several inputs at once: whose turn is it
    NOT_LOGGED = "not_logged"  # the camera turns and nothing is pressed: a cutscene, another device
    NO_RESPONSE = "no_response"  # pressed and nothing turns: a menu, a loading screen
    LAGGED = "lagged"  # log and picture are shifted against each other here
    UNSEEN_PRESS = "unseen_press"  # held since before the clip: how long is not known


NOISE_DEG = 0.05
"""Error of a measured yaw step: the median of `vo` is 0.01-0.08 degrees on the navigation clips."""
STILL_DEG = 3 * NOISE_DEG
"""Less than this is no turn."""
LEAST_RUN = 3
"""Steps in a row that make a menu or a cutscene; fewer are an outlier of the pose track."""
CLOSE, PAD = 5, 2
"""A camera that moves by itself may stand still for some steps, and starts and ends softly."""
AMBIGUOUS_DEG = 90.0
BLOCK = 150
"""Steps in which log and picture are compared: five seconds at 30 fps, a dozen changes of a mouse."""
LAG_SCORE = 0.5
LAG_MARGIN = 0.1
"""How much better another shift must explain a block than shift 0. Where a log is right, the largest gain on
the pack is 0.03 (keys, whose ramp looks like lag)."""


def marks(drive: Drive, turned: Floats, repeat: Bools) -> npt.NDArray[np.object_]:
    """A `Mark` for each of F steps. turned: float64 [F], degrees from frame t to t+1, NaN where not known.
    repeat: bool [F], the frame's picture equals the one before."""
    active = drive.used > 0
    known = np.isfinite(turned)
    after = np.concatenate((repeat[1:], [False]))
    # A camera that answers a fraction of a step late still moves in the step after a release.
    beside = np.concatenate(([False], active[:-1])) | np.concatenate((active[1:], [False]))
    strange = known & ~active & ~beside & (np.abs(turned) > STILL_DEG)
    out = np.full(len(turned), Mark.USED, dtype=object)
    out[_lagged(drive, np.where(strange, np.nan, turned))] = Mark.LAGGED
    out[_sustained(active & known & (np.abs(turned) < STILL_DEG) & _expects(drive, turned))] = (
        Mark.NO_RESPONSE
    )
    out[(drive.used > 1) | drive.clash] = Mark.SHARED
    out[~active] = Mark.IDLE
    out[strange | _around(_sustained(strange))] = Mark.NOT_LOGGED
    out[after | np.roll(after, 1) | np.roll(after, -1)] = Mark.REPEAT
    out[known & (np.abs(turned) > AMBIGUOUS_DEG)] = Mark.AMBIGUOUS
    out[~known] = Mark.NO_POSE
    out[drive.gap] = Mark.LOG_GAP
    return out


def _expects(drive: Drive, turned: Floats) -> Bools:
    """Steps in which an input should turn the camera by far more than the noise, judged by the median answer
    of the steps that did turn: a menu may hold half of the clip."""
    out = np.zeros(len(turned), bool)
    for values in (drive.keys, *drive.counts.values()):
        answers = (np.abs(values) > 0) & (np.abs(turned) > STILL_DEG)
        if answers.any():
            per_unit = np.median(np.abs(turned[answers]) / np.abs(values[answers]))
            out |= per_unit * np.abs(values) > 2 * STILL_DEG
    return out


def _sustained(mask: Bools) -> Bools:
    out = np.zeros(len(mask), bool)
    for start, stop in runs(mask):
        out[start:stop] = stop - start >= LEAST_RUN
    return out


def _around(mask: Bools) -> Bools:
    """Runs of a mask, joined over short gaps and widened."""
    out = np.zeros(len(mask), bool)
    end = -np.inf
    for start, stop in runs(mask):
        if start - end <= CLOSE:
            out[int(end) : start] = True
        out[max(0, start - PAD) : stop + PAD] = True
        end = stop
    return out


def _lagged(drive: Drive, turned: Floats) -> Bools:
    """Blocks that a shift of the log explains better by far: frames were lost or repeated before (W7), or the
    log's row convention is wrong (W3)."""
    out = np.zeros(len(turned), bool)
    signals = [v for v in (drive.keys, *drive.counts.values()) if np.any(np.abs(v) > 0)]
    if not signals:
        return out
    signal = max(signals, key=lambda v: np.count_nonzero(np.abs(v) > 0))
    known = np.abs(turned[np.isfinite(turned)])
    # One flipped step of an estimator must not decide a correlation.
    largest = float(np.quantile(known, 0.95)) if len(known) else 0.0
    answer = np.clip(turned, -largest, largest)
    for start in range(0, len(turned), BLOCK):
        stop = min(start + BLOCK, len(turned))
        found = lag.scan(signal[start:stop], answer[start:stop])
        if found and found.score > LAG_SCORE and found.score - found.scores[lag.MAX_LAG] > LAG_MARGIN:
            out[start:stop] = True
    return out

"""The 6-vector per latent, from inputs and poses.

Latent k moves from the frame at the end of latent k-1 to the frame at its own end, so its row is read from
exactly these native steps: keys from the log, pitch and yaw from the poses of the two frames or, without
poses, from calibrated inputs. What nothing says is NaN with a reason.
Source: spec/worldplay2.md a.6; DESIGN 2; spec/faults.md W3, P8, C7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.inputs import Inputs
from pipeline.pose.stage import turns
from pipeline.sources.keymap import Action, InputUnit
from schemas import timeline
from schemas.action import (
    AXES,
    FORWARD,
    JUMP,
    LATERAL,
    PERSPECTIVE,
    PITCH,
    YAW,
    LatentActions,
    Witness,
    runs,
)
from schemas.clip import FrameTable, Perspective
from schemas.pose import PoseTrack, turn
from schemas.quality import Unknown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Steps:
    """Native steps of each latent k >= 1: frames [start, stop), so that the motion ends at frame `stop`.
    ticks: how long each frame of the clip lasts, int64 [F]."""

    start: Ints
    stop: Ints
    ticks: Ints
    time_base_s: float


def latent_actions(
    table: FrameTable,
    grid: timeline.Grid,
    track: PoseTrack,
    inputs: Inputs | None,
    perspective: Perspective,
    rates: Mapping[str, float],
) -> LatentActions:
    """Action rows of a clip; T = `grid.latents`. rates: degrees by log column, as in `RotationRates`.

    Keys: the direction held longest over the latent's steps, of equals the one in its last step; jump when
    pressed in any. Pitch and yaw have one witness a clip: poses when there are any, else the log.
    """
    ends = timeline.latent_ends(grid.frames)
    durations = np.diff(table.pts, append=2 * table.pts[-1] - table.pts[-2])
    steps = _Steps(ends[:-1], ends[1:], durations, float(table.time_base))
    rows = np.zeros((len(ends), len(AXES)))
    why: dict[int, list[str]] = {axis: [""] * len(ends) for axis in range(len(AXES))}

    def put(axis: int, values: Floats, reasons: list[str]) -> None:
        rows[1:, axis], why[axis][1:] = values, reasons

    put(FORWARD, *_held_longest(inputs, Action.FORWARD, steps))
    put(LATERAL, *_held_longest(inputs, Action.LATERAL, steps))
    put(JUMP, *_any(inputs, Action.JUMP, steps))
    if track.valid.any():
        witness = Witness.POSES
        turned = _turned(track, ends)
        missing = ["" if np.isfinite(pair).all() else Unknown.POSE_GAP for pair in turned]
        put(YAW, turned[:, 0], missing)
        put(PITCH, turned[:, 1], missing)
    else:
        put(YAW, *_from_log(inputs, Action.YAW, steps, rates))
        put(PITCH, *_from_log(inputs, Action.PITCH, steps, rates))
        known = np.isfinite(rows[1:, [YAW, PITCH]]).any()
        witness = Witness.LOG if known else Witness.NONE
    if perspective is Perspective.UNKNOWN:
        rows[:, PERSPECTIVE], why[PERSPECTIVE] = np.nan, [Unknown.NOT_MAPPED] * len(ends)
    else:
        rows[:, PERSPECTIVE] = float(perspective is Perspective.FIRST)
    return LatentActions(
        rows.astype(np.float32),
        {AXES[axis]: _reason_runs(why[axis]) for axis in why if any(why[axis])},
        witness,
    )


def _held_longest(inputs: Inputs | None, action: Action, steps: _Steps) -> tuple[Floats, list[str]]:
    held, missing = _axis(inputs, action)
    if held is None:
        return _unknown(steps, missing)
    values, reasons = np.full(len(steps.start), np.nan), [""] * len(steps.start)
    for k, (a, b) in enumerate(zip(steps.start, steps.stop, strict=True)):
        over, ticks = held[a:b], steps.ticks[a:b]
        if np.isnan(over).any():
            reasons[k] = Unknown.LOG_GAP
            continue
        time_of = {v: int(ticks[over == v].sum()) for v in (-1.0, 0.0, 1.0)}
        longest = [v for v, time in time_of.items() if time == max(time_of.values())]
        values[k] = longest[0] if len(longest) == 1 else over[-1]
    return values, reasons


def _any(inputs: Inputs | None, action: Action, steps: _Steps) -> tuple[Floats, list[str]]:
    held, missing = _axis(inputs, action)
    if held is None:
        return _unknown(steps, missing)
    spans = [held[a:b] for a, b in zip(steps.start, steps.stop, strict=True)]
    values = np.array([np.nan if np.isnan(s).any() else float((s > 0).any()) for s in spans])
    return values, [Unknown.LOG_GAP if np.isnan(v) else "" for v in values]


def _from_log(
    inputs: Inputs | None, action: Action, steps: _Steps, rates: Mapping[str, float]
) -> tuple[Floats, list[str]]:
    """Degrees over each latent, from inputs with a known rate.

    A latent in which an input without a rate was used is unknown, and so is every latent when no input of the
    axis has a rate: that nothing was pressed is then no witness that nothing turned.
    """
    if inputs is None:
        return _unknown(steps, Unknown.NO_POSES)
    driving = inputs.part.driving(action)
    if action in inputs.part.absent:
        return np.zeros(len(steps.start)), [""] * len(steps.start)
    if not driving:
        return _unknown(steps, Unknown.NOT_MAPPED)
    if not inputs.part.complete:
        return _unknown(steps, Unknown.INPUT_NOT_LOGGED)
    if not any(i.column in rates for i in driving):
        return _unknown(steps, Unknown.UNCALIBRATED)
    degrees, blind = np.zeros(len(steps.ticks)), np.zeros(len(steps.ticks), bool)
    for i in driving:
        values = inputs.values[i.column]
        if i.column in rates:
            lasts = steps.ticks * steps.time_base_s if i.unit is InputUnit.KEY else 1.0
            degrees = degrees + i.sign * values * lasts * rates[i.column]
        else:
            degrees = degrees + 0.0 * values  # a missing row is a gap for every input
            blind |= np.abs(values) > 0
    spans = list(zip(steps.start, steps.stop, strict=True))
    turned = np.array([np.nan if blind[a:b].any() else degrees[a:b].sum() for a, b in spans])
    reasons = [
        "" if np.isfinite(v) else Unknown.UNCALIBRATED if blind[a:b].any() else Unknown.LOG_GAP
        for v, (a, b) in zip(turned, spans, strict=True)
    ]
    return turned, reasons


def _turned(track: PoseTrack, ends: Ints) -> Floats:
    """(yaw, pitch) between the poses of consecutive latent ends, float64 [T-1, 2]. A yaw of more than half a
    turn is told from its short way round by the sum of the steps between."""
    out = turn(track.rotation[ends[:-1]], track.rotation[ends[1:]], track.up)
    steps = turns(track)[:, 0]
    summed = np.array([steps[a:b].sum() for a, b in pairwise(ends)])
    rounds = np.rint((summed - out[:, 0]) / 360.0)
    out[:, 0] += 360.0 * np.where(np.isfinite(rounds), rounds, 0.0)
    return out


def _axis(inputs: Inputs | None, action: Action) -> tuple[Floats | None, str]:
    if inputs is None:
        return None, Unknown.NO_LOG
    return inputs.axis(action), Unknown.NOT_MAPPED


def _unknown(steps: _Steps, reason: str) -> tuple[Floats, list[str]]:
    return np.full(len(steps.start), np.nan), [reason] * len(steps.start)


def _reason_runs(reasons: list[str]) -> tuple[tuple[int, int, str], ...]:
    names = np.array(reasons, dtype=object)
    found = [(a, b, str(name)) for name in sorted(set(reasons) - {""}) for a, b in runs(names == name)]
    return tuple(sorted(found))

"""The 6-vector per latent, from inputs and poses.

Latent k moves from the frame at the end of latent k-1 to the frame at its own end, so its row is read from
exactly these native steps: keys from the log, pitch and yaw from calibrated inputs or from the poses of the
two frames (pipeline/latent_turns.py). What nothing says is NaN with a reason.
Source: spec/worldplay2.md a.6; DESIGN 2; spec/faults.md W3, P8, C7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.inputs import Inputs
from pipeline.latent_turns import Chosen, choose
from pipeline.sources.keymap import Action
from schemas import timeline
from schemas.action import (
    AXES,
    FORWARD,
    JUMP,
    LATERAL,
    PERSPECTIVE,
    PITCH,
    YAW,
    InputRate,
    LatentActions,
    Witness,
    runs,
)
from schemas.clip import FrameTable, Perspective
from schemas.pose import PoseTrack
from schemas.quality import Unknown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


_TURNS = {YAW: Action.YAW, PITCH: Action.PITCH}


@dataclass(frozen=True)
class _Steps:
    """Native steps of each latent k >= 1: frames [start, stop), so that the motion ends at frame `stop`.
    ticks: how long each frame of the clip lasts, int64 [F]."""

    start: Ints
    stop: Ints
    ticks: Ints


def latent_actions(
    table: FrameTable,
    grid: timeline.Grid,
    track: PoseTrack,
    inputs: Inputs | None,
    perspective: Perspective,
    rates: Mapping[str, InputRate],
) -> tuple[LatentActions, dict[int, Chosen]]:
    """Action rows of a clip, T = `grid.latents`; and by axis (YAW, PITCH) where its turn comes from.
    rates: by input, as in `RotationRates`.

    Keys: the direction held longest over the latent's steps, of equals the one in its last step; jump when
    pressed in any. Pitch and yaw: see pipeline/latent_turns.py.
    """
    ends = timeline.latent_ends(grid.frames)
    durations = np.diff(table.pts, append=2 * table.pts[-1] - table.pts[-2])
    steps = _Steps(ends[:-1], ends[1:], durations)
    rows = np.zeros((len(ends), len(AXES)))
    why: dict[int, list[str]] = {axis: [""] * len(ends) for axis in range(len(AXES))}

    def put(axis: int, values: Floats, reasons: list[str]) -> None:
        rows[1:, axis], why[axis][1:] = values, reasons

    put(FORWARD, *_held_longest(inputs, Action.FORWARD, steps))
    put(LATERAL, *_held_longest(inputs, Action.LATERAL, steps))
    put(JUMP, *_any(inputs, Action.JUMP, steps))
    turned = {axis: choose(inputs, action, table, ends, track, rates) for axis, action in _TURNS.items()}
    for axis, chosen in turned.items():
        put(axis, chosen.turns.degrees, chosen.turns.reasons)
    if perspective is Perspective.UNKNOWN:
        rows[:, PERSPECTIVE], why[PERSPECTIVE] = np.nan, [Unknown.NOT_MAPPED] * len(ends)
    else:
        rows[:, PERSPECTIVE] = float(perspective is Perspective.FIRST)
    actions = LatentActions(
        rows.astype(np.float32),
        {AXES[axis]: _reason_runs(why[axis]) for axis in why if any(why[axis])},
        _witness(turned.values()),
    )
    return actions, turned


def _witness(turned: Iterable[Chosen]) -> Witness:
    log = any(c.from_log.any() for c in turned)
    poses = any((c.turns.known & ~c.from_log).any() for c in turned)
    return {
        (True, True): Witness.BOTH,
        (True, False): Witness.LOG,
        (False, True): Witness.POSES,
        (False, False): Witness.NONE,
    }[log, poses]


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

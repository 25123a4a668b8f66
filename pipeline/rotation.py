"""Rotation rate of each game, from inputs per frame and the measured turn of each step.

Keys give deg/s as a function of the time since the press, mice degrees per count; each axis on its own, with
its sign. What is not sure has a status and no value. Which clips spoke, and which of their steps were left
out and why, is part of the record. Source: DESIGN rules 4 and 10; spec/faults.md C2, C5, C7, W7.
Described for users in docs/rotation.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.inputs import Inputs
from pipeline.pose.stage import turns
from pipeline.rotation_inputs import Drive, drive, held_s
from pipeline.rotation_keys import Held, ramp
from pipeline.rotation_masks import NOISE_DEG, Mark, marks
from pipeline.rotation_robust import (
    LEAST_STEPS,
    MINOR_MODE,
    MODES_APART,
    NOISE_SHARE,
    Value,
    gain,
    middle,
    two_modes,
)
from pipeline.sources.keymap import Action, InputUnit
from schemas.action import (
    RUN_SUFFIX,
    InputRate,
    RampLevel,
    RateStatus,
    RateUnit,
    RecordingRate,
    RotationRates,
)
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack

ESTIMATOR = "rotation-1"
AXES = (Action.YAW, Action.PITCH)
CLEAR_DEG = 10 * NOISE_DEG
"""A step of a mouse that turns this much shows its own sensitivity within 10 %."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recording:
    """One clip with a log and a pose track.

    seconds: float64 [F], time of each frame. turned: float64 [F, 2], (yaw right, pitch up) degrees from frame
    t to t+1; NaN where not known, and in the last row. repeat: bool [F], the picture equals the one before.
    """

    clip_id: str
    game: str
    inputs: Inputs
    seconds: Floats
    turned: Floats
    repeat: Bools

    def __post_init__(self) -> None:
        f = len(self.seconds)
        if self.turned.shape != (f, 2) or self.repeat.shape != (f,):
            raise ValueError(f"clip {self.clip_id}: {f} frames need turned [{f}, 2] and repeat [{f}]")
        if f and not np.isnan(self.turned[-1]).all():
            raise ValueError(f"clip {self.clip_id}: the last frame has no next one: its turn must be NaN")


def recording(clip: Clip, table: FrameTable, inputs: Inputs, track: PoseTrack) -> Recording:
    """What a clip with a log and poses gives to calibration."""
    return Recording(clip.clip_id, clip.game, inputs, table.seconds, turns(track), table.repeat)


def calibrate(recordings: Iterable[Recording]) -> RotationRates:
    """Rates of every input that drives yaw or pitch in the recordings, by game, in any order."""
    games: dict[str, list[Recording]] = {}
    for one in sorted(recordings, key=lambda r: (r.game, r.clip_id)):
        games.setdefault(one.game, []).append(one)
    return RotationRates(
        rates={
            game: {name: rate for axis in range(len(AXES)) for name, rate in _axis(together, axis).items()}
            for game, together in games.items()
        }
    )


@dataclass(frozen=True)
class _Clip:
    """One axis of one recording, marked."""

    clip_id: str
    drive: Drive
    marks: npt.NDArray[np.object_]
    turned: Floats
    lasts: Floats

    def not_used(self, acts: Bools) -> dict[str, int]:
        """By reason, the steps of an input that were left out."""
        out = Counter(str(m) for m in self.marks[acts] if m != Mark.USED)
        out[str(Mark.NOT_LOGGED)] += int(np.count_nonzero((self.marks == Mark.NOT_LOGGED) & ~acts))
        return {name: count for name, count in sorted(out.items()) if count}


def _axis(recordings: list[Recording], axis: int) -> dict[str, InputRate]:
    clips = [_clip(one, axis) for one in recordings]
    inputs = {i.column: i for clip in clips for i in clip.drive.inputs}
    out: dict[str, InputRate] = {}
    for column, one in sorted(inputs.items()):
        if one.unit is InputUnit.COUNT:
            out[column] = _count(clips, column, AXES[axis])
    if any(i.unit is InputUnit.KEY for i in inputs.values()):
        for running in (False, True):
            out |= _keys(clips, running, AXES[axis])
    return out


def _clip(one: Recording, axis: int) -> _Clip:
    driven = drive(one.inputs, AXES[axis], one.seconds)
    turned = one.turned[:, axis]
    lasts = np.diff(one.seconds, append=np.nan)
    return _Clip(one.clip_id, driven, marks(driven, turned, one.repeat), turned, lasts)


# --- counts -----------------------------------------------------------------------------------------------


def _count(clips: list[_Clip], column: str, axis: Action) -> InputRate:
    parts, acting = [], []
    for k, clip in enumerate(clips):
        counts = clip.drive.counts.get(column)
        if counts is None:
            counts = np.zeros(len(clip.turned))
        before, after = np.concatenate(([0.0], counts[:-1])), np.concatenate((counts[1:], [0.0]))
        acts = np.abs(counts) > 0
        near = acts | (np.abs(before) > 0) | (np.abs(after) > 0)
        quiet = (clip.marks == Mark.IDLE) & near  # a count may reach the picture one step off
        used = ((clip.marks == Mark.USED) & acts | quiet) & np.isfinite(before + after)
        parts.append(np.stack([before, counts, after, clip.turned, np.full(len(counts), k)], axis=1)[used])
        acting.append(acts)
    table = np.concatenate(parts)

    of_clip = [table[table[:, 4] == k] for k in range(len(clips))]
    steps = [int(np.count_nonzero(rows[:, 1])) for rows in of_clip]
    each = [
        gain(rows[:, :3], rows[:, 3])[0] if n >= LEAST_STEPS else None
        for rows, n in zip(of_clip, steps, strict=True)
    ]
    notes = _notes(clips, acting, each, steps)
    value, modes = None, None
    if sum(steps) >= LEAST_STEPS:
        turned = np.abs(table[:, 3])
        value, reaching = gain(table[:, :3], table[:, 3])
        sure = (np.abs(reaching) > 0.5) & (turned > CLEAR_DEG)
        if np.count_nonzero(sure) >= LEAST_STEPS:
            ratio = turned[sure] / np.abs(reaching[sure])
            modes = two_modes(ratio, np.maximum(MODES_APART, 4 * NOISE_DEG / turned[sure]))
    return _decide(axis, RateUnit.DEG_PER_COUNT, value, modes, each, notes, sum(steps))


# --- keys -------------------------------------------------------------------------------------------------


def _keys(clips: list[_Clip], running: bool, axis: Action) -> dict[str, InputRate]:
    """Rates of the keys of both sides. They are taken together, which halves the noise of a short onset,
    unless the sides differ."""
    held = _held(clips, running)
    names = {side: next((n for c in clips if (n := c.drive.key(side))), "") for side in (-1, 1)}
    pressed = {side: any(_acts(c, running, (side,)).any() for c in clips) for side in (-1, 1)}
    if running and not any(pressed.values()):
        return {}
    sides = [held.take(held.side == side) for side in (-1, 1)]
    together = not _differ(sides[0], sides[1])
    out = {}
    for side, own in zip((-1, 1), sides, strict=True):
        if names[side] and (pressed[side] or not running):
            spoke = (-1, 1) if together else (side,)
            name = names[side] + (RUN_SUFFIX if running else "")
            out[name] = _key(clips, held if together else own, running, spoke, axis)
    return out


def _key(clips: list[_Clip], held: Held, running: bool, spoke: tuple[int, ...], axis: Action) -> InputRate:
    whole = ramp(held)
    steps = [int(np.count_nonzero(held.clip == k)) for k in range(len(clips))]
    each: list[Value | None] = [None] * len(clips)
    modes = None
    if whole is not None:
        late = (held.since_press if whole.restarts else held.since_idle) >= whole.levels[-1].from_s
        for k in range(len(clips)):
            own = held.rate[late & (held.clip == k)]
            each[k] = middle(own) if len(own) >= LEAST_STEPS else None
        modes = two_modes(np.abs(held.rate[late]), np.full(int(late.sum()), MODES_APART))
    notes = _notes(clips, [_acts(c, running, spoke) for c in clips], each, steps)
    steady = None if whole is None else whole.steady
    rate = _decide(axis, RateUnit.DEG_PER_S, steady, modes, each, notes, len(held))
    if whole is None or rate.status is not RateStatus.OK:
        return rate
    levels = tuple(_rounded(level) for level in whole.levels)
    return rate.model_copy(
        update={"ramp": levels, "ramp_restarts": whole.restarts, "value": levels[-1].value}
    )


def _acts(clip: _Clip, running: bool, sides: tuple[int, ...]) -> Bools:
    acts: Bools = np.isin(clip.drive.keys, sides) & (clip.drive.run == running)
    return acts


def _held(clips: list[_Clip], running: bool) -> Held:
    parts = []
    for k, clip in enumerate(clips):
        press, idle = held_s(clip.drive, True), held_s(clip.drive, False)
        clip.marks[_acts(clip, running, (-1, 1)) & np.isnan(idle) & (clip.marks == Mark.USED)] = (
            Mark.UNSEEN_PRESS
        )
        used = _acts(clip, running, (-1, 1)) & (clip.marks == Mark.USED)
        side = clip.drive.keys[used]
        rate = clip.turned[used] / clip.lasts[used] * side
        parts.append(Held(rate, press[used], idle[used], side, np.full(int(used.sum()), k)))
    return Held(*(np.concatenate([getattr(p, n) for p in parts]) for n in Held.__dataclass_fields__))


def _differ(left: Held, right: Held) -> bool:
    """Do the two sides turn at different speeds (or in the same direction: a wrong sign in the key map)."""
    if min(len(left), len(right)) < LEAST_STEPS:
        return False
    one, other = ramp(left), ramp(right)
    if one is None or other is None:
        return False
    a, b = one.steady, other.steady
    doubt = max(NOISE_SHARE * max(abs(a.value), abs(b.value)), 4 * float(np.hypot(a.error, b.error)))
    return abs(a.value - b.value) > doubt


# --- verdict ----------------------------------------------------------------------------------------------


def _notes(
    clips: list[_Clip], acting: list[Bools], each: list[Value | None], steps: list[int]
) -> tuple[RecordingRate, ...]:
    return tuple(
        RecordingRate(
            clip_id=clip.clip_id,
            value=None if value is None else _short(value.value),
            n=n,
            not_used=clip.not_used(acts),
        )
        for clip, acts, value, n in zip(clips, acting, each, steps, strict=True)
        if acts.any()
    )


def _decide(
    axis: Action,
    unit: RateUnit,
    value: Value | None,
    modes: tuple[float, float] | None,
    each: list[Value | None],
    notes: tuple[RecordingRate, ...],
    n: int,
) -> InputRate:
    sure = [v for v in each if v is not None and v.calibrated]
    modes = modes or _split(sure)
    status = RateStatus.UNCALIBRATED
    kept: float | None = None
    shown: tuple[float, ...] = ()
    if value is not None and modes is not None:
        status, shown = RateStatus.TWO_MODES, tuple(_short(m) for m in modes)
    elif value is not None and value.calibrated and value.value < 0:
        status, shown = RateStatus.SIGN_CONTRADICTED, (_short(value.value),)
    elif value is not None and value.calibrated:
        status, kept = RateStatus.OK, _short(value.value)
    values = [v.value for v in sure]
    return InputRate(
        value=kept,
        axis=str(axis),
        unit=unit,
        n=n if value is None else value.n,
        mad=0.0 if value is None else _short(value.mad),
        status=status,
        spread=_short((max(values) - min(values)) / abs(float(np.median(values))))
        if len(values) > 1
        else 0.0,
        modes=shown,
        recordings=notes,
        estimator=ESTIMATOR,
    )


def _split(values: list[Value]) -> tuple[float, float] | None:
    """Two sensitivities between recordings that each agree with themselves."""
    ordered = sorted(values, key=lambda v: v.value)
    total = sum(v.n for v in ordered)
    for k in range(1, len(ordered)):
        low, high = ordered[k - 1].value, ordered[k].value
        apart = abs(high - low) > MODES_APART * min(abs(low), abs(high))
        share = sum(v.n for v in ordered[:k]) / total
        if apart and MINOR_MODE <= share <= 1 - MINOR_MODE:
            sides = (ordered[:k], ordered[k:])
            low, high = (float(np.median([v.value for v in side])) for side in sides)
            return low, high
    return None


def _short(value: float) -> float:
    """Six significant digits: a record is read by people, and no rate is known better."""
    return float(f"{value:.6g}")


def _rounded(level: RampLevel) -> RampLevel:
    return RampLevel(from_s=level.from_s, value=_short(level.value), n=level.n, mad=_short(level.mad))

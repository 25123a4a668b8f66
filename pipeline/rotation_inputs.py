"""What drives an axis in each step of a clip: keys by direction and age, counts, the run modifier.

Used by calibration and by the actions that come of it, so that both mean the same by "since the press".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.inputs import Inputs
from pipeline.sources.keymap import Action, Input, InputUnit
from schemas.action import RUN_SUFFIX, InputRate, RampLevel, runs

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Drive:
    """Inputs of one axis over the F steps of a clip, signed as the key map says.

    keys: float64 [F], -1, 0 or 1. counts: by column, float64 [F]. NaN where the log has a gap.
    clash: bool [F], opposite keys held at once. run: bool [F]. starts: float64 [F], seconds.
    """

    inputs: tuple[Input, ...]
    keys: Floats
    counts: dict[str, Floats]
    clash: Bools
    run: Bools
    starts: Floats

    @property
    def gap(self) -> Bools:
        gap: Bools = np.isnan(np.sum([self.keys, *self.counts.values()], axis=0))
        return gap

    @property
    def used(self) -> npt.NDArray[np.int64]:
        """int64 [F], how many of keys and count columns act in a step."""
        several = [np.abs(v) > 0 for v in (self.keys, *self.counts.values())]
        used: npt.NDArray[np.int64] = np.sum([*several, self.clash], axis=0)
        return used

    def key(self, direction: int) -> str:
        """Log column of the key that turns to a side; "" when the game has none."""
        found = [i.column for i in self.inputs if i.unit is InputUnit.KEY and i.sign == direction]
        return found[0] if found else ""


def drive(inputs: Inputs, action: Action, starts: Floats) -> Drive:
    """What drives an axis. starts: float64 [F], time of each frame in seconds."""
    driving = inputs.part.driving(action)
    empty = np.zeros(len(starts))
    signed = {i.column: i.sign * inputs.values[i.column] for i in driving}
    keys = [signed[i.column] for i in driving if i.unit is InputUnit.KEY]
    sides = [np.any([k * d > 0 for k in keys], axis=0) if keys else empty > 0 for d in (-1, 1)]
    running = [inputs.values[i.column] for i in inputs.part.driving(Action.RUN)]
    return Drive(
        inputs=driving,
        keys=np.clip(np.sum(keys, axis=0), -1.0, 1.0) if keys else empty,
        counts={i.column: signed[i.column] for i in driving if i.unit is InputUnit.COUNT},
        clash=sides[0] & sides[1],
        run=np.any([r > 0 for r in running], axis=0) if running else empty > 0,
        starts=starts,
    )


def held_s(drive: Drive, restarts: bool) -> Floats:
    """float64 [F], seconds between the press and the start of each step in which a key is held, else NaN.

    restarts: changing to the opposite key is a new press. NaN too when the log does not show the press: held
    from the first frame on, or out of a gap.
    """
    ages = np.full(len(drive.starts), np.nan)
    held = (np.abs(drive.keys) > 0) | drive.clash
    sides = [drive.keys == d for d in (-1.0, 1.0)] if restarts else [held]
    for side in sides:
        for start, stop in runs(side):
            if start > 0 and not drive.gap[start - 1]:
                ages[start:stop] = drive.starts[start:stop] - drive.starts[start]
    return np.round(ages, 6)  # whole microseconds: ages of different presses compare equal


def turned_by_keys(drive: Drive, lasts: Floats, rates: Mapping[str, InputRate]) -> Floats:
    """float64 [F], signed degrees that held keys turn in each step; lasts: [F], seconds that a step lasts.

    NaN where the key in use has no rate, or where its ramp matters and the press was not seen.
    """
    out = np.where(np.isnan(drive.keys), np.nan, 0.0)
    for direction in (-1, 1):
        for running in (False, True):
            acts = (drive.keys == direction) & (drive.run == running)
            if not acts.any():
                continue
            rate = rates.get(drive.key(direction) + (RUN_SUFFIX if running else ""))
            if rate is None or rate.value is None:
                out[acts] = np.nan
                continue
            ages = held_s(drive, rate.ramp_restarts)
            out[acts] = direction * _over(rate.levels, ages[acts], lasts[acts])
            if (long := acts & np.isnan(ages) & _surely_past(drive, rate)).any():
                out[long] = direction * rate.value * lasts[long]
    return out


def _over(levels: tuple[RampLevel, ...], ages: Floats, lasts: Floats) -> Floats:
    """Degrees from `ages` to `ages + lasts` after the press: the rate, integrated."""
    if len(levels) == 1:
        return levels[0].value * lasts
    ends = [level.from_s for level in levels[1:]] + [np.inf]
    shares = [
        level.value * np.clip(np.minimum(ages + lasts, end) - np.maximum(ages, level.from_s), 0.0, None)
        for level, end in zip(levels, ends, strict=True)
    ]
    return np.asarray(np.sum(shares, axis=0), np.float64)


def _surely_past(drive: Drive, rate: InputRate) -> Bools:
    """Steps so long after a press that nobody saw that the ramp is over in any case."""
    past = np.zeros(len(drive.starts), bool)
    held = (np.abs(drive.keys) > 0) | drive.clash
    for start, stop in runs(held):
        past[start:stop] = drive.starts[start:stop] - drive.starts[start] >= rate.levels[-1].from_s
    return past

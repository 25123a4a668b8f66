"""Actions: what the player pressed per frame, and the 6-vector per latent that the model consumes.

Row t of a log is the input held from frame t to frame t+1: a[t] moves f[t] -> f[t+1] (spec/faults.md W3).
Source: spec/worldplay2.md a.6, b; DESIGN 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

AXES = ("pitch", "yaw", "forward", "lateral", "perspective", "jump")
"""Order of the 6-vector. pitch, yaw: degrees per latent, up and right positive. forward -1/0/1 (s, w),
lateral -1/0/1 (a, d), perspective 0 third person, 1 first person, jump 0/1."""

PITCH, YAW, FORWARD, LATERAL, PERSPECTIVE, JUMP = range(6)
LEGAL: dict[int, tuple[int, ...]] = {
    FORWARD: (-1, 0, 1),
    LATERAL: (-1, 0, 1),
    PERSPECTIVE: (0, 1),
    JUMP: (0, 1),
}
"""Values of the enumerated axes."""


Reasons = dict[str, tuple[tuple[int, int, str], ...]]
"""Why values are unknown: by axis name, runs (first latent, last latent + 1, reason)."""


class Witness(StrEnum):
    """Where the pitch and yaw of a row come from."""

    POSES = "poses"
    LOG = "log"
    BOTH = "both"  # the log where it is calibrated and the camera agrees, else poses
    NONE = "none"


class RateStatus(StrEnum):
    """May a rate be used. Only `ok` has a value that turns inputs into degrees."""

    OK = "ok"
    UNCALIBRATED = "uncalibrated"  # too few steps, or they leave the value open by more than 2 %
    TWO_MODES = "two_modes"  # two sensitivities under one name: an average would be neither
    SIGN_CONTRADICTED = "sign_contradicted"  # the camera turns against the sign of the key map


class RateUnit(StrEnum):
    DEG_PER_S = "deg_per_s"  # while held
    DEG_PER_COUNT = "deg_per_count"


class RampLevel(BaseModel):
    """Rate of a key from `from_s` seconds after the press on, until the next level. n steps, mad in deg/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    from_s: float = Field(ge=0)
    value: float
    n: int = 0
    mad: float = 0.0


class RecordingRate(BaseModel):
    """What one clip said: its own value (None below the minimum), the steps it gave, and by reason its steps
    that were not used."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    clip_id: str
    value: float | None
    n: int
    not_used: dict[str, int] = {}


class InputRate(BaseModel):
    """How far one input turns the camera: positive side, without the sign that the key map states.

    value: deg/s held in the long run, or degrees per count; None unless the status is ok.
    n, mad: steps behind the value and their median absolute deviation, in its unit.
    ramp: levels of a key from the press on, the last of which is the value; empty for counts and for a rate
    that a user states. ramp_restarts: does changing to the opposite key start the ramp again.
    spread: (largest - smallest) / value over the recordings with enough steps of their own.
    modes: the two values, under two_modes; the measured negative value under sign_contradicted.
    A plain number stands for a rate that a user states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    value: float | None
    axis: str = ""
    unit: RateUnit | None = None
    n: int = 0
    mad: float = 0.0
    status: RateStatus = RateStatus.OK
    ramp: tuple[RampLevel, ...] = ()
    ramp_restarts: bool = True
    spread: float = 0.0
    modes: tuple[float, ...] = ()
    recordings: tuple[RecordingRate, ...] = ()
    estimator: str = "stated"

    @model_validator(mode="before")
    @classmethod
    def _plain_number(cls, data: object) -> object:
        return {"value": data} if isinstance(data, (int, float)) else data

    @model_validator(mode="after")
    def _usable(self) -> InputRate:
        if (self.value is None) == (self.status is RateStatus.OK):
            raise ValueError("a rate has a value exactly when its status is ok")
        starts = [level.from_s for level in self.ramp]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError("a ramp starts at 0 s and its levels follow each other")
        if self.ramp and self.value is not None and self.ramp[-1].value != self.value:
            raise ValueError("the last level of a ramp is the value")
        return self

    @property
    def levels(self) -> tuple[RampLevel, ...]:
        """Levels from the press on; without a ramp, one. Raises ValueError when there is no value."""
        if self.value is None:
            raise ValueError(f"a rate that is {self.status} has no value")
        return self.ramp or (RampLevel(from_s=0, value=self.value, n=self.n, mad=self.mad),)


RUN_SUFFIX = "+run"
"""A key held together with the game's run modifier is an input of its own: `TURN_LEFT+run`."""


class RotationRates(BaseModel):
    """Frozen statistics: how far one unit of an input turns the camera, by game and input.

    An input is a log column, or column + `RUN_SUFFIX`. One that is not here is uncalibrated.
    Source: DESIGN rule 10; spec/faults.md C2, C7.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rates: dict[str, dict[str, InputRate]] = Field(
        default={},
        description="game -> input -> its rate; a plain number is deg/s held, or degrees per count",
    )

    def rate(self, game: str, name: str) -> float | None:
        """Value of an input; None when it is not calibrated."""
        found = self.rates.get(game, {}).get(name)
        return None if found is None else found.value

    def rows(self) -> list[dict[str, str | int | float | bool | None]]:
        """Rows of table `rotation`: one an input, in order."""
        return [
            {
                "game": game,
                "input": name,
                "axis": r.axis,
                "value": r.value,
                "unit": "" if r.unit is None else str(r.unit),
                "n": r.n,
                "mad": r.mad,
                "status": str(r.status),
                "onset": r.ramp[0].value if r.ramp else None,
                "onset_s": r.ramp[1].from_s if len(r.ramp) > 1 else 0.0,
                "onset_n": r.ramp[0].n if r.ramp else 0,
                "onset_mad": r.ramp[0].mad if r.ramp else 0.0,
                "ramp_restarts": r.ramp_restarts,
                "spread": r.spread,
                "modes": "|".join(f"{m:g}" for m in r.modes),
                "recordings": len(r.recordings),
                "estimator": r.estimator,
            }
            for game, inputs in sorted(self.rates.items())
            for name, r in sorted(inputs.items())
        ]


@dataclass(frozen=True, slots=True)
class LatentActions:
    """Action rows of a clip, one per latent.

    rows: float32 [T, 6] in the order of `AXES`; NaN where the value is not known. Row 0 is idle.
    reasons: per axis name, runs (first latent, last latent + 1, reason) that cover exactly its NaN entries.
    witness: what pitch and yaw were measured from.
    """

    rows: npt.NDArray[np.float32]
    reasons: Reasons
    witness: Witness

    def __post_init__(self) -> None:
        t = len(self.rows)
        if self.rows.shape != (t, 6):
            raise ValueError(f"action rows must be [T, 6], got {self.rows.shape}")
        for axis, name in enumerate(AXES):
            named = np.zeros(t, bool)
            for start, stop, _ in self.reasons.get(name, ()):
                named[start:stop] = True
            if not np.array_equal(named, np.isnan(self.rows[:, axis])):
                raise ValueError(f"every unknown {name} needs a reason, and only those")
        if unknown := set(self.reasons) - set(AXES):
            raise ValueError(f"reasons for {', '.join(sorted(unknown))}, which is no axis")
        for axis, legal in LEGAL.items():
            values = self.rows[:, axis]
            if not np.isin(values[~np.isnan(values)], legal).all():
                raise ValueError(f"{AXES[axis]} must be one of {legal}")
        idle = self.rows[:1, [PITCH, YAW, FORWARD, LATERAL, JUMP]]
        if np.any(idle != 0):
            raise ValueError("row 0 must be idle: nothing moves before the first frame")


def runs(mask: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Maximal runs (start, stop) of True in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))

"""Actions: what the player pressed per frame, and the 6-vector per latent that the model consumes.

Row t of a log is the input held from frame t to frame t+1: a[t] moves f[t] -> f[t+1] (spec/faults.md W3).
Source: spec/worldplay2.md a.6, b; DESIGN 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

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
    NONE = "none"


class RotationRates(BaseModel):
    """Frozen statistics: how far one unit of an input turns the camera, by game and log column.

    A key's rate is in degrees per second held, a count's in degrees per count, both of the positive side and
    without the sign that the key map states. An input without a rate is uncalibrated. Source: DESIGN rule 10;
    spec/faults.md C7.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rates: dict[str, dict[str, float]] = Field(
        default={}, description="game -> log column -> degrees per second held, or degrees per count"
    )

    def rate(self, game: str, column: str) -> float | None:
        return self.rates.get(game, {}).get(column)


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

"""What selection goes by: the policy, the frozen distribution of the scores, and thresholds from both.

A threshold is a percentile of the clip's own game or source, held between an absolute floor and a level that
is always enough: scores of rendered and filmed pictures are not on one footing, and a percentile alone would
throw away a share of any corpus, however good. Source: spec/faults.md Q5; docs/selection.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from schemas import SCHEMA_VERSION

OUT, PENDING = "out", "pending"
"""Tiers that no policy names: refused, and not judged yet."""

_TIER = re.compile(r"[a-z][a-z0-9_]{0,31}")

Axis = Literal["sharpness", "detail", "noise", "compression", "dynamic_range", "aesthetics", "smoothness"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Axes of quality: medians over a clip's windows, 0 to 1, higher is better."""

Percentile = Literal[1, 5, 10, 25, 50, 75, 90, 99]
PERCENTILES: tuple[Percentile, ...] = get_args(Percentile)
"""What a frozen distribution holds of each axis, and what a tier may ask for."""

Score = Annotated[float, Field(ge=0, le=1)]

_FLOOR: dict[Axis, float] = {
    # Between what no play of the pack falls to and what its damaged copies score.
    "sharpness": 0.25,  # play 0.90-0.98; enlarged from 160 pixels 0.14, blur of sigma 4 0.04
    "detail": 0.2,  # play 0.71-0.83; nothing in the pack is lower than 0.64
    "noise": 0.3,  # play 0.97-1.00; sigma 10 0.89, sigma 50 0.08
    "compression": 0.3,  # play 0.74-0.82; crf 38 0.47, crf 51 0.22
    "dynamic_range": 0.2,  # play 0.50-0.81; overexposed 8 times 0.38, next to no contrast 0.0
    "aesthetics": 0.05,  # play 0.21-0.43 by the proxy, which is no ground to refuse a clip
    "smoothness": 0.35,  # play 0.9-1.0; views that jump at random under 0.2
}
_ENOUGH: dict[Axis, float] = {
    # Where all play of the pack lies; aesthetics are left to the percentiles.
    "sharpness": 0.8,
    "detail": 0.6,
    "noise": 0.8,
    "compression": 0.7,
    "dynamic_range": 0.5,
    "aesthetics": 0.5,
    "smoothness": 0.9,
}


class DuplicatePolicy(BaseModel):
    """What happens to clips that show the same footage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    drop: bool = Field(default=True, description="keep one of clips that show the same footage")
    least_share: float = Field(
        default=0.5, gt=0, le=1, description="share of a clip that another one must show, for it to go"
    )


class Policy(BaseModel):
    """Which clips are worth training on, in tiers from the best down; what reaches none is `out`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tiers: dict[str, dict[Axis, Percentile]] = Field(
        default={"high": dict.fromkeys(AXES, 10), "base": dict.fromkeys(AXES, 1)},
        description="tiers, best first: percentile that a clip must reach among its game or source, by axis",
    )
    floor: dict[Axis, Score] = Field(
        default=_FLOOR, description="score by axis below which a clip is out, whatever its percentile"
    )
    enough: dict[Axis, Score] = Field(
        default=_ENOUGH, description="score by axis that is enough, whatever the percentile"
    )
    min_clips: int = Field(
        default=50, ge=1, description="clips that a game or source needs for percentiles of its own"
    )
    max_hud_share: float | None = Field(
        default=None, ge=0, le=1, description="most of the picture under a HUD; no limit if null"
    )
    max_text_share: float | None = Field(
        default=None, ge=0, le=1, description="most of the picture under text; no limit if null"
    )
    refuse_watermark: bool = Field(default=False, description="clips with a watermark are out")
    duplicates: DuplicatePolicy = Field(default=DuplicatePolicy(), description="the same footage twice")

    @field_validator("floor", mode="before")
    @classmethod
    def _rest_of_floor(cls, value: object) -> object:
        return {**_FLOOR, **value} if isinstance(value, Mapping) else value

    @field_validator("enough", mode="before")
    @classmethod
    def _rest_of_enough(cls, value: object) -> object:
        return {**_ENOUGH, **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _usable(self) -> Policy:
        if not self.tiers:
            raise ValueError("tiers: name at least one")
        for name in self.tiers:
            if name in (OUT, PENDING) or not _TIER.fullmatch(name):
                raise ValueError(
                    f"tier {name!r} must be lower-case letters, digits and _, not {OUT} or {PENDING}"
                )
        for axis, low in self.floor.items():
            if low > self.enough[axis]:
                raise ValueError(f"floor.{axis} {low:g} is over enough.{axis} {self.enough[axis]:g}")
        return self


class Distribution(BaseModel):
    """Scores of one axis over n clips. percentiles: by `PERCENTILES`; empty where n is 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    n: int
    percentiles: dict[int, float]


class QualityStatistics(BaseModel):
    """How the scores of a corpus are distributed, frozen (statistics/quality-v*.json).

    groups: by game, or by source where the key map names no game; then by axis. small: clips of groups that
    are too few for percentiles of their own (`min_clips`), which take those of all groups together.
    sample: most clips that were taken of a group; None: all of them. aesthetics_by: their scorer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    min_clips: int
    sample: int | None
    aesthetics_by: str
    pooled: dict[str, Distribution]
    groups: dict[str, dict[str, Distribution]]
    small: dict[str, int]

    def of(self, group: str) -> tuple[str, dict[str, Distribution]]:
        """The distributions that a group goes by, and their name; "all" where they are the pooled ones."""
        if group in self.groups:
            return group, self.groups[group]
        return "all", self.pooled


class Threshold(BaseModel):
    """A level of one axis, and what set it: floor, enough, or p25 of a group."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    value: float
    by: str


def threshold(policy: Policy, statistics: QualityStatistics, group: str, tier: str, axis: Axis) -> Threshold:
    """The level that a clip of this group must reach on this axis for this tier: its percentile, held between
    floor and enough. The floor alone where the tier asks for no percentile, or where even all clips together
    are fewer than `min_clips`: a percentile of a handful refuses its worst, however good."""
    name, held = statistics.of(group)
    floor, enough = policy.floor[axis], policy.enough[axis]
    percentile = policy.tiers[tier].get(axis)
    if percentile is None or held[axis].n < statistics.min_clips:
        return Threshold(value=floor, by="floor")
    value = held[axis].percentiles[percentile]
    if value <= floor:
        return Threshold(value=floor, by="floor")
    if value >= enough:
        return Threshold(value=enough, by="enough")
    return Threshold(value=value, by=f"p{percentile} of {name}")


class AxisLevels(BaseModel):
    """Thresholds by tier beside the distribution that they came from. of: its group; "all" where pooled."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    of: str
    distribution: Distribution
    tiers: dict[str, Threshold]


class Applied(BaseModel):
    """A policy as it was applied to a corpus (selection/policy.json). groups: by game or source, by axis."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    policy: Policy
    digest: str
    thresholds_version: int
    groups: dict[str, dict[str, AxisLevels]]

"""Cameras of games, as calibrated from pictures: a frozen, versioned record. Source: DESIGN rule 10."""

from __future__ import annotations

from fractions import Fraction

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CameraRecord(BaseModel):
    """Camera of one game at one shape of picture.

    focal: fx as a share of the picture's width; None when too few turns on the spot were seen (`n`).
    mad: spread of single turns, as a share. look: tilt (looking up turns the camera) or shear (it slides the
    picture); look_known: False where the footage does not show which, and `tilt` stands.
    clips: whose turns were pooled; none where the key map states the camera.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    focal: float | None
    aspect: float = Field(default=1.0, description="fy / fx; 1 unless it is stated")
    look: str
    look_known: bool
    n: int
    mad: float = Field(description="0 when there is no focal length")
    clips: tuple[str, ...] = ()


class Cameras(BaseModel):
    """game -> shape of picture ("16/9") -> camera. A game that is not here was never calibrated."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    games: dict[str, dict[str, CameraRecord]] = {}

    @model_validator(mode="after")
    def _shapes(self) -> Cameras:
        for shapes in self.games.values():
            for shape in shapes:
                Fraction(shape)
        return self


def shape_of(width: int, height: int) -> str:
    """Shape of a picture as a reduced fraction: "16/9"."""
    return str(Fraction(width, height))

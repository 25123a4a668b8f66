"""Parts of a recording: the clips that it is cut into, and what is left out and why. Source: DESIGN 2."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.clip import ClipKind


class LeftOut(StrEnum):
    """Why frames of a recording are in no clip."""

    MENU = "menu"
    DEATH = "death"
    LOADING = "loading"
    IDLE = "idle"
    SHORT = "short"  # between two cuts, and too little for a clip


class Segment(BaseModel):
    """Presented frames [start, stop) of a recording: a clip of one kind, or left out for one reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    start: int = Field(ge=0)
    stop: int = Field(gt=0)
    kind: ClipKind | None = None
    left_out: LeftOut | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Segment:
        if self.stop <= self.start or (self.kind is None) == (self.left_out is None):
            raise ValueError("a segment holds frames, and is a clip or is left out for a reason")
        return self

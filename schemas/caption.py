"""The shape of a structured caption. Source: spec/worldplay2.md a.2, k; DESIGN rule 6."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class EventCategory(StrEnum):
    NONE = "none"
    ENVIRONMENT_TRANSITION = "environment_transition"
    OBJECT_CHANGE = "object_change"
    COMPLEX_INTERACTION = "complex_interaction"


class IntervalEvent(BaseModel):
    """What happens in one caption interval; text is empty exactly when the category is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    category: EventCategory = EventCategory.NONE
    text: str = ""


class StructuredCaption(BaseModel):
    """Scene, controlled character, interface and one event per 5 s interval, each free of the others.

    `provenance` is empty when there is no caption; then every text is empty. Texts are never null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    scene: str = ""
    character: str = Field(default="", description="empty in first person")
    ui: str = Field(default="", description="never part of a prompt")
    events: tuple[IntervalEvent, ...] = ()
    provenance: str = Field(default="", description="what wrote it: a model's name, log, or empty")

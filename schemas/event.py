"""What a game's log says happened. Source: spec/worldplay2.md k."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.caption import EventCategory


@dataclass(frozen=True, slots=True)
class GameEvent:
    """One thing that happened, seen by the player, over frames [start, stop) of the file it is told of.

    name: its type in the game's log. category: never none. text: a clause without a full stop, as the key
    map words it ("a door opens"); a caption makes it a sentence.
    """

    start: int
    stop: int
    name: str
    category: EventCategory
    text: str

    def __post_init__(self) -> None:
        if self.stop <= self.start or self.category is EventCategory.NONE or not self.text:
            raise ValueError("an event lasts at least a frame, has a category and a sentence")

"""Captions from a game's own log: what happens in each interval, and nothing else.

A log names events; it does not describe the scene, the character or the interface, so these stay empty. The
provenance says `log`, so that nobody takes the caption for a VLM's.
Source: spec/worldplay2.md k; DESIGN 2 (intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from schemas.caption import EventCategory, IntervalEvent, StructuredCaption
from schemas.clip import FrameTable
from schemas.event import GameEvent
from schemas.timeline import intervals

PROVENANCE = "log"
TOLD = 2
"""Events that one interval tells at most: more make a list, not a sentence."""
_IMPORTANCE = (
    EventCategory.COMPLEX_INTERACTION,
    EventCategory.ENVIRONMENT_TRANSITION,
    EventCategory.OBJECT_CHANGE,
)
"""Most important first: in the order in which the model's data holds them (5K, 3K, 2K clips)."""


def log_caption(events: Sequence[GameEvent], table: FrameTable) -> StructuredCaption:
    """The caption of a clip of F > 0 frames from the events of its log, in frames of the media file.

    An event is in every interval that it overlaps; a frame lasts until the next. Of several in an interval
    the two most important are told, the earlier first among equals, in the order of time; what is said twice
    is said once; the category is that of the most important. A clip without events has only intervals of
    none.
    """
    end = table.duration()

    def time(frame: int) -> Fraction:
        return int(table.pts[frame]) * table.time_base if frame < len(table) else end

    spans = [(time(e.start), time(e.stop), e) for e in events]
    return StructuredCaption(
        events=tuple(
            _told([event for start, stop, event in spans if start < b and a < stop])
            for a, b in intervals(end)
        ),
        provenance=PROVENANCE,
    )


def _told(events: Sequence[GameEvent]) -> IntervalEvent:
    if not events:
        return IntervalEvent()
    ranked = sorted(events, key=lambda e: (_IMPORTANCE.index(e.category), e.start, e.stop))
    once = list({e.text: e for e in reversed(ranked)}.values())[::-1]
    chosen = sorted(once[:TOLD], key=lambda e: (e.start, e.stop))
    text = chosen[0].text
    for before, event in pairwise(chosen):
        text += f", {'then' if before.stop <= event.start else 'and'} {event.text}"
    return IntervalEvent(category=ranked[0].category, text=text[0].upper() + text[1:])

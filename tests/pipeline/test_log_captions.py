"""Captions from a game's log: what a person sees in the pictures, interval by interval, and nothing more."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hand_events import SEEN
from recordings import PACK_MAP, find, table, truth

from pipeline.caption.log import log_caption
from pipeline.events import clip_events
from pipeline.sources import SourceConfig
from pipeline.stage import Unit
from pipeline.store import Store
from schemas.caption import EventCategory, StructuredCaption
from schemas.clip import FrameTable
from schemas.event import GameEvent

COMPLEX, CHANGE, PLACE = (
    EventCategory.COMPLEX_INTERACTION,
    EventCategory.OBJECT_CHANGE,
    EventCategory.ENVIRONMENT_TRANSITION,
)


def caption_of(folder: Path, video: str, config: SourceConfig, frames: FrameTable) -> StructuredCaption:
    source = Store(str(folder))
    unit = Unit(find(source, video, config)[1], "p0", source, source)
    return log_caption(clip_events(unit, config, frames), frames)


def event(start: int, stop: int, category: EventCategory, text: str) -> GameEvent:
    return GameEvent(start, stop, "t", category, text)


def texts(caption: StructuredCaption) -> list[str]:
    return [e.text for e in caption.events]


@pytest.mark.parametrize("clip", sorted(SEEN))
def test_every_interval_of_the_event_clips_tells_what_a_person_sees(footage: Path, clip: str) -> None:
    caption = caption_of(footage, f"{clip}.mp4", SourceConfig(key_map=str(PACK_MAP)), truth(footage, clip)[1])
    assert [e.category.value for e in caption.events] == [category for category, _, _ in SEEN[clip]]
    for told, (_, words, seen) in zip(caption.events, SEEN[clip], strict=True):
        assert all(word in told.text.lower() for word in words), (told.text, seen)
        assert bool(told.text) == bool(words)


def test_a_log_says_nothing_of_scene_character_and_interface(footage: Path) -> None:
    clip = "event01_door_map01"
    caption = caption_of(footage, f"{clip}.mp4", SourceConfig(key_map=str(PACK_MAP)), truth(footage, clip)[1])
    assert (caption.scene, caption.character, caption.ui) == ("", "", "")
    assert caption.provenance == "log"


def test_an_event_over_a_border_belongs_to_every_interval_that_it_overlaps() -> None:
    frames = table(400, 25)  # 16 s
    told = texts(log_caption([event(120, 260, PLACE, "the bridge falls")], frames))
    assert told == ["The bridge falls"] * 3 + [""]
    # Frame 124 is shown until 5 s exactly, frame 125 from there on.
    assert texts(log_caption([event(124, 125, PLACE, "it is")], frames)) == ["It is", "", "", ""]
    assert texts(log_caption([event(125, 126, PLACE, "it is")], frames)) == ["", "It is", "", ""]
    assert texts(log_caption([event(399, 400, PLACE, "it is")], frames)) == ["", "", "", "It is"]


def test_frames_lie_in_intervals_by_their_own_times() -> None:
    """25 pictures, a gap of 6 s, 25 pictures: an event behind the gap is in the second interval."""
    pts = np.concatenate((np.arange(25), 175 + np.arange(25))).astype(np.int64)
    whole = table(50, 25)
    frames = FrameTable(Fraction(1, 25), pts, whole.source_index, whole.pixels, whole.ok, whole.repeat)
    assert texts(log_caption([event(25, 26, PLACE, "it is")], frames)) == ["", "It is"]


def test_of_several_events_the_two_most_important_are_told_in_the_order_of_time() -> None:
    events = [
        event(10, 11, CHANGE, "a key is taken"),
        event(20, 31, PLACE, "a door opens"),
        event(40, 41, COMPLEX, "a guard falls"),
        event(45, 46, PLACE, "a bridge falls"),
    ]
    (told,) = log_caption(events, table(100, 25)).events
    assert told.text == "A door opens, then a guard falls"
    assert told.category is COMPLEX
    (told,) = log_caption(events[:2][::-1], table(100, 25)).events
    assert (told.text, told.category) == ("A key is taken, then a door opens", PLACE)


def test_what_happens_at_once_is_not_told_as_one_after_the_other() -> None:
    events = [event(10, 41, COMPLEX, "guards fall"), event(30, 31, CHANGE, "a key is taken")]
    assert texts(log_caption(events, table(100, 25))) == ["Guards fall, and a key is taken"]


def test_what_is_said_twice_is_said_once() -> None:
    events = [event(s, s + 1, CHANGE, t) for s, t in ((1, "a key is taken"), (5, "a key is taken"))]
    assert texts(log_caption(events, table(100, 25))) == ["A key is taken"]
    events.append(event(9, 10, CHANGE, "a map is taken"))
    assert texts(log_caption(events, table(100, 25))) == ["A key is taken, then a map is taken"]


@pytest.mark.parametrize(
    ("frames", "fps", "count"), [(1500, 25, 12), (1134, 35, 7), (125, 25, 1), (1, 25, 1)]
)
def test_a_clip_without_events_has_an_interval_of_none_every_five_seconds(
    frames: int, fps: int, count: int
) -> None:
    caption = log_caption([], table(frames, fps))
    assert [e.category for e in caption.events] == [EventCategory.NONE] * count


def test_a_recording_of_the_recorder_has_a_caption_from_its_log(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom", reason="recording needs the demo extra")
    from jobs.record import record

    (made,) = record(tmp_path, seed=9, navigation=0, loops=0, events=1, seconds=8, size=(320, 180))
    with av.open(str(tmp_path / f"{made.name}.mp4")) as video:
        count = sum(1 for _ in video.decode(video=0))
    caption = caption_of(tmp_path, f"{made.name}.mp4", SourceConfig(), table(count, 35))
    assert len(caption.events) == 2
    assert any("door opens" in e.text.lower() for e in caption.events)

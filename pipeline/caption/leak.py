"""The leak metric: how much of a caption's fields belongs elsewhere.

A scene that names the character, an event or the camera teaches the model that they come together; then one
cannot be steered without the other. Source: DESIGN rule 6; spec/worldplay2.md a.2, k.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.caption import words
from schemas.caption import Part, StructuredCaption
from schemas.clip import Perspective


class Topic(StrEnum):
    """What words are about."""

    CHARACTER = "character"
    EVENT = "event"
    CAMERA = "camera"
    MOTION = "motion"  # walking and turning: the actions say it
    PLACE = "place"  # where somebody is, or what he is doing there
    UI = "ui"


def _pattern(entries: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])(?:{'|'.join(entries)})(?![\w])")


_ALLOWED = _pattern(words.ALLOWED)
_TOPICS = {
    Topic.CHARACTER: _pattern(words.CONTROLLED),
    Topic.EVENT: _pattern(words.EVENT),
    Topic.CAMERA: _pattern(words.CAMERA),
    Topic.MOTION: _pattern(words.MOTION),
    Topic.PLACE: _pattern(words.DOING),
    Topic.UI: _pattern(words.INTERFACE),
}
_PERSON = _pattern(words.PERSON)
FOREIGN = {
    Part.SCENE: (Topic.CHARACTER, Topic.EVENT, Topic.CAMERA, Topic.UI),
    Part.CHARACTER: (Topic.EVENT, Topic.CAMERA, Topic.MOTION, Topic.PLACE, Topic.UI),
    Part.UI: (Topic.CAMERA, Topic.MOTION),
    # An event may name whoever takes part in it.
    Part.EVENTS: (Topic.CAMERA, Topic.MOTION, Topic.UI),
}
"""What a field must be free of."""
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_PLAIN = frozenset(("the", "and", "with", "for", "from", "that", "this", "its", "their", "has", "are", "who"))


@dataclass(frozen=True, slots=True)
class Leak:
    """Words of a field that belong elsewhere, and the sentence that holds them."""

    part: Part
    topic: Topic
    found: str
    sentence: int


@dataclass(frozen=True, slots=True)
class LeakScore:
    """sentences: in the field; leaking: those of them that hold a leak; leaks: all, in order."""

    sentences: int
    leaking: int
    leaks: tuple[Leak, ...]

    @property
    def share(self) -> float:
        """Leaking sentences over all; 0 for an empty field."""
        return self.leaking / self.sentences if self.sentences else 0.0


def score(part: Part, text: str, perspective: Perspective, character: str = "") -> LeakScore:
    """Leaks of one field's text (of one event's).

    perspective: outside first person, a single person in the scene counts as the character.
    character: the text of that field; where it is known, two of its words in a row leak in a scene.
    """
    sentences = [s for s in _SENTENCE.split(text.strip()) if s]
    leaks: list[Leak] = []
    for number, sentence in enumerate(sentences):
        plain = _ALLOWED.sub("|", sentence.lower())
        found = [(topic, hit) for topic in FOREIGN.get(part, ()) for hit in _TOPICS[topic].findall(plain)]
        if part is Part.SCENE and perspective is not Perspective.FIRST:
            found += [(Topic.CHARACTER, hit) for hit in _PERSON.findall(plain)]
            found += [(Topic.CHARACTER, pair) for pair in _pairs(plain) if pair in _pairs(character.lower())]
        leaks += [Leak(part, topic, hit, number) for topic, hit in found]
    return LeakScore(len(sentences), len({leak.sentence for leak in leaks}), tuple(leaks))


def scores(caption: StructuredCaption, perspective: Perspective) -> dict[Part, LeakScore]:
    """The score of every field with text; the events are scored together, a sentence each."""
    events = [score(Part.EVENTS, e.text, perspective) for e in caption.events if e.text]
    together = LeakScore(
        sum(s.sentences for s in events),
        sum(s.leaking for s in events),
        tuple(leak for s in events for leak in s.leaks),
    )
    return {
        Part.SCENE: score(Part.SCENE, caption.scene, perspective, caption.character),
        Part.CHARACTER: score(Part.CHARACTER, caption.character, perspective),
        Part.UI: score(Part.UI, caption.ui, perspective),
        Part.EVENTS: together,
    }


def _pairs(text: str) -> list[str]:
    """Neighbouring words of a text, the frequent ones left out: "red armour", "long coat"."""
    kept = [w for w in _WORD.findall(text) if len(w) > 2 and w not in _PLAIN]
    return [f"{a} {b}" for a, b in itertools.pairwise(kept)]


def caption_row(caption: StructuredCaption, perspective: Perspective) -> dict[str, str | int | float | None]:
    """A caption's row of the table of captions, without its clip: what it holds and how much of it leaks.

    A leak share is None where the field is empty: there is nothing that could leak.
    """
    found = scores(caption, perspective)
    told = [f"{leak.part} {leak.topic}: {leak.found}" for s in found.values() for leak in s.leaks]
    return {
        "provenance": caption.provenance,
        "perspective": str(perspective),
        "intervals": len(caption.events),
        "events": sum(bool(e.text) for e in caption.events),
        "scene": caption.scene,
        "character": caption.character,
        "ui": caption.ui,
        **{f"{part}_leak": s.share if s.sentences else None for part, s in found.items()},
        "leaks": "|".join(told),
        **{name: str(answer) for name, answer in caption.flags},
    }

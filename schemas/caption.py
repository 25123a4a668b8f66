"""Structured captions: the record, what a VLM may answer, and the prompts that are made of them.

A caption factorises the world as the model needs it: scene, controlled character, interface, and one event
per 5 s interval, each free of the others. The VLM never writes structure: keys and interval names are
computed here, it fills bounded texts and picks enumerated values, with an explicit "none" and "no".
Source: spec/worldplay2.md a.2, k; DESIGN rules 6, 10; spec/faults.md V1, V10, V11.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from schemas.clip import Perspective
from schemas.reply_form import BLOCK, NONCE, bounded_text, choice, object_of
from schemas.strict_json import StrictJsonError, dumps, loads, unprintable
from schemas.timeline import Span, interval_at, intervals, latents_time


class CaptionError(ValueError):
    """A caption that cannot be read, or that does not fit its clip; one line."""


def _printable(text: str) -> str:
    fault = unprintable(text)
    if fault:
        raise ValueError(f"a caption's text must be printable: {fault}")
    return text


Text = Annotated[str, AfterValidator(_printable)]
"""Printable Unicode in form NFC, possibly empty, never null."""


class EventCategory(StrEnum):
    NONE = "none"
    ENVIRONMENT_TRANSITION = "environment_transition"
    OBJECT_CHANGE = "object_change"
    COMPLEX_INTERACTION = "complex_interaction"


class IntervalEvent(BaseModel):
    """What happens in one caption interval; text is empty exactly when the category is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    category: EventCategory = EventCategory.NONE
    text: Text = ""

    @model_validator(mode="after")
    def _text_or_none(self) -> IntervalEvent:
        if (self.category is EventCategory.NONE) != (not self.text):
            raise ValueError("an event has a text exactly when its category is not none")
        return self


class Answer(StrEnum):
    """unknown: nobody looked."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Flags(BaseModel):
    """What a policy may refuse a clip for."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    text_heavy: Answer = Field(default=Answer.UNKNOWN, description="text covers a large part of the picture")
    watermark: Answer = Field(default=Answer.UNKNOWN, description="a logo or watermark lies over the video")
    unsafe: Answer = Field(default=Answer.UNKNOWN, description="sexual content, or gore beyond game violence")
    personal_data: Answer = Field(
        default=Answer.UNKNOWN, description="real names, chat, accounts, addresses, or faces of real people"
    )


class StructuredCaption(BaseModel):
    """Scene, controlled character, interface and one event per 5 s interval, each free of the others.

    `provenance` is empty when there is no caption; then every text is empty. Texts are never null.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    scene: Text = ""
    character: Text = Field(default="", description="empty in first person")
    ui: Text = Field(default="", description="never part of a prompt")
    events: tuple[IntervalEvent, ...] = ()
    flags: Flags = Flags()
    provenance: Text = Field(default="", description="what wrote it: a model's name, log, or empty")


def write_caption(caption: StructuredCaption) -> bytes:
    """Compact JSON; the same caption gives the same bytes."""
    return dumps(caption.model_dump(mode="json"))


def read_caption(data: bytes) -> StructuredCaption:
    """The caption of the bytes of `write_caption`. Raises CaptionError on anything else."""
    try:
        return StructuredCaption.model_validate(loads(data))
    except StrictJsonError as error:
        raise CaptionError(f"not a caption: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CaptionError(f"not a caption: {where}: {first['msg']}") from None


# --- what a VLM may answer --------------------------------------------------------------------------------


class Part(StrEnum):
    """The fields of a reply that can be asked for alone."""

    SCENE = "scene"
    CHARACTER = "character"
    UI = "ui"
    EVENTS = "events"
    FLAGS = "flags"


ALL = tuple(Part)


class Bounds(BaseModel):
    """Longest texts of a reply, in characters: at most 100, or whole hundreds (see `bounded_text`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    scene: int = Field(default=700, ge=1, description="longest scene, in characters")
    character: int = Field(default=300, ge=1, description="longest character, in characters")
    ui: int = Field(default=300, ge=1, description="longest ui, in characters")
    event: int = Field(default=200, ge=1, description="longest text of an event, in characters")

    @field_validator("scene", "character", "ui", "event")
    @classmethod
    def _whole_blocks(cls, value: int) -> int:
        if value > BLOCK and value % BLOCK:
            raise ValueError(
                f"a text is bounded by at most {BLOCK} characters, or by whole hundreds; not {value}"
            )
        return value


BOUNDS = Bounds()


def interval_key(interval: int) -> str:
    """Name of an interval in requests and replies: i00, i01, ..."""
    return f"i{interval:02d}"


def reply_schema(count: int, parts: Iterable[Part] = ALL, bounds: Bounds = BOUNDS) -> dict[str, Any]:
    """JSON schema of a reply for a clip of `count` intervals; equal arguments give equal bytes when dumped.

    One schema a number of intervals and set of parts, none a clip: a server compiles each once.
    Raises CaptionError when there is no interval or no part.
    Source: spec/faults.md V1, V5.
    """
    wanted = frozenset(parts)
    return dict(json.loads(_schema(count, tuple(p for p in ALL if p in wanted), bounds)))


@functools.lru_cache(maxsize=512)
def _schema(count: int, parts: tuple[Part, ...], bounds: Bounds) -> str:
    if count < 1 or not parts:
        raise CaptionError(f"a reply needs an interval and a part; {count} intervals and {len(parts)} parts")
    happening = [c.value for c in EventCategory if c is not EventCategory.NONE]
    event = {
        "anyOf": [
            object_of({"category": choice(EventCategory.NONE)}),
            object_of({"category": choice(*happening), "text": bounded_text(bounds.event)}),
        ]
    }
    shapes = {
        Part.SCENE: bounded_text(bounds.scene),
        Part.CHARACTER: _present(bounds.character),
        Part.UI: _present(bounds.ui),
        # By reference, xgrammar compiles an event once: 12 intervals over a vocabulary of 151,000 took 31 s
        # of CPU written out and take 12 s, and the next schema, of another number of intervals, none.
        Part.EVENTS: object_of({interval_key(i): {"$ref": "#/$defs/event"} for i in range(count)}),
        Part.FLAGS: object_of({name: choice(Answer.NO, Answer.YES) for name in Flags.model_fields}),
    }
    schema = object_of({"nonce": NONCE} | {part.value: shapes[part] for part in parts})
    return json.dumps(schema | ({"$defs": {"event": event}} if Part.EVENTS in parts else {}))


def _present(longest: int) -> dict[str, Any]:
    absent = object_of({"present": choice(Answer.NO)})
    return {"anyOf": [absent, object_of({"present": choice(Answer.YES), "text": bounded_text(longest)})]}


# --- prompts ----------------------------------------------------------------------------------------------


class Sentence(StrEnum):
    """Sentences of a prompt, in order. The interface is never one of them."""

    SCENE = "scene"
    CHARACTER = "character"
    EVENT = "event"


SENTENCES = tuple(Sentence)
_TEMPLATE = {
    Sentence.SCENE: "The scene in the video is: {}.",
    Sentence.CHARACTER: "The character is: {}.",
    Sentence.EVENT: "The event is: {}.",
}
"""The released template. Source: spec/worldplay2.md a.2."""
SUBSETS = tuple(
    (Sentence.SCENE, *rest) for n in range(3) for rest in itertools.combinations(SENTENCES[1:], n)
)
"""What caption dropout may leave of a prompt: the scene is mandatory."""


def render(
    caption: StructuredCaption,
    perspective: Perspective,
    interval: int,
    keep: Iterable[Sentence] = SENTENCES,
) -> str:
    """The prompt of one interval, in the released template: first person has no character sentence, and an
    interval without event no event sentence.

    A field that the caption lacks gives no sentence: the prompt of a caption from a game's log has no scene,
    and the prompt of no caption is empty.
    Raises CaptionError when the caption has no such interval.
    Source: spec/worldplay2.md a.2.
    """
    if not 0 <= interval < len(caption.events):
        raise CaptionError(f"interval {interval} of a caption of {len(caption.events)} intervals")
    texts = {Sentence.SCENE: caption.scene, Sentence.EVENT: caption.events[interval].text}
    if perspective is not Perspective.FIRST:
        texts[Sentence.CHARACTER] = caption.character
    wanted = set(keep)
    said = [(s, texts[s].rstrip(". ")) for s in SENTENCES if s in wanted and s in texts]
    return " ".join(_TEMPLATE[sentence].format(text) for sentence, text in said if text)


def render_span(
    caption: StructuredCaption,
    perspective: Perspective,
    duration: Fraction,
    start: Fraction,
    stop: Fraction,
    keep: Iterable[Sentence] = SENTENCES,
) -> str:
    """The prompt of [start, stop) seconds of a clip: that of the interval which holds its middle.

    Raises CaptionError when the caption is not one of a clip of this duration.
    """
    count = len(intervals(duration))
    if len(caption.events) != count:
        raise CaptionError(
            f"a caption of {len(caption.events)} intervals for a clip of {count} ({float(duration):.2f} s)"
        )
    return render(caption, perspective, interval_at(duration, (start + stop) / 2), keep)


def render_latents(
    caption: StructuredCaption,
    perspective: Perspective,
    duration: Fraction,
    latents: Span,
    keep: Iterable[Sentence] = SENTENCES,
) -> str:
    """The prompt of latents of a clip's continuous encode: a chunk (`timeline.chunk_latents`), or the target
    of stages 1-2. Source: spec/worldplay2.md k, l.7."""
    return render_span(caption, perspective, duration, *latents_time(latents), keep)


def prompts(caption: StructuredCaption, perspective: Perspective) -> tuple[str, ...]:
    """Every prompt that training can draw of a caption: each interval under each of SUBSETS, without repeats,
    in order. Their embeddings are the text member of a sample."""
    every = (
        render(caption, perspective, interval, keep)
        for keep in SUBSETS
        for interval in range(len(caption.events))
    )
    return tuple(dict.fromkeys(every))

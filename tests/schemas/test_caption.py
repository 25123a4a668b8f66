"""The caption record, the schemas of replies, the prompt template, and JSON that every library reads alike.

Source: spec/worldplay2.md a.2, k; spec/faults.md V1, V10, V11.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from fractions import Fraction

import duckdb
import jsonschema
import pyarrow.json
import pytest
from pydantic import ValidationError

from schemas.caption import (
    ALL,
    BOUNDS,
    Bounds,
    CaptionError,
    EventCategory,
    Flags,
    IntervalEvent,
    Part,
    Sentence,
    StructuredCaption,
    prompts,
    read_caption,
    render,
    render_latents,
    render_span,
    reply_schema,
    write_caption,
)
from schemas.clip import Perspective
from schemas.strict_json import StrictJsonError, TextFault, dumps, loads, unprintable
from schemas.timeline import chunk_latents, interval_at, intervals

DOOR = IntervalEvent(category=EventCategory.ENVIRONMENT_TRANSITION, text="A metal door slides up.")
CAPTION = StructuredCaption(
    scene="A café by the sea, “blue hour”, 20 °C on a sign.",
    character="A courier with a yellow backpack.",
    ui="A minimap at the upper right.",
    events=(IntervalEvent(), DOOR),
    flags=Flags(text_heavy="no", watermark="yes", unsafe="no", personal_data="no"),
    provenance="some-vlm@rev",
)
FIRST, THIRD = Perspective.FIRST, Perspective.THIRD


# --- the record -------------------------------------------------------------------------------------------


def test_a_written_caption_reads_back_equal_and_the_same_bytes_again() -> None:
    data = write_caption(CAPTION)
    assert read_caption(data) == CAPTION
    assert write_caption(read_caption(data)) == data


def test_other_json_libraries_read_what_was_written() -> None:
    data = write_caption(CAPTION)
    arrow = pyarrow.json.read_json(io.BytesIO(data + b"\n")).to_pylist()[0]
    assert dumps(arrow) == data
    (text,) = duckdb.execute("select ?::json ->> '$.scene'", [data.decode()]).fetchone() or ("",)
    assert text == CAPTION.scene


def test_every_key_is_there_with_one_type_also_where_nothing_was_captioned() -> None:
    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {k: shape(v) for k, v in value.items()}
        return [shape(v) for v in value[:1]] if isinstance(value, list) else type(value).__name__

    none = StructuredCaption(events=(IntervalEvent(),))
    assert shape(json.loads(write_caption(none))) == shape(json.loads(write_caption(CAPTION)))


@pytest.mark.parametrize(
    "text", ["a\nb", "a\x00", "\ud800", "e\u0301", "a\u202eb", "\ue000", "\u2028", "\ufeffa"]
)
def test_no_text_that_a_reader_could_stumble_over_gets_into_a_caption(text: str) -> None:
    assert unprintable(text)
    with pytest.raises(ValidationError):
        StructuredCaption(scene=text)
    with pytest.raises(ValidationError):
        IntervalEvent(category=EventCategory.OBJECT_CHANGE, text=text)


def test_an_event_has_a_text_exactly_when_something_happens() -> None:
    with pytest.raises(ValidationError, match="exactly when"):
        IntervalEvent(category=EventCategory.NONE, text="A door opens.")
    with pytest.raises(ValidationError, match="exactly when"):
        IntervalEvent(category=EventCategory.OBJECT_CHANGE)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'{"scene": null}', b'{"scene": "a", "scene": "b"}', b'{"mood": "x"}', b"\xff"],
)
def test_what_is_no_caption_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(CaptionError, match=r"^not a caption: [^\n]+$"):
        read_caption(data)


# --- strict JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": NaN}', TextFault.JSON),
        ('{"a": Infinity}', TextFault.JSON),
        ('{"a": 1e999}', TextFault.JSON),
        ('{"a": 9223372036854775808}', TextFault.JSON),
        ('{"start": 1, "start": 2}', TextFault.JSON),
        ('{"a": {"b": [{"c": 1, "c": 1}]}}', TextFault.JSON),
        ('{"a": 1} x', TextFault.JSON),
        ("\ufeff{}", TextFault.JSON),
        ("[" * 5000, TextFault.JSON),
        ('{"a": "\\ud800"}', TextFault.UNICODE),
        ('{"\\udfff": 1}', TextFault.UNICODE),
        ('{"a": "\\u0000"}', TextFault.UNICODE),
    ],
)
def test_json_that_libraries_read_differently_is_refused(text: str, fault: TextFault) -> None:
    with pytest.raises(StrictJsonError) as error:
        loads(text)
    assert error.value.fault is fault
    assert "\n" not in str(error.value)


def test_strict_json_reads_what_it_should() -> None:
    value = {"a": [1, -1.5, True, None, "é 😀 [{"], "b": {"\\": '"'}, "n": (1 << 63) - 1}
    assert loads(json.dumps(value)) == value
    assert loads(dumps(value)) == value
    assert loads(b'{"a": "line\\nbreak"}', printable=False) == {"a": "line\nbreak"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"a": float("nan")})


# --- schemas of replies -----------------------------------------------------------------------------------


def reply(count: int, scene: str = "A hall.") -> dict[str, object]:
    return {
        "nonce": "0427",
        "scene": scene,
        "character": {"present": "no"},
        "ui": {"present": "yes", "text": "A bar."},
        "events": {f"i{i:02d}": {"category": "none"} for i in range(count)},
        "flags": dict.fromkeys(Flags.model_fields, "no"),
    }


def test_a_schema_takes_exactly_the_replies_of_its_number_of_intervals() -> None:
    schema = reply_schema(3)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert valid(reply(3))
    assert not valid(reply(2))
    assert not valid(reply(4))
    for path, value in (
        (("scene",), None),
        (("scene",), ""),
        (("scene",), "   "),
        (("scene",), 'A "hall".'),
        (("scene",), "A back\\slash"),
        (("scene",), "A line\nbreak"),
        (("scene",), "x" * (BOUNDS.scene + 1)),
        (("character",), {"present": "no", "text": "A man."}),
        (("character",), {"present": "yes"}),
        (("events", "i01"), {"category": "none", "text": "A door opens."}),
        (("events", "i01"), {"category": "object_change"}),
        (("flags", "unsafe"), "unknown"),
    ):
        bad = json.loads(json.dumps(reply(3)))
        held = bad
        for key in path[:-1]:
            held = held[key]
        held[path[-1]] = value
        assert not valid(bad), (path, value)


def test_there_is_one_schema_a_number_of_intervals_and_set_of_parts_with_the_same_bytes_always() -> None:
    assert json.dumps(reply_schema(12)) == json.dumps(reply_schema(12, reversed(ALL)))
    assert list(reply_schema(2)["properties"]) == ["nonce", *(p.value for p in ALL)]
    again = reply_schema(2, (Part.SCENE,))
    assert list(again["properties"]) == ["nonce", "scene"]
    short = Bounds(scene=40)
    assert not jsonschema.Draft202012Validator(reply_schema(1, bounds=short)).is_valid(reply(1, "x" * 41))
    for nonsense in ((0, ALL), (3, ())):
        with pytest.raises(CaptionError, match="needs an interval and a part"):
            reply_schema(*nonsense)


def test_a_schema_that_was_changed_by_its_user_changes_no_other() -> None:
    reply_schema(5)["properties"].clear()
    assert reply_schema(5)["properties"]


@pytest.mark.parametrize("longest", [1, 2, 99, 100, 200, 700])
def test_a_schema_bounds_a_text_exactly(longest: int) -> None:
    valid = jsonschema.Draft202012Validator(reply_schema(1, bounds=Bounds(scene=longest))).is_valid
    assert valid(reply(1, "x" * longest))
    assert not valid(reply(1, "x" * (longest + 1)))


def test_a_bound_that_the_grammar_could_not_hold_exactly_is_refused() -> None:
    with pytest.raises(ValidationError, match="whole hundreds; not 250"):
        Bounds(event=250)


def test_every_text_of_a_schema_is_bounded() -> None:
    def texts(node: object) -> list[dict[str, object]]:
        if isinstance(node, list):
            return [t for child in node for t in texts(child)]
        if not isinstance(node, dict):
            return []
        here = [node] if node.get("type") == "string" else []
        return here + [t for child in node.values() for t in texts(child)]

    for text in texts(reply_schema(12)):
        assert "enum" in text or re.search(r"\{(\d+,)?\d+\}\$$", str(text["pattern"]))


# --- prompts ----------------------------------------------------------------------------------------------


def test_the_released_template_in_both_forms() -> None:
    """Source: spec/worldplay2.md a.2."""
    scene = "The scene in the video is: A café by the sea, “blue hour”, 20 °C on a sign."
    character = "The character is: A courier with a yellow backpack."
    event = "The event is: A metal door slides up."
    assert render(CAPTION, THIRD, 1) == f"{scene} {character} {event}"
    assert render(CAPTION, FIRST, 1) == f"{scene} {event}"
    assert render(CAPTION, THIRD, 0) == f"{scene} {character}"
    assert render(CAPTION, FIRST, 0) == scene
    with pytest.raises(CaptionError, match="interval 2 of a caption of 2"):
        render(CAPTION, FIRST, 2)


def test_the_interface_is_never_in_a_prompt() -> None:
    for perspective in Perspective:
        for prompt in prompts(CAPTION, perspective):
            assert "minimap" not in prompt


def test_every_subset_that_dropout_draws_has_its_prompt_and_each_holds_the_scene() -> None:
    third, first = prompts(CAPTION, THIRD), prompts(CAPTION, FIRST)
    assert len(third) == 4  # scene; + character; + event; + both
    assert len(first) == 2  # scene; + event
    assert set(first) < set(third)
    assert all(p.startswith("The scene in the video is: A café") for p in third)
    assert render(CAPTION, THIRD, 1, (Sentence.EVENT, Sentence.SCENE)) in third


def test_a_field_that_a_caption_lacks_gives_no_sentence() -> None:
    log = StructuredCaption(events=(IntervalEvent(), DOOR), provenance="log")
    assert prompts(log, THIRD) == ("", "The event is: A metal door slides up.")
    assert prompts(StructuredCaption(events=(IntervalEvent(),)), FIRST) == ("",)


def test_a_chunk_takes_the_prompt_of_the_interval_that_holds_its_middle() -> None:
    """A 12 s clip: 12 chunks of a second, the first of 13/16 s; the door opens in [5, 10)."""
    duration = Fraction(12)
    caption = StructuredCaption(
        scene="A hall.", events=(IntervalEvent(), DOOR, IntervalEvent()), provenance="x"
    )
    with_door = [
        "door" in render_latents(caption, FIRST, duration, chunk_latents(chunk)) for chunk in range(12)
    ]
    # Chunk i covers grid entries 16i-3 .. 16i+13: its middle is i + 5/16 s.
    assert with_door == [5 <= chunk + Fraction(5, 16) < 10 for chunk in range(12)]
    middle = render_span(caption, FIRST, duration, Fraction(2), Fraction(79, 10))
    assert "door" not in middle
    assert "door" in render_span(caption, FIRST, duration, Fraction(2), Fraction(8))


def test_a_caption_of_another_clip_is_refused() -> None:
    with pytest.raises(CaptionError, match="2 intervals for a clip of 3"):
        render_span(CAPTION, FIRST, Fraction(12), Fraction(0), Fraction(1))


@pytest.mark.parametrize(
    ("seconds", "count"), [("60", 12), ("32.4", 7), ("5.0", 1), ("4.9", 1), ("10", 2), ("714/35", 5)]
)
def test_intervals_partition_a_clip_exactly(seconds: str, count: int) -> None:
    duration = Fraction(seconds)
    spans = intervals(duration)
    assert len(spans) == count
    assert (spans[0][0], spans[-1][1]) == (0, duration)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert all(b - a == 5 for a, b in spans[:-1])
    assert 0 < spans[-1][1] - spans[-1][0] <= 5
    for i, (start, stop) in enumerate(spans):
        assert interval_at(duration, start) == interval_at(duration, stop - Fraction(1, 10**9)) == i

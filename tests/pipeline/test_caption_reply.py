"""Replies of a VLM: what is not exactly what was asked for is refused by name, and never mended.

Source: spec/faults.md V1, V5, V8, V10, V11.
"""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pipeline.caption.frames import Limits, jpeg, plan_frames
from pipeline.caption.prompt import Ask, ask
from pipeline.caption.reply import Fault, FaultKind, ReplyError, read_reply
from pipeline.caption.validate import check
from schemas.caption import ALL, Answer, EventCategory, Flags, IntervalEvent, Part
from schemas.clip import Perspective
from schemas.timeline import intervals

K = FaultKind
NONCE = "0427"


def make_ask(
    seconds: int = 30, perspective: Perspective = Perspective.FIRST, parts: tuple[Part, ...] = ALL
) -> Ask:
    """A request for a clip of a still grey picture."""
    plan = plan_frames(
        np.arange(seconds * 16),
        Fraction(1, 16),
        intervals(Fraction(seconds)),
        (64, 36),
        Limits(per_interval=1),
    )
    picture = jpeg(np.full((36, 64, 3), 90, np.uint8), (64, 36), 90)
    return ask(plan, [picture] * len(plan.frames), perspective, NONCE, parts)


ASK = make_ask()
GOOD: dict[str, Any] = {
    "nonce": NONCE,
    "scene": "A corridor with grey metal walls, lit by lamps in the ceiling. An open door is at its end.",
    "character": {"present": "no"},
    "ui": {"present": "yes", "text": "A status bar with ammunition, health and armour at the bottom."},
    "events": {
        "i00": {"category": "none"},
        "i01": {"category": "environment_transition", "text": "A metal door slides up."},
        "i02": {"category": "none"},
        "i03": {"category": "object_change", "text": "The player picks up a shotgun from the floor."},
        "i04": {"category": "complex_interaction", "text": "The player shoots a zombie, which falls dead."},
        "i05": {"category": "none"},
    },
    "flags": {"text_heavy": "no", "watermark": "no", "unsafe": "no", "personal_data": "no"},
}
TEXT = json.dumps(GOOD)


def changed(*path: str, to: Any) -> str:
    """The good reply with one value replaced."""
    reply = copy.deepcopy(GOOD)
    held = reply
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = to
    return json.dumps(reply, ensure_ascii=False)


def without(*path: str) -> str:
    reply = copy.deepcopy(GOOD)
    held = reply
    for key in path[:-1]:
        held = held[key]
    del held[path[-1]]
    return json.dumps(reply)


def fault_of(text: object, finish: object = "stop", request: Ask = ASK) -> Fault:
    with pytest.raises(ReplyError) as error:
        read_reply(text, finish, request)
    assert error.value.fault.kind.structural
    assert "\n" not in str(error.value)
    return error.value.fault


def kinds(text: str, request: Ask = ASK) -> set[tuple[Part | None, FaultKind]]:
    return {(f.part, f.kind) for f in check(read_reply(text, "stop", request), request)}


def test_a_good_reply_becomes_a_caption() -> None:
    reply = read_reply(TEXT, "stop", ASK)
    assert check(reply, ASK) == []
    caption = reply.caption("some-vlm")
    assert caption.scene == GOOD["scene"]
    assert caption.character == ""
    assert [e.category for e in caption.events][1:4] == ["environment_transition", "none", "object_change"]
    assert caption.events[3].text == "The player picks up a shotgun from the floor."
    assert caption.flags == Flags(**dict.fromkeys(Flags.model_fields, Answer.NO))
    assert caption.provenance == "some-vlm"


def test_white_space_between_the_tokens_of_a_whole_reply_means_nothing() -> None:
    assert read_reply(f"  {json.dumps(GOOD, indent=4)}\n\n", "stop", ASK) == read_reply(TEXT, "stop", ASK)


SIXTY = json.dumps({"events": [{"category": "object_change", "text": "A door opens."}] * 60})[:-2]
FINISHED: list[tuple[str, object, str]] = [
    ("V1a white space until the limit", TEXT[:60] + " " * 4000, "length"),
    ("V1b 60 equal events", SIXTY, "length"),
    ("V1c whole, but of finish length", TEXT, "length"),
    ("V1d cut inside an escape", '{"nonce": "0427", "scene": "A wall \\u00', "length"),
    ("V5 an abort", "", "abort"),
    ("a tool call", TEXT, "tool_calls"),
    ("a content filter", TEXT, "content_filter"),
    ("no finish reason", TEXT, None),
    ("a finish reason that is no text", TEXT, ["stop"]),
]


@pytest.mark.parametrize(("name", "text", "finish"), FINISHED, ids=[n for n, _, _ in FINISHED])
def test_a_reply_that_did_not_stop_is_no_reply(name: str, text: object, finish: object) -> None:
    assert fault_of(text, finish).kind is K.FINISH


TWICE = TEXT.replace('"character"', '"scene": "A wall.", "character"')
BROKEN: list[tuple[str, object, FaultKind]] = [
    # Not one JSON value.
    ("V1a white space, said to be stopped", TEXT[:60] + " " * 4000, K.JSON),
    ("V1d cut inside an escape, said to be stopped", '{"nonce": "0427", "scene": "A wall \\u00', K.JSON),
    ("V10 a key given twice", TWICE, K.JSON),
    ("V10 NaN", TEXT.replace('"no"', "NaN", 1), K.JSON),
    ("V10 minus Infinity", TEXT.replace('"no"', "-Infinity", 1), K.JSON),
    ("no text at all", None, K.JSON),
    ("an empty text", "", K.JSON),
    ("content as a list of parts", [{"type": "text", "text": TEXT}], K.JSON),
    ("a markdown fence", f"```json\n{TEXT}\n```", K.JSON),
    ("words before it", f"Here is the caption: {TEXT}", K.JSON),
    ("words behind it", f"{TEXT} I hope this helps.", K.JSON),
    ("two replies", TEXT + TEXT, K.JSON),
    ("a byte order mark", "\ufeff" + TEXT, K.JSON),
    ("a trailing comma", TEXT[:-1] + ",}", K.JSON),
    ("single quotes", TEXT.replace('"', "'"), K.JSON),
    ("a comment", TEXT[:-1] + "// done\n}", K.JSON),
    ("an unknown escape", TEXT.replace("grey", "gr\\xey"), K.JSON),
    ("a raw line break in a text", TEXT.replace("corridor with", "corridor\nwith"), K.JSON),
    ("nesting without end", "[" * 100_000, K.JSON),
    ("deep but whole nesting", "[" * 40 + "]" * 40, K.JSON),
    ("a huge integer", TEXT.replace('"no"', "9" * 5000, 1), K.JSON),
    ("a huge float", TEXT.replace('"no"', "1e999", 1), K.JSON),
    ("chat template tokens behind it", TEXT + "<|im_end|>", K.JSON),
    ("thoughts before it", f"<think>A corridor.</think>{TEXT}", K.JSON),
    # Characters that belong into no text.
    ("V10 a lone surrogate", TEXT.replace("grey", "gr\\ud800ey"), K.UNICODE),
    ("a surrogate pair in wrong order", TEXT.replace("grey", "\\ude00\\ud83d"), K.UNICODE),
    ("V10 U+0000", TEXT.replace("grey", "gr\\u0000ey"), K.UNICODE),
    ("an escaped line break", TEXT.replace("grey", "gr\\ney"), K.UNICODE),
    ("a right-to-left mark", TEXT.replace("grey", "gr\u202eey"), K.UNICODE),
    ("a zero-width space", TEXT.replace("grey", "gr\u200bey"), K.UNICODE),
    ("a private character", TEXT.replace("grey", "\ue000"), K.UNICODE),
    ("an unassigned character", TEXT.replace("grey", "\U000e0fff"), K.UNICODE),
    ("letters that are not composed", TEXT.replace("grey", "gre\u0301y"), K.UNICODE),
    ("a control character in a key", TEXT.replace('"scene"', '"sc\\u0007ene"'), K.UNICODE),
    # Not the form that was asked for.
    ("a list", json.dumps([GOOD]), K.SCHEMA),
    ("a number", "42", K.SCHEMA),
    ("null", "null", K.SCHEMA),
    ("the reply as a text in a text", json.dumps(TEXT), K.SCHEMA),
    ("V11 a null character", changed("character", to=None), K.SCHEMA),
    ("a character as plain text", changed("character", to="none"), K.SCHEMA),
    ("a null scene", changed("scene", to=None), K.SCHEMA),
    ("a scene of lines", changed("scene", to=["A wall.", "A door."]), K.SCHEMA),
    ("a missing field", without("flags"), K.SCHEMA),
    ("a field too many", changed("camera", to="It pans left."), K.SCHEMA),
    ("presence true", changed("character", to={"present": True}), K.SCHEMA),
    (
        "an absent character with a text",
        changed("character", to={"present": "no", "text": "A man."}),
        K.SCHEMA,
    ),
    ("a present interface without text", changed("ui", to={"present": "yes"}), K.SCHEMA),
    ("an unknown category", changed("events", "i00", to={"category": "fight", "text": "A."}), K.SCHEMA),
    ("an event without category", changed("events", "i00", to={"text": "A door opens."}), K.SCHEMA),
    ("a category as a list", changed("events", "i00", to={"category": ["none"]}), K.SCHEMA),
    ("no event, with a text", changed("events", "i00", to={"category": "none", "text": "A."}), K.SCHEMA),
    ("an event as plain text", changed("events", "i00", to="none"), K.SCHEMA),
    ("events as a list", changed("events", to=list(GOOD["events"].values())), K.SCHEMA),
    ("an unsure flag", changed("flags", "unsafe", to="unknown"), K.SCHEMA),
    ("a flag too many", changed("flags", "blurry", to="no"), K.SCHEMA),
    ("a nonce of five digits", changed("nonce", to="04270"), K.SCHEMA),
    ("a nonce as a number", changed("nonce", to=427), K.SCHEMA),
    ("a nonce in Arabic digits", changed("nonce", to="٠٤٢٧"), K.SCHEMA),
    # Not the clip's intervals.
    ("an interval too many", changed("events", "i06", to={"category": "none"}), K.INTERVALS),
    ("an interval too few", without("events", "i05"), K.INTERVALS),
    ("V11 no intervals", changed("events", to={}), K.INTERVALS),
    ("other names", changed("events", to=dict(zip("abcdef", GOOD["events"].values()))), K.INTERVALS),
    ("in another order", changed("events", to=dict(reversed(GOOD["events"].items()))), K.INTERVALS),
    # Texts outside their bounds.
    ("V11 an empty scene", changed("scene", to=""), K.BOUNDS),
    ("a scene of blanks", changed("scene", to=" " * 40), K.BOUNDS),
    ("a scene too long", changed("scene", to="A wall. " * 200), K.BOUNDS),
    ("an empty event", changed("events", "i01", "text", to=""), K.BOUNDS),
    ("an event too long", changed("events", "i01", "text", to="x" * 201), K.BOUNDS),
]


@pytest.mark.parametrize(("name", "text", "kind"), BROKEN, ids=[n for n, _, _ in BROKEN])
def test_a_broken_reply_is_refused_by_name(name: str, text: object, kind: FaultKind) -> None:
    assert fault_of(text).kind is kind


def test_a_reply_that_is_cut_anywhere_is_refused() -> None:
    for length in range(len(TEXT)):
        assert fault_of(TEXT[:length]).kind is K.JSON


def test_a_fault_inside_a_field_names_the_field() -> None:
    assert fault_of(changed("events", "i03", "text", to="")).part is Part.EVENTS
    assert "i03" in fault_of(changed("events", "i03", "text", to="")).detail
    assert fault_of(changed("character", to=None)).part is Part.CHARACTER
    assert fault_of(without("scene")).part is None


MURMUR = "the wall and the door and " * 4
SAID: list[tuple[str, str, Part | None, FaultKind]] = [
    ("V11 a refusal in valid JSON", changed("scene", to="I cannot help with that."), Part.SCENE, K.REFUSAL),
    ("an apology", changed("ui", "text", to="I'm sorry, but I can't assist with this."), Part.UI, K.REFUSAL),
    (
        "no pictures",
        changed("scene", to="No images were provided, so nothing is known."),
        Part.SCENE,
        K.REFUSAL,
    ),
    ("a refused event", changed("events", "i01", "text", to="Unable to determine."), Part.EVENTS, K.REFUSAL),
    ("V11 a Chinese scene", changed("scene", to="一条灰色的走廊，尽头有一扇门。"), Part.SCENE, K.LANGUAGE),
    ("a Chinese event", changed("events", "i01", "text", to="门打开了。"), Part.EVENTS, K.LANGUAGE),
    ("a Russian scene", changed("scene", to="Длинный серый коридор."), Part.SCENE, K.LANGUAGE),
    ("V10 an emoji", changed("scene", to="A grey wall 😀 with a door."), Part.SCENE, K.LANGUAGE),
    ("French", changed("scene", to="Un long couloir gris avec des murs en métal."), Part.SCENE, K.LANGUAGE),
    (
        "German",
        changed("scene", to="Ein langer Gang mit grauen Wänden und einer Tür."),
        Part.SCENE,
        K.LANGUAGE,
    ),
    (
        "letters thrown together",
        changed("scene", to="Xq zrv blof kern dath umbli ghro."),
        Part.SCENE,
        K.LANGUAGE,
    ),
    ("none as a scene", changed("scene", to="None."), Part.SCENE, K.EMPTY),
    ("marks as a scene", changed("scene", to="!!!"), Part.SCENE, K.EMPTY),
    ("the schema's word", changed("scene", to="string"), Part.SCENE, K.EMPTY),
    ("an event of nothing", changed("events", "i01", "text", to="Nothing happens."), Part.EVENTS, K.EMPTY),
    ("the character in the scene", changed("scene", to="A hall. The player is in it."), Part.SCENE, K.LEAK),
    ("an event in the scene", changed("scene", to="A hall where a door opens."), Part.SCENE, K.LEAK),
    ("the camera in the scene", changed("scene", to="The camera moves through a hall."), Part.SCENE, K.LEAK),
    (
        "the camera in an event",
        changed("events", "i01", "text", to="The camera pans left."),
        Part.EVENTS,
        K.LEAK,
    ),
    (
        "a walk as an event",
        changed("events", "i01", "text", to="The player walks forward."),
        Part.EVENTS,
        K.LEAK,
    ),
    ("a word without end", changed("scene", to="A dark dark dark dark wall."), Part.SCENE, K.LOOP),
    ("words without end", changed("scene", to=f"A hall, {MURMUR}more."), Part.SCENE, K.LOOP),
    ("blanks inside", changed("scene", to="A hall" + " " * 50 + "with a door."), Part.SCENE, K.LOOP),
    (
        "cut by the bound",
        changed("scene", to=("A hall with a " + "grey or green or " * 60)[:700]),
        Part.SCENE,
        K.CUT,
    ),
    (
        "a body in first person",
        changed("character", to={"present": "yes", "text": "A soldier in green armour."}),
        Part.CHARACTER,
        K.PRESENCE,
    ),
    ("the scene as interface", changed("ui", "text", to=GOOD["scene"]), Part.UI, K.COPIED),
    ("V1 R6 another request's digits", changed("nonce", to="1111"), None, K.NONCE),
]


@pytest.mark.parametrize(("name", "text", "part", "kind"), SAID, ids=[n for n, _, _, _ in SAID])
def test_what_a_reply_says_is_judged_by_field(
    name: str, text: str, part: Part | None, kind: FaultKind
) -> None:
    found = kinds(text)
    assert (part, kind) in found
    assert {p for p, _ in found} == {part}, "a fault of one field is no fault of another"
    assert not kind.structural


def test_one_text_in_three_neighbouring_intervals_is_copied_and_in_two_an_event_over_a_border() -> None:
    def told(*at: int) -> str:
        events = {f"i{i:02d}": {"category": "none"} for i in range(6)}
        for i in at:
            events[f"i{i:02d}"] = {"category": "object_change", "text": "A barrel explodes" + "." * (i % 2)}
        return changed("events", to=events)

    assert (Part.EVENTS, K.COPIED) in kinds(told(1, 2, 3))
    assert kinds(told(1, 2)) == set()
    assert kinds(told(0, 2, 4)) == set()
    assert kinds(told()) == set(), "nothing happening everywhere is an answer"


def test_a_third_person_clip_has_a_character() -> None:
    third = make_ask(perspective=Perspective.THIRD)
    assert (Part.CHARACTER, K.PRESENCE) in kinds(TEXT, third)
    told = changed("character", to={"present": "yes", "text": "A soldier in green armour with a rifle."})
    assert kinds(told, third) == set()
    assert kinds(told, make_ask(perspective=Perspective.UNKNOWN)) == set()
    assert kinds(TEXT, make_ask(perspective=Perspective.UNKNOWN)) == set()


def test_the_characters_looks_in_the_scene_are_a_leak() -> None:
    third = make_ask(perspective=Perspective.THIRD)
    reply = copy.deepcopy(GOOD)
    reply["character"] = {"present": "yes", "text": "A courier with a yellow backpack."}
    reply["scene"] = "A street of brick houses and, on the pavement, somebody with a yellow backpack."
    assert (Part.SCENE, K.LEAK) in kinds(json.dumps(reply), third)


def test_a_field_is_asked_for_again_alone_and_joined_to_what_passed() -> None:
    whole = read_reply(changed("scene", to="一条灰色的走廊。"), "stop", ASK)
    bad = {fault.part for fault in check(whole, ASK)}
    assert bad == {Part.SCENE}
    kept = whole.only(set(ALL) - bad)
    assert kept.scene is None
    with pytest.raises(ValueError, match="scene"):
        kept.caption("some-vlm")

    again = make_ask(parts=(Part.SCENE,))
    reply = read_reply(json.dumps({"nonce": NONCE, "scene": GOOD["scene"]}), "stop", again)
    assert check(reply, again) == []
    assert kept.with_(reply) == read_reply(TEXT, "stop", ASK)
    assert fault_of(TEXT, request=again).kind is K.SCHEMA, "what was not asked for is not taken"


def test_a_caption_of_a_clip_in_which_nothing_happens_invents_no_event() -> None:
    """V11: a static clip of 30 s."""
    events = {f"i{i:02d}": {"category": "none"} for i in range(6)}
    caption = read_reply(changed("events", to=events), "stop", ASK).caption("some-vlm")
    assert caption.events == (IntervalEvent(category=EventCategory.NONE, text=""),) * 6


def test_a_caption_needs_a_provenance() -> None:
    with pytest.raises(ValueError, match="provenance"):
        read_reply(TEXT, "stop", ASK).caption("")

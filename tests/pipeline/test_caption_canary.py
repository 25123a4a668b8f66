"""Drawn clips with known answers: right answers pass, each wrong one is named."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest

from pipeline.caption.canary import Canary, canaries
from pipeline.caption.frames import Limits
from pipeline.caption.reply import FaultKind, read_reply
from pipeline.caption.validate import check
from schemas.caption import Flags, Part

CANARIES = {canary.name: canary for canary in canaries(Limits(per_interval=2))}
SCENES = {
    "red_circle": "A red circle lies in the middle of a plain white ground.",
    "blue_square": "A blue square in the middle of a flat yellow ground.",
    "green_triangle": "A green triangle on black.",
    "number": "The white number 742 on a plain blue ground.",
    "vanishing_circle": "A plain black ground with a red disc in the middle of it.",
}
GONE = {"category": "object_change", "text": "The red disc is gone from the black ground."}


def answer(canary: Canary, **changes: Any) -> str:
    events = {"i00": {"category": "none"}, "i01": GONE if canary.events[1] else {"category": "none"}}
    reply = {
        "nonce": "0427",
        "scene": SCENES[canary.name],
        "character": {"present": "no"},
        "ui": {"present": "no"},
        "events": events,
        "flags": dict.fromkeys(Flags.model_fields, "no"),
    }
    return json.dumps(reply | changes)


def wrong(canary: Canary, **changes: Any) -> list[tuple[Part | None, FaultKind]]:
    reply = read_reply(answer(canary, **changes), "stop", canary.ask("0427"))
    return [(fault.part, fault.kind) for fault in canary.check(reply)]


@pytest.mark.parametrize("name", CANARIES)
def test_the_right_answer_passes(name: str) -> None:
    canary = CANARIES[name]
    assert wrong(canary) == []
    assert check(read_reply(answer(canary), "stop", canary.ask("0427")), canary.ask("0427")) == []


@pytest.mark.parametrize("name", CANARIES)
def test_a_wrong_scene_is_named(name: str) -> None:
    assert wrong(CANARIES[name], scene="A forest path between tall trees.")[0] == (
        Part.SCENE,
        FaultKind.CANARY,
    )


def test_an_invented_event_and_a_missed_one_are_named() -> None:
    still, vanishing = CANARIES["red_circle"], CANARIES["vanishing_circle"]
    none = {"i00": {"category": "none"}, "i01": {"category": "none"}}
    assert wrong(still, events=none | {"i00": GONE}) == [(Part.EVENTS, FaultKind.CANARY)]
    assert wrong(vanishing, events=none) == [(Part.EVENTS, FaultKind.CANARY)]
    assert (
        wrong(vanishing, events={"i00": GONE, "i01": {"category": "none"}})
        == [(Part.EVENTS, FaultKind.CANARY)] * 2
    )


def test_an_invented_character_is_named() -> None:
    body = {"present": "yes", "text": "A soldier in green armour."}
    assert wrong(CANARIES["number"], character=body) == [(Part.CHARACTER, FaultKind.CANARY)]


def test_the_pictures_show_what_the_answer_says() -> None:
    def middle(name: str) -> list[tuple[int, ...]]:
        images = [cv2.imdecode(np.frombuffer(j, np.uint8), cv2.IMREAD_COLOR) for j in CANARIES[name].jpegs]
        return [tuple(int(v) // 64 for v in image[180, 320, ::-1]) for image in images]

    assert middle("red_circle") == [(3, 0, 0)] * 4
    assert middle("blue_square") == [(0, 0, 3)] * 4
    assert middle("green_triangle") == [(0, 2, 0)] * 4
    assert middle("vanishing_circle") == [(3, 0, 0)] * 3 + [(0, 0, 0)]

"""The retry ladder against scripted replies: what passes, what is asked again, what is given up."""

from __future__ import annotations

import asyncio
import base64
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from caption_server import FAULTS, SENTENCES, CaptionServer, Seen

from pipeline.caption.client import Client, EndpointConfig
from pipeline.caption.frames import Limits, jpeg, plan_frames
from pipeline.caption.ladder import Climbed, ContentChecks, Shown, Try, climb, first_ask, steps
from pipeline.caption.prompt import nonce_of, nonce_picture
from schemas.caption import ALL, Part
from schemas.clip import Perspective
from schemas.timeline import intervals

SECONDS = Fraction(324, 10)


@pytest.fixture(scope="module")
def shown() -> Shown:
    """32.4 s at 30 fps: 7 intervals; a picture that brightens."""
    pts = np.arange(972)
    plan = plan_frames(pts, Fraction(1, 30), intervals(SECONDS), (160, 96), Limits())
    return Shown(plan, [jpeg(np.full((96, 160, 3), k // 4, np.uint8), (160, 96), 90) for k in plan.frames])


def go(
    server: CaptionServer,
    shown: Shown,
    clip: str = "a",
    checks: str = "enforce",
    attempts: int = 4,
    **more: Any,
) -> tuple[Climbed, list[Try]]:
    tries: list[Try] = []

    async def work() -> Climbed:
        config = EndpointConfig(endpoints=(server.url,), **{"timeout_s": 1.0, "patience_s": 2.0} | more)
        async with Client(config) as client:
            first = first_ask(shown, clip, Perspective.FIRST)
            return await climb(client, shown, first, clip, attempts, ContentChecks(checks), tries.append)

    return asyncio.run(work()), tries


def asked(seen: Seen) -> set[str]:
    return set(seen.body["response_format"]["json_schema"]["schema"]["properties"]) - {"nonce"}


def pictures_of(seen: Seen) -> int:
    return sum(p["type"] == "image_url" for p in seen.body["messages"][-1]["content"])


def test_a_good_reply_is_taken_at_once(shown):
    with CaptionServer() as server:
        climbed, tries = go(server, shown)
    assert (
        climbed.reply.scene == SENTENCES["scene"] and len(climbed.reply.events) == 7 and climbed.faults == ()
    )
    assert len(server.seen) == len(tries) == 1 and tries[0].whole == climbed.reply


def test_each_retry_changes_what_it_says_and_keeps_the_changes_before_it(shown):
    with CaptionServer(script={"a": ["spaces_to_the_limit"]}) as server:
        climbed, tries = go(server, shown, attempts=6)
    assert climbed.reply is None and [t.step.number for t in tries] == [1, 2, 3, 4, 5, 6]
    bodies = [s.body for s in server.seen]
    assert [b["temperature"] for b in bodies] == [0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert len({b["seed"] for b in bodies}) == 6
    assert [b.get("repetition_penalty") for b in bodies] == [None, None, None, 1.1, 1.1, 1.1]
    count = len(shown.plan.frames)
    kept = len(shown.thinned().plan.frames)
    assert [pictures_of(s) - 1 for s in server.seen] == [count, count, kept, kept, kept, kept]
    assert kept < 0.6 * count and set(shown.thinned().plan.interval) == set(range(7))


def test_times_in_the_request_are_those_of_its_frames(shown):
    """Markers equal true times within 0.05 s, also of thinned frames, and stand before their picture (V8)."""
    with CaptionServer(script={"a": ["cut_but_stop"]}) as server:
        go(server, shown)
    for seen, thin in zip(server.seen, (False, False, True, True), strict=True):
        plan = shown.thinned().plan if thin else shown.plan
        content = seen.body["messages"][-1]["content"]
        labels = [a["text"] for a, b in pairwise(content) if b["type"] == "image_url"]
        seconds = [float(re.fullmatch(r"interval i\d\d, ([\d.]+) s", text)[1]) for text in labels[1:]]
        assert np.abs(np.array(seconds) - np.array(plan.frames) / 30).max() <= 0.05


def test_fields_that_passed_are_kept_and_only_the_others_asked_again(shown):
    with CaptionServer(script={"a": ["chinese_scene", "ok"]}) as server:
        climbed, tries = go(server, shown)
    assert [asked(s) for s in server.seen] == [{p.value for p in ALL}, {"scene"}]
    assert [f.part for f in tries[0].faults] == [Part.SCENE] and tries[0].whole is None
    assert climbed.reply.scene == SENTENCES["scene"] and len(climbed.reply.events) == 7


def test_a_reply_of_another_clip_is_asked_for_again_as_a_whole(shown):
    with CaptionServer(script={"a": ["other_nonce", "ok"]}) as server:
        go(server, shown)
    assert [asked(s) for s in server.seen] == [{p.value for p in ALL}] * 2


def test_faults_of_content_can_be_advice_but_faults_of_form_cannot(shown):
    with CaptionServer(script={"a": ["chinese_scene"], "b": ["other_nonce"], "c": ["abort"]}) as server:
        scene, tries = go(server, shown, "a", "advise")
        nonce, _ = go(server, shown, "b", "advise")
        form, _ = go(server, shown, "c", "advise")
    assert scene.reply is not None and [f.part for f in scene.faults] == [Part.SCENE] and len(tries) == 1
    assert nonce.reply is not None and [f.kind for f in nonce.faults] == ["nonce"]
    assert form.reply is None and [f.kind for f in form.faults] == ["finish"]


REPLIES = {
    "finish": (
        "spaces_to_the_limit", "repeats_to_the_limit", "whole_but_length", "cut_in_an_escape", "abort",
        "content_filter", "tool_finish",
    ),
    "json": (
        "cut_but_stop", "empty_text", "only_spaces", "prose", "refusal", "fenced", "trailing_text", "nan",
        "byte_order_mark", "two_objects", "deep", "repeated_key", "raw_control", "a_number",
    ),
    "unicode": ("lone_surrogate", "zero_byte"),
    "schema": ("a_list", "extra_key", "missing_key", "nulls", "numbers_for_texts", "letters_for_nonce"),
    "intervals": ("extra_interval", "missing_interval", "swapped_intervals", "renamed_interval"),
    "bounds": ("blank_scene", "endless_scene"),
    "nonce": ("other_nonce",),
    "language": ("chinese_scene",),
    "refusal": ("refusal_in_scene",),
    "presence": ("invented_character",),
    "copied": ("copied_events",),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, fault", [(kind, fault) for kind, faults in REPLIES.items() for fault in faults]
)
def test_a_reply_that_stays_wrong_is_never_a_caption_and_its_kind_is_named(shown, kind, fault):
    with CaptionServer(script={"a": [fault]}) as server:
        climbed, tries = go(server, shown, attempts=2)
    assert climbed.reply is None and climbed.unanswered is None
    assert [f.kind for f in climbed.faults] == [kind], climbed.faults
    assert len(tries) == 2 and all(t.whole is None and t.got.tokens_out == 200 for t in tries)


@pytest.mark.parametrize(
    "fault", sorted(set(FAULTS) - {"ok"} - {f for faults in REPLIES.values() for f in faults})
)
def test_an_answer_that_stays_none_is_never_a_caption(shown, fault):
    """The faults of HTTP and of the body, and no other: a clip that got no answer has not been judged."""
    with CaptionServer(script={"a": [fault]}) as server:
        climbed, _ = go(server, shown, attempts=2, timeout_s=0.3, patience_s=0.5)
    if fault.startswith("usage_"):
        assert climbed.reply is not None
    else:
        assert climbed.reply is None and climbed.unanswered is not None


def test_one_bad_answer_is_followed_by_a_good_one(shown):
    for fault in ("error_500", "whole_but_length", "null_content", "context_too_long", "rate_limited"):
        with CaptionServer(script={"a": [fault, "ok"]}) as server:
            climbed, _ = go(server, shown)
        assert climbed.reply is not None and len(server.seen) == 2, fault


def test_a_clip_that_missed_one_answer_is_not_judged(shown):
    """Rejected is for good: it needs an answer to every request."""
    with CaptionServer(script={"a": ["abort", "error_500", "abort", "abort"]}) as server:
        climbed, _ = go(server, shown)
    assert climbed.reply is None and climbed.unanswered.kind == "engine"


def test_there_are_as_many_faults_as_promised():
    assert len(set(FAULTS) - {"ok"}) >= 5 + 30


def test_the_first_steps_are_the_ladder():
    assert [s.change for s in steps(4)] == ["first", "seed, temperature", "half the pictures", "penalty"]
    assert steps(1) == steps(4)[:1]


def test_the_check_picture_is_another_one_in_every_request(shown):
    with CaptionServer(script={"a": ["cut_but_stop"]}) as server:
        go(server, shown, attempts=2)
    urls = [s.body["messages"][-1]["content"][1]["image_url"]["url"] for s in server.seen]
    drawn = [nonce_picture(nonce_of("a", n)) for n in (1, 2)]
    assert [base64.b64decode(u.partition(",")[2]) for u in urls] == drawn

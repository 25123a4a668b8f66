"""The frames that a VLM is shown: their true times, how many fit, and requests that hold them.

Source: DESIGN rules 1, 6; spec/faults.md V5, V8.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from pipeline.caption import wording
from pipeline.caption.frames import (
    FramePlan,
    FramesRefused,
    Limits,
    image_tokens,
    pictures,
    plan_frames,
    reply_tokens,
    sent_size,
    text_tokens,
)
from pipeline.caption.prompt import ask, nonce_of, nonce_picture
from pipeline.caption.reply import read_reply
from pipeline.ingest import Ingest, IngestConfig
from pipeline.media import read_frames
from pipeline.stage import Unit, run_unit
from pipeline.store import Store
from schemas.caption import ALL, Bounds, EventCategory, Flags, Part
from schemas.clip import Clip, Perspective
from schemas.timeline import intervals

FIRST = Perspective.FIRST
LIMITS = Limits()
TINY = Limits(cell=28, min_pixels=3136, max_pixels=50176, context=4096, max_images=8, chars_per_token=1.4)


def plan(
    seconds: str, fps: int = 30, limits: Limits = LIMITS, size: tuple[int, int] = (640, 360)
) -> FramePlan:
    duration = Fraction(seconds)
    return plan_frames(np.arange(int(duration * fps)), Fraction(1, fps), intervals(duration), size, limits)


def counts(made: FramePlan) -> list[int]:
    return [made.interval.count(i) for i in range(len(made.spans))]


# --- which frames -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ("60", [4] * 12),
        ("32.4", [4] * 6 + [2]),
        ("5.0", [4]),
        ("4.9", [4]),
        ("10", [4, 4]),
        ("0.5", [1]),
        ("25.1", [4] * 5 + [1]),
    ],
)
def test_frames_lie_evenly_over_the_intervals_and_a_short_last_one_has_its_share(
    seconds: str, expected: list[int]
) -> None:
    made = plan(seconds)
    assert counts(made) == expected
    assert list(made.frames) == sorted(set(made.frames))
    for second, interval in zip(made.seconds, made.interval, strict=True):
        start, stop = made.spans[interval]
        assert start <= second < stop
    # A whole interval's four frames are the nearest to 5/8, 15/8, 25/8 and 35/8 s of it.
    for i, n in enumerate(expected):
        if n == 4:
            inside = [s - made.spans[i][0] for s, k in zip(made.seconds, made.interval) if k == i]
            length = made.spans[i][1] - made.spans[i][0]
            assert all(
                abs(s - length * Fraction(2 * j + 1, 8)) <= Fraction(1, 60) for j, s in enumerate(inside)
            )


def test_the_clock_of_a_clip_with_uneven_frames_is_its_own() -> None:
    """V8: 380 frames at 30 fps of which 8 are sent, and the same with frames missing."""
    steps = np.arange(380)
    duration = Fraction(380, 30)
    even = plan_frames(steps, Fraction(1, 30), intervals(duration), (640, 360), Limits(per_interval=3))
    kept = np.delete(steps, slice(60, 140))
    uneven = plan_frames(kept, Fraction(1, 30), intervals(duration), (640, 360), Limits(per_interval=3))
    assert len(even.frames) == 8
    for made, pts in ((even, steps), (uneven, kept)):
        assert [Fraction(int(pts[k]), 30) for k in made.frames] == list(made.seconds)


def test_an_interval_without_a_frame_is_refused_by_name() -> None:
    pts = np.concatenate([np.arange(0, 100), np.arange(400, 500)])
    with pytest.raises(FramesRefused, match="no frame lies in interval i01"):
        plan_frames(pts, Fraction(1, 30), intervals(Fraction(500, 30)), (640, 360), Limits())


# --- what fits --------------------------------------------------------------------------------------------


def test_frames_are_thinned_alike_in_every_interval_until_the_request_fits() -> None:
    """V5: a row of 400 frames, too many pictures, image tokens over budget."""
    whole = plan("60")
    assert counts(plan("60", limits=Limits(context=whole.tokens))) == [4] * 12
    assert counts(plan("60", limits=Limits(context=whole.tokens - 1))) == [3] * 12
    assert counts(plan("60", limits=Limits(max_images=49))) == [4] * 12
    assert counts(plan("60", limits=Limits(max_images=48))) == [3] * 12
    assert counts(plan("60", limits=Limits(max_images=13))) == [1] * 12
    assert counts(plan("60", limits=Limits(per_interval=400))) == [10] * 12
    for limits in (Limits(), Limits(context=12000), Limits(per_interval=400, max_images=30)):
        made = plan("60", limits=limits)
        assert made.tokens <= limits.context
        assert len(made.frames) + 1 <= limits.max_images


def test_a_clip_that_no_request_can_hold_is_refused_with_what_it_would_need() -> None:
    with pytest.raises(FramesRefused, match=r"12 intervals .* 13 pictures and \d+ tokens; allowed are 12"):
        plan("60", limits=Limits(max_images=12))
    with pytest.raises(FramesRefused, match="allowed are 128 and 4096"):
        plan("60", limits=Limits(context=4096))


@pytest.mark.parametrize("size", [(1, 1), (640, 3), (8000, 20)])
def test_a_picture_that_no_server_takes_is_refused(size: tuple[int, int]) -> None:
    """V5: a row with a picture of 1x1."""
    with pytest.raises(FramesRefused, match=f"{size[0]}x{size[1]} cannot be shown"):
        plan("10", size=size)


def test_pictures_are_scaled_down_and_never_up() -> None:
    assert sent_size((640, 360), Limits()) == (640, 360)
    assert sent_size((1920, 1080), Limits()) == (640, 360)
    assert sent_size((1080, 1920), Limits()) == (360, 640)
    assert sent_size((64, 36), Limits()) == (64, 36)
    assert sent_size((637, 359), Limits(long_side=320)) == (320, 180)


TOKENS = [
    ((640, 360), 220, 60),
    ((256, 256), 64, 64),
    ((64, 36), 66, 6),
    ((1920, 1080), 2040, 60),
    ((832, 448), 364, 50),
    ((320, 180), 66, 60),
    ((360, 640), 220, 60),
    ((637, 359), 220, 60),
    ((40, 1800), 108, 64),
    ((5000, 4200), 16263, 56),
    ((994, 2249), 2170, 60),
    ((554, 1535), 816, 52),
    ((1961, 2399), 4575, 56),
    ((288, 73), 80, 30),
    ((1941, 1082), 2074, 50),
    ((2276, 979), 2201, 60),
]
"""Size, and its tokens in the picture processors of Qwen3-VL and a small Qwen2.5-VL (transformers 5.24)."""


@pytest.mark.parametrize(("size", "large", "small"), TOKENS)
def test_tokens_of_a_picture_are_those_of_the_models_own_processor(
    size: tuple[int, int], large: int, small: int
) -> None:
    assert image_tokens(*size, LIMITS) == large
    assert image_tokens(*size, TINY) == small


def test_no_reply_that_the_schema_allows_reaches_the_bound_of_tokens() -> None:
    bounds = Bounds(scene=50, character=40, ui=30, event=20)
    limits = Limits(bounds=bounds)
    text = {"present": "yes", "text": "x" * 40}
    longest = {
        "nonce": "0427",
        "scene": "x" * 50,
        "character": text,
        "ui": {"present": "yes", "text": "x" * 30},
        "events": {
            f"i{i:02d}": {"category": str(EventCategory.ENVIRONMENT_TRANSITION), "text": "x" * 20}
            for i in range(3)
        },
        "flags": dict.fromkeys(Flags.model_fields, "yes"),
    }
    assert text_tokens(json.dumps(longest), limits) < reply_tokens(3, limits)
    made = plan("15", limits=limits)
    request = ask(made, [b"x"] * len(made.frames), FIRST, "0427")
    assert request.max_tokens == reply_tokens(3, limits)
    assert read_reply(json.dumps(longest), "stop", request).scene == "x" * 50


# --- pictures and requests, of real footage ---------------------------------------------------------------


@pytest.fixture(scope="module")
def unit(footage: Path, tmp_path_factory: pytest.TempPathFactory) -> Unit:
    """event03 of the pack: 193 frames of 35 fps, ingested."""
    path = footage / "event03_kill_zombieman.mp4"
    data = path.read_bytes()
    clip = Clip(
        clip_id="event03",
        recording_id="event03",
        source_path=path.name,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        perspective=FIRST,
    )
    corpus = Store(str(tmp_path_factory.mktemp("corpus")))
    made = Unit(clip, "g0000-p00000", Store(str(footage)), corpus)
    return Unit(clip, made.partition, made.source, corpus, {"ingest": run_unit(Ingest(IngestConfig()), made)})


@pytest.fixture(scope="module")
def planned(unit: Unit) -> FramePlan:
    facts, table = unit.receipts["ingest"].facts, read_frames(unit)
    size = (int(facts["width"]), int(facts["height"]))
    return plan_frames(table.pts, table.time_base, intervals(table.duration()), size, Limits())


def test_pictures_are_those_of_the_labelled_times(unit: Unit, planned: FramePlan) -> None:
    """The label in front of a picture, and the frame that plays at that time in another decoder."""
    jpegs = pictures(unit, planned)
    request = ask(planned, jpegs, FIRST, "0427")
    content = request.messages[1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"] * (len(jpegs) + 1) + ["text"]
    assert content[0]["text"] == wording.NONCE_LABEL
    assert decoded(content[1]) == nonce_picture("0427")

    with av.open(str(Path(unit.source.full(unit.clip.source_path)))) as container:
        truth = [
            (float(f.pts * f.time_base), f.to_ndarray(format="rgb24")) for f in container.decode(video=0)
        ]
    start = truth[0][0]
    for k, (second, interval) in enumerate(zip(planned.seconds, planned.interval, strict=True)):
        label, picture = content[2 + 2 * k]["text"], decoded(content[3 + 2 * k])
        named, at = label.removeprefix("interval ").removesuffix(" s").split(", ")
        assert named == f"i{interval:02d}"
        assert abs(float(at) - float(second)) <= 0.05
        near = min(truth, key=lambda t: abs(t[0] - start - float(at)))[1]
        shown = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
        assert shown.shape == (360, 640, 3)
        # Quality 90 and halved colour: 1-2 levels; a frame beside it, in a turning view, differs by more.
        assert np.abs(shown.astype(int) - near).mean() < 3


def decoded(part: dict[str, dict[str, str]]) -> bytes:
    head, data = part["image_url"]["url"].split(",")
    assert head == "data:image/jpeg;base64"
    return base64.b64decode(data)


def test_the_same_clip_gives_the_same_request_byte_for_byte(unit: Unit, planned: FramePlan) -> None:
    one, two = (ask(planned, pictures(unit, planned), FIRST, nonce_of("event03", 1)) for _ in range(2))
    assert json.dumps(one.messages) == json.dumps(two.messages)
    assert one.digests == two.digests


def test_pictures_have_the_size_that_their_tokens_were_counted_for(unit: Unit) -> None:
    table = read_frames(unit)
    small = Limits(long_side=320, per_interval=1)
    made = plan_frames(table.pts, table.time_base, intervals(table.duration()), (640, 360), small)
    for data in pictures(unit, made):
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height) == (made.width, made.height) == (320, 180)


# --- requests ---------------------------------------------------------------------------------------------


def request(parts: tuple[Part, ...] = ALL, perspective: Perspective = FIRST, nonce: str = "0427"):
    made = plan("15", limits=Limits(per_interval=2))
    return ask(made, [b"jpeg"] * len(made.frames), perspective, nonce, parts)


def test_no_request_leaves_sampling_to_a_server() -> None:
    """V8: pictures, never a video."""
    kinds = {part["type"] for part in request().messages[1]["content"]}
    assert kinds == {"text", "image_url"}
    assert request().images == 7


def test_a_request_names_every_interval_and_asks_for_each_part_once() -> None:
    text = request().messages[1]["content"][-1]["text"]
    assert "i00 0.00-5.00 s, i01 5.00-10.00 s, i02 10.00-15.00 s" in text
    lines = [line.split(":")[0] for line in text.splitlines() if line.startswith("- ")]
    assert lines == ["- nonce", "- scene", "- character", "- ui", "- events", "- flags"]


def test_a_re_ask_asks_for_less_and_its_schema_takes_no_more() -> None:
    again = request((Part.EVENTS, Part.SCENE))
    assert again.parts == (Part.SCENE, Part.EVENTS)
    assert list(again.schema["properties"]) == ["nonce", "scene", "events"]
    text = again.messages[1]["content"][-1]["text"]
    assert "- scene:" in text
    assert "- ui:" not in text


def test_the_perspective_changes_what_is_asked_and_not_what_may_be_answered() -> None:
    """A grammar that forced the expected presence would hide a clip whose perspective is wrong."""
    asked = {view: request(perspective=view) for view in Perspective}
    assert len({a.messages[1]["content"][-1]["text"] for a in asked.values()}) == 3
    assert len({json.dumps(a.schema) for a in asked.values()}) == 1


def test_digests_change_with_wording_schema_and_pictures_each_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    base = request().digests
    assert request(perspective=Perspective.THIRD).digests[1:] == base[1:]
    assert request(nonce="0428").digests[:2] == base[:2]
    assert request(nonce="0428").digests[2] != base[2]
    assert request((Part.SCENE,)).digests[1] != base[1]
    monkeypatch.setattr(wording, "SYSTEM", wording.SYSTEM + " Be brief.")
    assert request().digests[0] != base[0]
    assert request().digests[1:] == base[1:]


def test_pictures_that_are_not_the_plans_are_refused() -> None:
    made = plan("15")
    with pytest.raises(ValueError, match="3 pictures for a plan of 12 frames"):
        ask(made, [b"jpeg"] * 3, FIRST, "0427")


@pytest.mark.parametrize("nonce", ["", "42", "04270", "a427", "٠٤٢٧"])
def test_a_nonce_is_four_digits(nonce: str) -> None:
    with pytest.raises(ValueError, match="four digits"):
        nonce_picture(nonce)


def test_nonces_differ_between_clips_and_attempts_and_repeat_for_the_same() -> None:
    made = {nonce_of(f"clip{i}", n) for i in range(40) for n in range(3)}
    assert len(made) > 110
    assert nonce_of("clip0", 1) == nonce_of("clip0", 1)
    assert all(len(n) == 4 and n.isdigit() for n in made)

"""Which frames of a clip a VLM is shown, at which times, and what a request will cost before it is sent.

Sampling is done here and nowhere else: the frames go as single pictures, each with its interval and its true
second in front, never as a video that a server would thin again or stamp at a rate of its own.
Source: DESIGN rules 1, 6; spec/faults.md V5, V8.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline.caption import wording
from pipeline.media import Reader, media, read_table
from pipeline.stage import Unit
from schemas.caption import ALL, BOUNDS, Answer, Bounds, EventCategory, Flags, interval_key
from schemas.clip import Perspective
from schemas.timeline import CAPTION_INTERVAL_S, nearest

NONCE_SIDE = 256
"""Side of the check picture in pixels: the least that Qwen3-VL does not scale up (65,536 pixels)."""
# Around a picture stand a start and an end token; a message costs about five for its role and turn.
_AROUND_PICTURE = 2
_MESSAGES = 16
_AT_ONCE = 8
"""Pictures held at full size: 48 frames of 1080p would be 300 MB, of a client with 64 requests in flight."""
WIDEST = 200
"""Aspect ratio that the picture processors of Qwen-VL refuse beyond."""


class Limits(BaseModel):
    """What a request may hold, and how the model counts it. The defaults are those of Qwen3-VL."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    per_interval: int = Field(
        default=4, ge=1, description="most pictures of a 5 s interval; fewer where limits ask for it"
    )
    max_images: int = Field(
        default=128,
        ge=2,
        description="most pictures of a request (the server's limit), the check picture too",
    )
    context: int = Field(default=32768, ge=1, description="tokens of a request and its reply together")
    long_side: int = Field(default=640, ge=28, description="pictures are scaled down to it, never up")
    quality: int = Field(default=90, ge=50, le=100, description="JPEG quality")
    cell: int = Field(default=32, ge=1, description="pixels a side of one token; Qwen2.5-VL: 28")
    min_pixels: int = Field(
        default=65536, ge=1, description="smaller pictures are scaled up to it by the server"
    )
    max_pixels: int = Field(default=16777216, ge=1, description="larger ones are scaled down by the server")
    # Measured with the Qwen vocabulary: instruction 4.9, question 4.3, reply 3.2, labels 2.5 (digits, a token
    # each, counted apart).
    chars_per_token: float = Field(default=2.5, gt=0, description="fewest characters of English a token")
    bounds: Bounds = Field(default=BOUNDS, description="longest texts of a reply")


class FramesRefused(ValueError):
    """A clip that no request can hold; one line that says why."""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """N frames of a clip of K intervals, in order of time.

    frames: numbers of frames of the media file; seconds: their times from the clip's start, exact;
    interval: the interval of each; spans: start and end of the K intervals in seconds.
    width, height: size in which the pictures are sent, pixels. tokens: all that a request for every field
    may cost at most, its reply included; reply_tokens: the reply alone.
    """

    frames: tuple[int, ...]
    seconds: tuple[Fraction, ...]
    interval: tuple[int, ...]
    spans: tuple[tuple[Fraction, Fraction], ...]
    width: int
    height: int
    limits: Limits
    tokens: int
    reply_tokens: int


def plan_frames(
    pts: npt.ArrayLike,
    time_base: Fraction,
    intervals: Sequence[tuple[Fraction, Fraction]],
    size: tuple[int, int],
    limits: Limits,
) -> FramePlan:
    """Frames evenly over each interval: as many a 5 s interval as `limits` allow, all alike, a short last
    one in proportion, at least one each.

    pts: int [F], times of the media file's frames in ticks of `time_base`, pts[0] = 0.
    intervals: `schemas.timeline.intervals` of the clip's duration. size: (width, height) of the media file.
    Raises FramesRefused when one frame an interval does not fit, an interval holds no frame, or the picture
    is too narrow for any server.
    Source: spec/faults.md V5, V8.
    """
    times = [int(t) * time_base for t in np.asarray(pts, dtype=np.int64)]
    width, height = sent_size(size, limits)
    held = [range(bisect_left(times, start), bisect_left(times, stop)) for start, stop in intervals]
    empty = next((i for i, frames in enumerate(held) if not frames), None)
    if empty is not None:
        raise FramesRefused(f"no frame lies in interval {interval_key(empty)}; check the frame table")
    reply, tokens, images = reply_tokens(len(held), limits), 0, 0
    # All intervals but the last, which may be short, have `many` pictures.
    most = max(1, (limits.max_images - 1) // max(1, len(held) - 1))
    for many in range(min(limits.per_interval, most), 0, -1):
        chosen = [_spread(frames, times, span, many) for frames, span in zip(held, intervals, strict=True)]
        images = sum(map(len, chosen)) + 1
        tokens = _request_tokens(intervals, chosen, times, (width, height), limits) + reply
        if images <= limits.max_images and tokens <= limits.context:
            frames = [k for group in chosen for k in group]
            return FramePlan(
                frames=tuple(frames),
                seconds=tuple(times[k] for k in frames),
                interval=tuple(i for i, group in enumerate(chosen) for _ in group),
                spans=tuple(intervals),
                width=width,
                height=height,
                limits=limits,
                tokens=tokens,
                reply_tokens=reply,
            )
    raise FramesRefused(
        f"{len(held)} intervals with one picture each need {images} pictures and {tokens} tokens; allowed are"
        f" {limits.max_images} and {limits.context}: cut shorter clips, or raise the caption limits"
    )


def _spread(
    frames: range, times: Sequence[Fraction], span: tuple[Fraction, Fraction], many: int
) -> list[int]:
    """At most `many` of an interval's frames, nearest to the middles of equal parts of it."""
    start, stop = span
    parts = max(1, math.ceil(many * (stop - start) / CAPTION_INTERVAL_S))
    middles = [start + (stop - start) * Fraction(2 * j + 1, 2 * parts) for j in range(parts)]
    inside = times[frames.start : frames.stop]
    return sorted({frames[nearest(inside, middle)] for middle in middles})


# --- what it costs ----------------------------------------------------------------------------------------


def sent_size(size: tuple[int, int], limits: Limits) -> tuple[int, int]:
    """(width, height) in which a picture is sent: its own, or scaled down to the long side.

    Raises FramesRefused for a picture under four pixels a side or too narrow for a server.
    """
    width, height = size
    if min(size) < 4 or max(size) > WIDEST * min(size):
        raise FramesRefused(f"a picture of {width}x{height} cannot be shown to a model")
    scale = min(Fraction(1), Fraction(limits.long_side, max(size)))
    return max(1, round(width * scale)), max(1, round(height * scale))


def image_tokens(width: int, height: int, limits: Limits) -> int:
    """Tokens of one picture of this size in the Qwen-VL family: its sides are rounded to whole cells, and it
    is scaled so that its area lies between the least and the most pixels."""
    cell = limits.cell
    rows, columns = round(height / cell), round(width / cell)
    area = rows * columns * cell * cell
    if area > limits.max_pixels:
        shrink = math.sqrt(height * width / limits.max_pixels)
        rows = max(1, math.floor(height / shrink / cell))
        columns = max(1, math.floor(width / shrink / cell))
    elif area < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
    return rows * columns


def text_tokens(text: str, limits: Limits) -> int:
    """Most tokens of an English text: one a digit, and one every `chars_per_token` other characters."""
    digits = sum(c.isdigit() for c in text)
    return digits + math.ceil((len(text) - digits) / limits.chars_per_token)


def reply_tokens(count: int, limits: Limits) -> int:
    """Tokens of the longest reply that the schema of `count` intervals allows."""
    bounds = limits.bounds

    def present(longest: int) -> dict[str, Any]:
        return {"present": str(Answer.YES), "text": "x" * longest}

    event = {"category": str(EventCategory.ENVIRONMENT_TRANSITION), "text": "x" * bounds.event}
    longest = {
        "nonce": "0000",
        "scene": "x" * bounds.scene,
        "character": present(bounds.character),
        "ui": present(bounds.ui),
        "events": {interval_key(i): event for i in range(count)},
        "flags": dict.fromkeys(Flags.model_fields, str(Answer.YES)),
    }
    return text_tokens(json.dumps(longest), limits) + 1


def _request_tokens(
    spans: Sequence[tuple[Fraction, Fraction]],
    chosen: Sequence[Sequence[int]],
    times: Sequence[Fraction],
    size: tuple[int, int],
    limits: Limits,
) -> int:
    seconds = [(float(a), float(b)) for a, b in spans]
    count = sum(map(len, chosen))
    question = max((wording.question(view, ALL, seconds, count) for view in Perspective), key=len)
    labels = [wording.label(i, float(times[k])) for i, group in enumerate(chosen) for k in group]
    texts = [wording.SYSTEM, question, wording.NONCE_LABEL, *labels]
    return request_tokens(texts, [size] * count + [(NONCE_SIDE, NONCE_SIDE)], limits)


def request_tokens(texts: Iterable[str], pictures: Sequence[tuple[int, int]], limits: Limits) -> int:
    """Most tokens of a request of these texts and pictures, (width, height) each, without its reply."""
    seen = sum(image_tokens(*size, limits) for size in pictures)
    around = _AROUND_PICTURE * len(pictures) + _MESSAGES
    return sum(text_tokens(t, limits) for t in texts) + seen + around


# --- pictures ---------------------------------------------------------------------------------------------


def pictures(unit: Unit, plan: FramePlan) -> list[bytes]:
    """JPEGs of the planned frames, in order, at the plan's size. The same frames give the same bytes.

    Raises StoreError or FramesDiffer when the media file is not the one that was ingested.
    """
    size, quality = (plan.width, plan.height), plan.limits.quality
    with media(unit) as path:
        reader = Reader(path, read_table(unit))
        groups = (plan.frames[k : k + _AT_ONCE] for k in range(0, len(plan.frames), _AT_ONCE))
        return [jpeg(rgb, size, quality) for group in groups for rgb in reader.read(group)]


def jpeg(rgb: npt.NDArray[np.uint8], size: tuple[int, int], quality: int) -> bytes:
    """JPEG of a picture, uint8 [H, W, 3], scaled by area to (width, height)."""
    if (rgb.shape[1], rgb.shape[0]) != size:
        rgb = np.asarray(cv2.resize(rgb, size, interpolation=cv2.INTER_AREA), np.uint8)
    done, data = cv2.imencode(".jpg", rgb[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f"a picture of {size[0]}x{size[1]} could not be written as JPEG")
    return data.tobytes()

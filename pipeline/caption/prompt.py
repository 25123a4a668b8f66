"""One request: messages, reply schema, and what a cache keys it by. Knows nothing of any server.

Source: DESIGN rules 6, 10; spec/faults.md V1, V5, V8, R6.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from pipeline.caption import wording
from pipeline.caption.frames import NONCE_SIDE, FramePlan, jpeg
from pipeline.stage import digest
from schemas.caption import ALL, Bounds, Part, reply_schema
from schemas.clip import Perspective


@dataclass(frozen=True)
class Ask:
    """A request to describe a clip, ready to be sent by any client of the OpenAI protocol.

    messages: chat messages; pictures are data URLs in `image_url` parts, each behind its label.
    schema: JSON schema of the reply, for `response_format`; one a number of intervals and set of parts.
    parts: the fields asked for. intervals: K. nonce: four digits, drawn in the first picture.
    images: pictures, the check picture included. tokens: most tokens of request and reply together.
    max_tokens: the bound to send; a reply that reaches it is cut, and never a success.
    digests: what the answer depends on, but for model and sampling: wording, schema, pictures.
    """

    messages: list[dict[str, Any]]
    schema: dict[str, Any]
    parts: tuple[Part, ...]
    perspective: Perspective
    intervals: int
    bounds: Bounds
    nonce: str
    images: int
    tokens: int
    max_tokens: int
    digests: tuple[str, ...]


def ask(
    plan: FramePlan,
    jpegs: Sequence[bytes],
    perspective: Perspective,
    nonce: str,
    parts: Iterable[Part] = ALL,
) -> Ask:
    """The request for these parts of a clip's caption.

    jpegs: `frames.pictures` of the plan. nonce: four digits, `nonce_of` the clip and the attempt.
    A re-ask names the parts that failed and gets a smaller question and schema.
    Raises ValueError when pictures and plan differ in number, or the nonce is not four digits.
    """
    if len(jpegs) != len(plan.frames):
        raise ValueError(f"{len(jpegs)} pictures for a plan of {len(plan.frames)} frames")
    asked = frozenset(parts)
    wanted = tuple(p for p in ALL if p in asked)
    check = nonce_picture(nonce)
    content: list[dict[str, Any]] = [text_part(wording.NONCE_LABEL), picture_part(check)]
    for interval, second, data in zip(plan.interval, plan.seconds, jpegs, strict=True):
        content += [text_part(wording.label(interval, float(second))), picture_part(data)]
    spans = [(float(a), float(b)) for a, b in plan.spans]
    content.append(text_part(wording.question(perspective, wanted, spans, len(jpegs))))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": wording.SYSTEM},
        {"role": "user", "content": content},
    ]
    schema = reply_schema(len(plan.spans), wanted, plan.limits.bounds)
    shown = [hashlib.sha256(data).hexdigest() for data in (check, *jpegs)]
    words = [part["text"] for part in content if part["type"] == "text"]
    return Ask(
        messages=messages,
        schema=schema,
        parts=wanted,
        perspective=perspective,
        intervals=len(plan.spans),
        bounds=plan.limits.bounds,
        nonce=nonce,
        images=len(jpegs) + 1,
        tokens=plan.tokens,
        max_tokens=plan.reply_tokens,
        digests=(digest(wording.PROMPT_VERSION, wording.SYSTEM, words), digest(schema), digest(shown)),
    )


def nonce_of(*about: object) -> str:
    """Four digits that follow from what they are about: a clip's id, and the number of the attempt."""
    return f"{int(digest(*about), 16) % 10000:04d}"


def nonce_picture(nonce: str) -> bytes:
    """JPEG of black digits on white. Raises ValueError unless there are four."""
    if len(nonce) != 4 or not (nonce.isascii() and nonce.isdigit()):
        raise ValueError(f"a nonce is four digits, not {nonce!r}")
    canvas = np.full((NONCE_SIDE, NONCE_SIDE, 3), 255, np.uint8)
    font, scale, stroke = cv2.FONT_HERSHEY_SIMPLEX, 2.8, 6
    (width, height), _ = cv2.getTextSize(nonce, font, scale, stroke)
    corner = ((NONCE_SIDE - width) // 2, (NONCE_SIDE + height) // 2)
    cv2.putText(canvas, nonce, corner, font, scale, (0, 0, 0), stroke, cv2.LINE_AA)
    return jpeg(canvas, (NONCE_SIDE, NONCE_SIDE), 90)


def text_part(words: str) -> dict[str, Any]:
    """Of a chat message."""
    return {"type": "text", "text": words}


def picture_part(data: bytes) -> dict[str, Any]:
    """Of a chat message: a JPEG as a data URL."""
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}

"""The body of an answer to POST /v1/chat/completions, read strictly. Source: spec/faults.md V1, V10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.strict_json import StrictJsonError, loads

TOKENS_MAX = 1 << 20
"""A count of prompt tokens above any context length is no count."""


class BodyError(ValueError):
    """A body that is no answer to the request. kind: one word for the tables."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(slots=True)
class Meter:
    """What a request took, in all its tries. seconds: at endpoints, by the wall clock. engine_seconds: its
    share of the time in which engines worked; the shares of all requests add up to that time."""

    seconds: float = 0.0
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What an endpoint (a URL) answered. tokens: as the server counts them; None where its count is missing
    or cannot be true."""

    text: str
    finish_reason: str
    tokens_in: int | None
    tokens_out: int | None
    endpoint: str
    meter: Meter


def read_body(body: bytes, model: str, max_tokens: int, endpoint: str, meter: Meter) -> Completion:
    """One text from the model that was asked. Raises BodyError for everything else, and repairs nothing."""
    try:
        answer = loads(body, printable=False)
    except StrictJsonError as error:
        raise BodyError("body", error.detail) from None
    if not isinstance(answer, dict):
        raise BodyError("body", f"a JSON {type(answer).__name__}, not an object")
    if answer.get("model") != model:
        raise BodyError("model", f"asked {model}, answered by {str(answer.get('model'))[:80]}")
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else 0
        raise BodyError("choices", f"one choice was asked for, {count} came")
    message, finish = choices[0].get("message"), choices[0].get("finish_reason")
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        held = message.get("content") if isinstance(message, dict) else None
        raise BodyError("content", f"the content is a {type(held).__name__}, not text")
    if message.get("tool_calls"):
        raise BodyError("content", "the answer calls tools")
    if not isinstance(finish, str):
        raise BodyError("choices", "the answer has no finish reason")
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    tokens_in, tokens_out = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return Completion(
        text=message["content"],
        finish_reason=finish,
        tokens_in=_count(tokens_in, TOKENS_MAX),
        tokens_out=_count(tokens_out, max_tokens),
        endpoint=endpoint,
        meter=meter,
    )


def _count(value: Any, most: int) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None

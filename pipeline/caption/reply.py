"""A model's reply, read strictly: it is what was asked for, or it is refused with a named fault.

Nothing is repaired, cut out or guessed: a reply that needs it is asked for again. What the texts say is
judged in `validate`. Source: DESIGN rule 6; spec/faults.md V1, V10, V11.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pipeline.caption.prompt import Ask
from schemas.caption import (
    ALL,
    Answer,
    EventCategory,
    Flags,
    IntervalEvent,
    Part,
    StructuredCaption,
    interval_key,
)
from schemas.strict_json import StrictJsonError, TextFault, loads


class FaultKind(StrEnum):
    """What is wrong with a reply. The structural ones break its form, the others lie in what it says."""

    FINISH = "finish"  # the server did not finish it: length, abort, tool calls, ...
    JSON = "json"  # not one strict JSON value
    UNICODE = "unicode"  # characters that belong into no text, or not NFC
    SCHEMA = "schema"  # a key or a type that was not asked for
    INTERVALS = "intervals"  # not exactly the clip's intervals, in order
    BOUNDS = "bounds"  # an empty or too long text

    NONCE = "nonce"  # the digits of another request, or none: the pictures were not seen
    REFUSAL = "refusal"
    EMPTY = "empty"  # words that say nothing
    LANGUAGE = "language"
    LEAK = "leak"  # what belongs into another field, or into the actions
    COPIED = "copied"  # one text in neighbouring intervals
    LOOP = "loop"  # words repeated over and over
    CUT = "cut"  # ended by the bound, within a sentence
    PRESENCE = "presence"  # a character that the perspective does not have, or lacks
    CANARY = "canary"  # not the known answer

    @property
    def structural(self) -> bool:
        return self in STRUCTURAL


STRUCTURAL = frozenset(
    (
        FaultKind.FINISH,
        FaultKind.JSON,
        FaultKind.UNICODE,
        FaultKind.SCHEMA,
        FaultKind.INTERVALS,
        FaultKind.BOUNDS,
    )
)


@dataclass(frozen=True, slots=True)
class Fault:
    """part: the field that is wrong and can be asked for again; None: the reply as a whole."""

    part: Part | None
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        where = f" of {self.part}" if self.part else ""
        return f"{self.kind}{where}: {self.detail}"


class ReplyError(ValueError):
    """A reply that cannot be read; `fault` says why. Always a structural kind."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts that were asked for; the others are None. An absent character or interface is ""."""

    nonce: str
    scene: str | None = None
    character: str | None = None
    ui: str | None = None
    events: tuple[IntervalEvent, ...] | None = None
    flags: Flags | None = None

    def only(self, parts: Iterable[Part]) -> Reply:
        """The reply with nothing but these parts: what passed, to be kept through a re-ask."""
        return Reply(self.nonce, **{part.value: getattr(self, part) for part in set(parts)})

    def with_(self, other: Reply) -> Reply:
        """This reply and the parts of another; the other's where both have one."""
        held: dict[str, Any] = {p.value: getattr(other, p) for p in ALL if getattr(other, p) is not None}
        return replace(self, **held)

    def caption(self, provenance: str) -> StructuredCaption:
        """The caption of a whole reply. provenance: the model's name. Raises ValueError when a part lacks."""
        lacks = [part.value for part in ALL if getattr(self, part) is None]
        if lacks or not provenance:
            raise ValueError(f"a caption needs every part and a provenance; {', '.join(lacks)} missing")
        fields = {part.value: getattr(self, part) for part in ALL}
        return StructuredCaption(**fields, provenance=provenance)


def read_reply(text: object, finish_reason: object, ask: Ask) -> Reply:
    """The reply of a server, if it has exactly the form that was asked for.

    text: the message's content as the server's answer holds it, finish_reason likewise; any type may come.
    Raises ReplyError with the first structural fault.
    """
    if finish_reason != "stop":
        raise _fault(None, FaultKind.FINISH, f"finish reason {str(finish_reason)[:40]!r}, not stop")
    if not isinstance(text, str):
        raise _fault(None, FaultKind.JSON, f"the content is {type(text).__name__}, not a text")
    try:
        value = loads(text)
    except StrictJsonError as error:
        kind = FaultKind.UNICODE if error.fault is TextFault.UNICODE else FaultKind.JSON
        raise _fault(None, kind, error.detail) from None
    reply = _keys(value, ("nonce", *(p.value for p in ask.parts)), None, "the reply")
    nonce = reply["nonce"]
    if not isinstance(nonce, str) or len(nonce) != 4 or not (nonce.isascii() and nonce.isdigit()):
        raise _fault(None, FaultKind.SCHEMA, "the nonce is not four digits")
    read: dict[str, Any] = {part.value: _READERS[part](reply[part.value], ask) for part in ask.parts}
    return Reply(nonce=nonce, **read)


def _scene(value: Any, ask: Ask) -> str:
    return _text(value, ask.bounds.scene, Part.SCENE)


def _character(value: Any, ask: Ask) -> str:
    return _present(value, ask.bounds.character, Part.CHARACTER)


def _ui(value: Any, ask: Ask) -> str:
    return _present(value, ask.bounds.ui, Part.UI)


def _events(value: Any, ask: Ask) -> tuple[IntervalEvent, ...]:
    names = [interval_key(i) for i in range(ask.intervals)]
    found = list(value) if isinstance(value, dict) else None
    if found is None:
        raise _fault(Part.EVENTS, FaultKind.SCHEMA, f"a {type(value).__name__}, not an object")
    if found != names:
        wrong = sorted(set(names) ^ set(found))
        detail = f"{', '.join(wrong)[:60]} missing or not asked for" if wrong else "not in order"
        raise _fault(Part.EVENTS, FaultKind.INTERVALS, detail)
    return tuple(_event(value[name], name, ask) for name in names)


def _event(value: Any, name: str, ask: Ask) -> IntervalEvent:
    category = value.get("category") if isinstance(value, dict) else None
    if category == EventCategory.NONE:
        _keys(value, ("category",), Part.EVENTS, name)
        return IntervalEvent()
    keys = _keys(value, ("category", "text"), Part.EVENTS, name)
    if category not in list(EventCategory):
        raise _fault(
            Part.EVENTS, FaultKind.SCHEMA, f"category {str(category)[:40]!r} of {name} does not exist"
        )
    text = _text(keys["text"], ask.bounds.event, Part.EVENTS, name)
    return IntervalEvent(category=EventCategory(category), text=text)


def _flags(value: Any, ask: Ask) -> Flags:
    keys = _keys(value, tuple(Flags.model_fields), Part.FLAGS, "flags")
    for name, answer in keys.items():
        if answer not in (Answer.YES, Answer.NO):
            raise _fault(Part.FLAGS, FaultKind.SCHEMA, f"{name} is {str(answer)[:20]!r}, not yes or no")
    return Flags(**keys)


_READERS = {
    Part.SCENE: _scene,
    Part.CHARACTER: _character,
    Part.UI: _ui,
    Part.EVENTS: _events,
    Part.FLAGS: _flags,
}


def _present(value: Any, longest: int, part: Part) -> str:
    present = value.get("present") if isinstance(value, dict) else None
    if present == Answer.NO:
        _keys(value, ("present",), part, part.value)
        return ""
    keys = _keys(value, ("present", "text"), part, part.value)
    if present != Answer.YES:
        raise _fault(part, FaultKind.SCHEMA, f"present is {str(present)[:20]!r}, not yes or no")
    return _text(keys["text"], longest, part)


def _keys(value: Any, names: tuple[str, ...], part: Part | None, where: str) -> dict[str, Any]:
    """The object, if it has exactly these keys; their order means nothing."""
    if not isinstance(value, dict):
        raise _fault(part, FaultKind.SCHEMA, f"{where} is a {type(value).__name__}, not an object")
    wrong = sorted(set(names) ^ set(value))
    if wrong:
        raise _fault(part, FaultKind.SCHEMA, f"{', '.join(wrong)[:60]} of {where} missing or not asked for")
    return value


def _text(value: Any, longest: int, part: Part, where: str = "") -> str:
    name = where or part.value
    if not isinstance(value, str):
        raise _fault(part, FaultKind.SCHEMA, f"{name} is a {type(value).__name__}, not a text")
    if not value.strip():
        raise _fault(part, FaultKind.BOUNDS, f"{name} is empty")
    if len(value) > longest:
        raise _fault(part, FaultKind.BOUNDS, f"{name} has {len(value)} characters, {longest} are allowed")
    return value


def _fault(part: Part | None, kind: FaultKind, detail: str) -> ReplyError:
    return ReplyError(Fault(part, kind, detail))

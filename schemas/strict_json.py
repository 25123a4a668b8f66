"""JSON that every library reads alike: what one accepts and another refuses never gets in.

Refused: NaN and Infinity, a key given twice, unpaired surrogates, control characters, characters that Unicode
does not assign, text that is not NFC, numbers past the range of float64 or int64, deep nesting, a byte order
mark, anything behind the value. Source: DESIGN rule 6; spec/faults.md V10.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from enum import StrEnum
from typing import Any

DEEPEST = 32
"""Nesting that is refused beyond; a caption's reply has three levels, a server's answer about ten."""
_INT64 = 1 << 63
# Control, surrogate, private use and unassigned characters, line and paragraph separators, and the invisible
# marks that reorder text: none is printable, and each breaks some reader of captions. A zero-width joiner and
# its kin are of the same class as the marks (Cf).
_BANNED = frozenset(("Cc", "Cs", "Co", "Cn", "Cf", "Zl", "Zp"))
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


class TextFault(StrEnum):
    """What is wrong with a text that should be JSON."""

    JSON = "json"  # not one JSON value of what we allow
    UNICODE = "unicode"  # characters that do not belong into a text


class StrictJsonError(ValueError):
    """One line: what is not allowed, and where in the value."""

    def __init__(self, fault: TextFault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault
        self.detail = detail


def loads(data: str | bytes, printable: bool = True) -> Any:
    """The value of one JSON text.

    printable: also hold every key and string to `unprintable`. The answer of a server is read without it: the
    reply that it carries is a string with line breaks, which is read for itself.
    Raises StrictJsonError.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        raise StrictJsonError(TextFault.UNICODE, f"byte {error.start} is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise StrictJsonError(TextFault.JSON, "a byte order mark stands in front")
    _check_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_float, parse_int=_int
        )
    except json.JSONDecodeError as error:
        raise StrictJsonError(TextFault.JSON, f"{error.msg} at character {error.pos}") from None
    _check_strings(value, printable)
    return value


def dumps(value: object) -> bytes:
    """Compact UTF-8 of plain data, keys in the order given. Raises ValueError on NaN or Infinity."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def unprintable(text: str) -> str:
    """What makes a text unfit for a caption, or "": a banned character with its place, or not NFC."""
    for place, char in enumerate(text):
        if unicodedata.category(char) in _BANNED:
            return f"U+{ord(char):04X} at character {place}"
    return "" if unicodedata.is_normalized("NFC", text) else "not in Unicode form NFC"


def _check_depth(text: str) -> None:
    """Before parsing: the parser of the standard library recurses, and stops at the interpreter's limit."""
    depth = 0
    for found in _STRUCTURE.finditer(text):
        mark = found.group()
        depth += (mark in "[{") - (mark in "]}") if len(mark) == 1 else 0
        if depth > DEEPEST:
            raise StrictJsonError(
                TextFault.JSON, f"nested deeper than {DEEPEST} at character {found.start()}"
            )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise StrictJsonError(TextFault.JSON, f"key {twice[:40]!r} is given twice")
    return out


def _no_constant(name: str) -> Any:
    raise StrictJsonError(TextFault.JSON, f"{name} is not JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise StrictJsonError(TextFault.JSON, f"number {digits[:24]} is out of range")
    return value


def _int(digits: str) -> int:
    # 19 digits hold every int64; Python itself refuses to convert more than 4300.
    if len(digits) > 20 or not -_INT64 <= int(digits) < _INT64:
        raise StrictJsonError(TextFault.JSON, f"number {digits[:24]} is out of range")
    return int(digits)


def _check_strings(value: Any, printable: bool, where: str = "") -> None:
    if isinstance(value, str):
        fault = unprintable(value) if printable else _surrogate(value)
        if fault:
            raise StrictJsonError(TextFault.UNICODE, f"{fault} of {where or 'the text'}")
    elif isinstance(value, dict):
        for key, held in value.items():
            _check_strings(key, printable, "a key")
            _check_strings(held, printable, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for held in value:
            _check_strings(held, printable, f"{where}[]")


def _surrogate(text: str) -> str:
    place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    return "" if place is None else f"U+{ord(text[place]):04X} at character {place}"

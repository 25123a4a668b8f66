"""Parts of the JSON schemas that a VLM's replies are held to: objects, enumerated values, bounded texts.

The VLM never writes structure: it fills these. Source: DESIGN rule 6; spec/faults.md V1.
"""

from __future__ import annotations

from typing import Any

NONCE = {"type": "string", "pattern": "^[0-9]{4}$"}
"""The four digits of the check picture."""
_PRINTABLE = "[ !#-\\[\\]-~]"  # ASCII without the quote and the backslash
BLOCK = 100
"""Texts are bounded by at most so many characters, or by whole multiples of it."""


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def choice(*values: str) -> dict[str, Any]:
    """One of these words."""
    return {"type": "string", "enum": [str(v) for v in values]}


def bounded_text(longest: int) -> dict[str, Any]:
    """A text of 1 to `longest` characters of printable ASCII without `"` and `\\`.

    By a pattern: under xgrammar `maxLength` lets raw control characters through, and a pattern is matched
    against the raw characters between the quotes.
    """
    # The first character is a letter or a digit: no text begins with blanks. xgrammar 0.2.8 cannot compile a
    # repetition of more than 128; as a chain of parts that may each be short, one took 54 ms a token, as
    # whole blocks and one part 0.06 ms.
    blocks = longest // BLOCK
    last = min(longest, BLOCK) - 1
    whole = f"({_PRINTABLE}{{{BLOCK}}}){{0,{blocks - 1}}}" if blocks > 1 else ""
    return {"type": "string", "pattern": f"^[A-Za-z0-9]{whole}{_PRINTABLE}{{0,{last}}}$"}

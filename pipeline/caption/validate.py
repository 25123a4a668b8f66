"""Judging what a reply says. Its form is `reply.read_reply`'s matter; no server and no model is asked here.

Every check names the field, so that it can be asked for again alone: nothing is emptied in silence.
Source: DESIGN rule 6; spec/faults.md V1, V11.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from pipeline.caption import words
from pipeline.caption.leak import score
from pipeline.caption.prompt import Ask
from pipeline.caption.reply import Fault, FaultKind, Reply
from schemas.caption import Part, interval_key
from schemas.clip import Perspective

COPIES = 3
"""Neighbouring intervals with one text. Two are allowed: an event over a border belongs to both."""
_REPEATS = 4
_LONGEST_LOOP = 8  # words
_FEW_WORDS = 6
# Forty scenes written for the tests hold 58-100 % of them, letters thrown together none; a scene full of
# names that nobody listed should still pass.
_ENGLISH_SHARE = 0.15
_MARKS = frozenset("°©®™")
_REFUSAL = re.compile(rf"(?<!\w)(?:{'|'.join(words.REFUSAL)})(?!\w)")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_OTHERS = {name: listed - words.ENGLISH for name, listed in words.OTHER_LANGUAGES.items()}


def check(reply: Reply, ask: Ask) -> list[Fault]:
    """Every content fault of a reply that was read; none when it can be believed as far as words show.

    A fault whose part is None speaks against the whole reply, any other against its part alone.
    """
    faults = [*_nonce(reply, ask), *_presence(reply, ask), *_copied(reply)]
    for part, name, text, longest in _texts(reply, ask):
        found = text_faults(text, longest)
        faults += [Fault(part, kind, f"{name}: {detail}") for kind, detail in found]
        leaks = score(part, text, ask.perspective, reply.character or "").leaks
        if leaks:
            told = ", ".join(f"{leak.found!r} ({leak.topic})" for leak in leaks[:3])
            faults.append(Fault(part, FaultKind.LEAK, f"{name}: {told}"))
    return faults


def _texts(reply: Reply, ask: Ask) -> Iterator[tuple[Part, str, str, int]]:
    """Part, name, text and its bound, of every text that is not empty."""
    bounds = ask.bounds
    for part, text, longest in (
        (Part.SCENE, reply.scene, bounds.scene),
        (Part.CHARACTER, reply.character, bounds.character),
        (Part.UI, reply.ui, bounds.ui),
    ):
        if text:
            yield part, part.value, text, longest
    for i, event in enumerate(reply.events or ()):
        if event.text:
            yield Part.EVENTS, interval_key(i), event.text, bounds.event


def _nonce(reply: Reply, ask: Ask) -> Iterator[Fault]:
    if reply.nonce != ask.nonce:
        yield Fault(None, FaultKind.NONCE, f"{reply.nonce} answered, {ask.nonce} shown")


def _presence(reply: Reply, ask: Ask) -> Iterator[Fault]:
    if reply.character is None:
        return
    if ask.perspective is Perspective.FIRST and reply.character:
        yield Fault(Part.CHARACTER, FaultKind.PRESENCE, "a character in a first-person clip")
    if ask.perspective is Perspective.THIRD and not reply.character:
        yield Fault(Part.CHARACTER, FaultKind.PRESENCE, "no character in a third-person clip")


def _copied(reply: Reply) -> Iterator[Fault]:
    told = [_plain(event.text) for event in reply.events or ()]
    run = 0
    for i, text in enumerate(told):
        run = run + 1 if text and i and text == told[i - 1] else 1
        if text and run == COPIES:
            yield Fault(Part.EVENTS, FaultKind.COPIED, f"one text from {interval_key(i - COPIES + 1)} on")
    fields = {part: _plain(getattr(reply, part) or "") for part in (Part.SCENE, Part.CHARACTER, Part.UI)}
    for part in (Part.CHARACTER, Part.UI):
        if fields[part] and fields[part] == fields[Part.SCENE]:
            yield Fault(part, FaultKind.COPIED, "the text of the scene")
    for i, text in enumerate(told):
        if text and text in fields.values():
            yield Fault(Part.EVENTS, FaultKind.COPIED, f"{interval_key(i)} has the text of another field")


def text_faults(text: str, longest: int) -> Iterator[tuple[FaultKind, str]]:
    """Faults of one text by itself."""
    refusal = _REFUSAL.search(text.lower())
    if refusal:
        yield FaultKind.REFUSAL, f"{refusal.group()!r}"
    plain = _plain(text)
    if plain in words.NOTHING or not any(c.isalpha() for c in plain):
        yield FaultKind.EMPTY, f"{text[:40]!r} says nothing"
        return
    language = _language(text)
    if language:
        yield FaultKind.LANGUAGE, language
    loop = _loop(text)
    if loop:
        yield FaultKind.LOOP, loop
    if len(text) >= longest and text[-1] not in ".!?\"')":
        yield FaultKind.CUT, f"ended by the bound of {longest} characters"


def _language(text: str) -> str:
    """Why a text is not plain English, or ""."""
    for char in text:
        kind = unicodedata.category(char)
        if kind[0] == "L" and not unicodedata.name(char, "").startswith("LATIN"):
            return f"letter {char!r} is not Latin"
        if (kind in ("So", "Sk") and char not in _MARKS) or kind[0] == "M":
            return f"symbol U+{ord(char):04X} is no part of a description"
    said = [w.lower() for w in _WORD.findall(text)]
    english = sum(w in words.ENGLISH for w in said)
    for name, listed in _OTHERS.items():
        other = sum(w in listed for w in said)
        if other >= 2 and other > english:
            return f"{other} words of {name}, {english} of English"
    if len(said) >= _FEW_WORDS and english < _ENGLISH_SHARE * len(said):
        return f"{english} of {len(said)} words are frequent in English"
    return ""


def _loop(text: str) -> str:
    """What a text repeats over and over, or ""."""
    if "   " in text or text != text.strip():
        return "blanks in a row, or around it"
    said = _plain(text).split()
    for size in range(1, _LONGEST_LOOP + 1):
        groups = [tuple(said[k : k + size]) for k in range(len(said) - size + 1)]
        for k in range(len(groups) - (_REPEATS - 1) * size):
            if all(groups[k + j * size] == groups[k] for j in range(1, _REPEATS)):
                return f"{' '.join(groups[k])!r} {_REPEATS} times in a row"
    sentences = [_plain(s) for s in re.split(r"[.!?;]", text) if _plain(s)]
    twice = next((s for s in sentences if sentences.count(s) >= COPIES), "")
    return f"the sentence {twice[:40]!r} {sentences.count(twice)} times" if twice else ""


def _plain(text: str) -> str:
    """Words and numbers alone, in lower case, one blank between them."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))

"""What the contents of a folder were made with, written down once: a run that would mix in something else is
refused. Source: DESIGN rule 10."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from jobs.evaluate.world import EvaluationError
from pipeline.store import Store
from schemas.strict_json import StrictJsonError, dumps, loads

Identity = Mapping[str, str | int | float]
"""Of what plays: beyond its name."""
_SAMPLED = 1 << 20
"""Bytes of each end of a file that a fingerprint reads: training changes all of a file, a copy none of it."""

_SHOWN = 80
"""Characters of a value in a message."""


def pin(store: Store, path: str, note: Mapping[str, Any]) -> None:
    """Write a note, or compare it with the one that is there. Raises EvaluationError where they differ.

    To be called when all else was checked: a folder that is pinned to what cannot be run is lost.
    """
    if not check_pin(store, path, note):
        store.write(path, dumps(loads(dumps(note))) + b"\n")


def check_pin(store: Store, path: str, note: Mapping[str, Any]) -> bool:
    """Is the note there. Raises EvaluationError where it is another one."""
    if not store.exists(path):
        return False
    if differs := difference(read_note(store, path), loads(dumps(note))):
        name, was, now = differs
        raise EvaluationError(
            f"{store.url}/{path}: {name} was {was} and is now {now}: give another folder to --out"
        )
    return True


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first key, as `config.limits.most`, whose values are not the same, and both for a message."""
    for name in dict.fromkeys((*one, *other)):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            if inner := difference(a, b):
                return f"{name}.{inner[0]}", *inner[1:]
        elif a != b:
            return name, *apart(
                str(a) if name in one else "not given", str(b) if name in other else "not given"
            )
    return None


def apart(a: str, b: str) -> tuple[str, str]:
    """Two texts, cut so that a message shows where they part."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))
    first = max(0, same - _SHOWN // 2) if max(len(a), len(b)) > _SHOWN else 0
    left, right = (("..." if first else "") + text[first : first + _SHOWN] for text in (a, b))
    return left, right


def read_note(store: Store, path: str) -> dict[str, Any]:
    """Raises EvaluationError where it cannot be read."""
    try:
        value = loads(store.read(path))
    except StrictJsonError:
        value = None
    if not isinstance(value, dict):
        raise EvaluationError(f"{store.url}/{path} is damaged: give another folder to --out")
    return value


def fingerprint(folder: Path) -> str:
    """Tells weights from other ones: sha256 of the names, sizes, first and last megabyte of all files."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED))
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()

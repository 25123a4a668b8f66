"""What the contents of a folder were made with, written down once: a run that would mix in something else is
refused. Source: DESIGN rule 10."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.evaluate.world import EvaluationError
from pipeline.store import Store
from schemas.strict_json import StrictJsonError, dumps, loads

Identity = Mapping[str, str | int | float]
"""Of what plays: beyond its name."""
_SAMPLED = 1 << 20
"""Bytes of each end of a file that a fingerprint reads: training changes all of a file, a copy none of it."""


def pin(store: Store, path: str, note: Mapping[str, Any]) -> None:
    """Write a note, or compare it with the one that is there. Raises EvaluationError where they differ."""
    plain: dict[str, Any] = loads(dumps(note))
    if not store.exists(path):
        store.write(path, dumps(plain) + b"\n")
        return
    held = read_note(store, path)
    for name in (*held, *plain):
        if held.get(name) != plain.get(name):
            raise EvaluationError(
                f"{store.url}/{path}: {name} was {short(held.get(name))} and is now "
                f"{short(plain.get(name))}: give another folder to --out"
            )


def read_note(store: Store, path: str) -> dict[str, Any]:
    """Raises EvaluationError where it cannot be read."""
    try:
        value = loads(store.read(path))
    except StrictJsonError:
        value = None
    if not isinstance(value, dict):
        raise EvaluationError(f"{store.url}/{path} is damaged: give another folder to --out")
    return value


def short(value: object) -> str:
    """For a message."""
    return "not given" if value is None else str(value)[:80]


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

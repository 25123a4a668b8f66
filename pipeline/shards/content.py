"""Checks of a sample's annotation members: the JSON and the arrays, against each other and the index row.

Source: DESIGN rule 4; spec/faults.md V10.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from schemas.action import LatentActions, Witness
from schemas.sample import ARRAYS, FAMILIES, UNSELECTED, Annotation, check_array, index_schema

_FACTS = tuple(n for n in index_schema().names if n not in (*UNSELECTED, *FAMILIES))


def check_annotation(row: Mapping[str, Any], members: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """What is wrong with the content of a sample's annotation members, as (suffix, problem).

    The JSON is strict (no repeated keys, no NaN, every key there with its own type) and agrees with the index
    row; arrays load without pickle and have the dtype and shape of schemas.sample; the grid shows frames that
    exist; unknown actions are exactly those that the JSON explains.
    """
    try:
        note = _annotation(members["json"])
    except (ValueError, ValidationError) as error:
        return [("json", f"it is not a strict Annotation ({' '.join(str(error).split())[:200]})")]
    facts = note.model_dump(mode="json")
    problems = [
        ("json", f"{name} is {facts[name]!r}, the index says {row[name]!r}")
        for name in _FACTS
        if facts[name] != row[name]
    ]
    sizes = {"F": note.frames, "T": note.latents, "G": 4 * note.latents - 3}
    arrays = {}
    for suffix in ARRAYS:
        try:
            arrays[suffix] = _array(members[suffix])
            check_array(suffix, arrays[suffix], sizes)
        except (ValueError, EOFError) as error:
            problems.append((suffix, f"it is not the array that it should be ({error})"))
    if problems:
        return problems
    grid = arrays["grid.npy"]
    if len(grid) and (grid.min() < 0 or grid.max() >= note.frames or np.any(np.diff(grid) < 0)):
        problems.append(("grid.npy", f"it does not go forward through frames 0..{note.frames - 1}"))
    try:
        LatentActions(arrays["actions.npy"], note.action_unknown.reasons(), Witness(note.action_witness))
    except ValueError as error:
        problems.append(("actions.npy", str(error)))
    return problems


def _annotation(data: bytes) -> Annotation:
    body = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    note = Annotation.model_validate_json(data, strict=True)
    # Dumped again and compared as text: 30 is not 30.0, and a key that fell back to its default shows.
    if json.dumps(note.model_dump(mode="json"), sort_keys=True) != json.dumps(body, sort_keys=True):
        raise ValueError("a key is missing or has another type")
    json.dumps(body, ensure_ascii=False).encode()  # raises on a lone surrogate
    return note


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := [k for k, n in Counter(k for k, _ in pairs).items() if n > 1]:
        raise ValueError(f"repeated key {repeated[0]!r}")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _array(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    array = np.load(stream, allow_pickle=False)
    if not isinstance(array, np.ndarray) or stream.read(1):
        raise ValueError("it is not one array and nothing else")
    return array

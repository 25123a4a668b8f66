"""Checks of a sample's members, by family: JSON and arrays, against each other and the index row.

Source: DESIGN rule 4; spec/faults.md V10; spec/worldplay2.md a.2, c.2.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from pipeline.geometry import Cover, GeometryError
from schemas.action import LatentActions, Witness
from schemas.latents import ARRAYS as CODED
from schemas.latents import MOST_TOKENS, SPACE_STRIDE, LatentsNote, TextNote, prompt_key, segment_starts
from schemas.sample import ARRAYS, FAMILIES, UNSELECTED, Annotation, check_array, index_schema
from schemas.timeline import TimelineError

Problems = list[tuple[str, str]]
"""What is wrong, as (suffix of the member, problem)."""
Check = Callable[[Mapping[str, Any], Mapping[str, bytes]], Problems]

_FACTS = tuple(n for n in index_schema().names if n not in (*UNSELECTED, *FAMILIES))
Note = TypeVar("Note", bound=BaseModel)


def check_annotation(row: Mapping[str, Any], members: Mapping[str, bytes]) -> Problems:
    """Of the annotations. The JSON is strict (no repeated keys, no NaN, every key there with its own type)
    and agrees with the index row; arrays load without pickle and have the dtype and shape of schemas.sample;
    the grid shows frames that exist; unknown actions are exactly those that the JSON explains.
    """
    note, problems = _note(members, "json", Annotation)
    if note is None:
        return problems
    facts = note.model_dump(mode="json")
    problems = [
        ("json", f"{name} is {facts[name]!r}, the index says {row[name]!r}")
        for name in _FACTS
        if facts[name] != row[name]
    ]
    sizes = {"F": note.frames, "T": note.latent_frames, "G": 4 * note.latent_frames - 3}
    arrays, wrong = _arrays(members, ARRAYS, lambda name, array: check_array(name, array, sizes))
    problems += wrong
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


def check_latents(row: Mapping[str, Any], members: Mapping[str, bytes]) -> Problems:
    """Of the latents. The JSON is a strict LatentsNote that agrees with the index row on T and on the size of
    the pictures, and its crop is the one that the geometry gives; every array has the dtype and shape that
    follow from it, and finite values; segments begin where `segment_starts` puts them.
    """
    note, problems = _note(members, "latents.json", LatentsNote)
    if note is None:
        return problems
    for name, here, there in (
        ("latents", note.latents, row["latent_frames"]),
        ("source_height", note.source_height, row["height"]),
        ("source_width", note.source_width, row["width"]),
    ):
        if here != there:
            problems.append(("latents.json", f"{name} is {here}, the index says {there}"))
    try:
        cover = Cover.of(note.source_height, note.source_width, note.height, note.width)
        starts = segment_starts(note.latents, note.segments)
    except (GeometryError, TimelineError) as error:
        return [*problems, ("latents.json", str(error))]
    if (wrong := _crop(note)) != (want := _crop(cover)):
        problems.append(("latents.json", f"its crop is {wrong}, that of its sizes is {want}"))
    high = note.height // SPACE_STRIDE, note.width // SPACE_STRIDE
    sizes = {
        "T": note.latents,
        "T/2": note.latents // 2,
        "S": note.segments,
        "H/8": high[0],
        "W/8": high[1],
        "H/32": high[0] // 4,
        "W/32": high[1] // 4,
    }

    def check(name: str, array: np.ndarray) -> None:
        shape = CODED[name][1]
        at = shape.index("n") if "n" in shape else None  # y is as long as it needs to be, and never empty
        length = {} if at is None else {"n": max(1, array.shape[at]) if at < array.ndim else 1}
        check_array(name, array, sizes | length, CODED)
        _finite(array)

    arrays, wrong_arrays = _arrays(members, [n for n in CODED if n in members], check)
    problems += wrong_arrays
    if not problems and tuple(arrays["segments_at.npy"]) != starts:
        problems.append(
            ("segments_at.npy", f"segments begin at {arrays['segments_at.npy'].tolist()}, not {list(starts)}")
        )
    return problems


def check_text(row: Mapping[str, Any], members: Mapping[str, bytes]) -> Problems:
    """Of the text. The JSON is a strict TextNote whose keys are those of its prompts; each prompt has 1 to
    512 rows, one behind the other, and together they are the array, whose values are finite.
    """
    note, problems = _note(members, "text.json", TextNote)
    if note is None:
        return problems
    if note.keys != tuple(map(prompt_key, note.prompts)):
        problems.append(("text.json", "a key is not that of its prompt"))
    if "" not in note.prompts:
        problems.append(("text.json", "the empty prompt is missing"))
    if not all(1 <= n <= MOST_TOKENS for n in note.tokens):
        problems.append(("text.json", f"a prompt has 1 to {MOST_TOKENS} tokens, not {list(note.tokens)}"))
    if note.starts != tuple(int(n) for n in np.cumsum([0, *note.tokens[:-1]])):
        problems.append(("text.json", "prompts do not lie one behind the other"))
    sizes = {"N": sum(note.tokens), "D": note.width}

    def check(name: str, array: np.ndarray) -> None:
        check_array(name, array, sizes, CODED)
        _finite(array)

    return problems + _arrays(members, ["text.npy"], check)[1]


CHECKS: dict[str, Check] = {
    "annotations": check_annotation,
    "latents": check_latents,
    "text": check_text,
}
"""Families whose members have a form of their own. A sample of one is held in memory while it is checked: at
448x832 the latents of a minute are some 110 MB."""


def _crop(geometry: LatentsNote | Cover) -> tuple[int, int, int, int]:
    return geometry.scaled_height, geometry.scaled_width, geometry.top, geometry.left


def _note(members: Mapping[str, bytes], suffix: str, kind: type[Note]) -> tuple[Note | None, Problems]:
    try:
        return _strict(members[suffix], kind), []
    except (ValueError, ValidationError) as error:
        why = " ".join(str(error).split())[:200]
        return None, [(suffix, f"it is not a strict {kind.__name__} ({why})")]


def _strict(data: bytes, kind: type[Note]) -> Note:
    body = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    note = kind.model_validate_json(data, strict=True)
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


def _arrays(
    members: Mapping[str, bytes], names: Iterable[str], check: Callable[[str, np.ndarray], None]
) -> tuple[dict[str, np.ndarray], Problems]:
    """The arrays of these names, each passed to `check`, which raises ValueError for what is wrong."""
    arrays: dict[str, np.ndarray] = {}
    problems: Problems = []
    for name in names:
        try:
            arrays[name] = _array(members[name])
            check(name, arrays[name])
        except (ValueError, EOFError) as error:
            problems.append((name, f"it is not the array that it should be ({error})"))
    return arrays, problems


def _array(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    array = np.load(stream, allow_pickle=False)
    if not isinstance(array, np.ndarray) or stream.read(1):
        raise ValueError("it is not one array and nothing else")
    return array


def _finite(array: npt.NDArray[Any]) -> None:
    if not np.isfinite(array).all():
        raise ValueError("it has values that are not finite")

"""Logs beside a recording: reading the mapped columns, and their digest.

The digest covers the values of the mapped columns and the part of the key map that reads them, nothing else:
a column that is not mapped can change or go without a trace, a sign in the key map cannot.
Source: DESIGN rules 4, 10.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import math

import numpy as np
import numpy.typing as npt

from pipeline.sources.keymap import LogPart, PosePart
from pipeline.store import Store, StoreError

Columns = dict[str, npt.NDArray[np.float64]]
Cells = dict[str, list[object]]
"""Cells of the mapped columns, as they stand in the file; None where a row says nothing."""

LARGEST = 1e30
"""Beyond it a value is refused: files hold float32 (3.4e38), after counts were added up and units applied."""
_SHOWN = 40
_UNKNOWN = frozenset(("", "nan", "na", "n/a", "null", "none"))
_TRUTH = {"true": 1.0, "false": 0.0}


class SidecarError(ValueError):
    """A log that cannot be read as the key map says; one line: file, what, where."""


def columns_of(part: LogPart | PosePart) -> tuple[str, ...]:
    """Names of the columns that a part of the key map reads."""
    return part.columns if isinstance(part, LogPart) else part.columns_read


def read_columns(source: Store, path: str, part: LogPart | PosePart) -> Columns:
    """The mapped columns of a log, float64 [R] each, R > 0; an empty cell is NaN. A blank line is a row of
    NaN, so that the rows behind it keep their frames; blank lines at the end are nothing.

    Raises SidecarError when the file cannot be read, is not a table, has no rows, lacks a column or has it
    twice, or holds something that is not a number or too large to keep.
    """
    wanted = columns_of(part)
    try:
        data = source.read(path)
    except OSError as error:
        raise SidecarError(_unreadable(source, path, error)) from None
    cells = _jsonl(data, path, wanted) if path.endswith(".jsonl") else _csv(data, path, wanted)
    return {name: _numbers(cells[name], path, name) for name in wanted}


def sidecar_digest(source: Store, path: str, part: LogPart | PosePart | None) -> str:
    """16 hex digits over what a stage sees of a sidecar. part None: the whole file (event logs).

    A file that cannot be read has a digest too, made from the reason: the clip stays, the stage that reads
    the log reports the reason, and a repaired file has another digest.
    """
    whole = hashlib.sha256()
    try:
        if part is None:
            whole.update(source.read(path))
        else:
            whole.update(_reading(part))
            for name, values in read_columns(source, path, part).items():
                whole.update(f"\n{name}:{len(values)}\n".encode())
                whole.update((values + 0.0).tobytes())  # -0.0 and 0.0 are one value
    except (OSError, SidecarError) as error:
        reason = error if isinstance(error, SidecarError) else _unreadable(source, path, error)
        whole = hashlib.sha256(f"unreadable: {reason}".encode())
        whole.update(b"" if part is None else _reading(part))
    return whole.hexdigest()[:16]


def _unreadable(source: Store, path: str, error: OSError) -> str:
    # The digest is made from it too, and must not depend on where the source lies.
    if isinstance(error, StoreError):
        return str(error).replace(source.url, "the source")
    return f"{path} cannot be read: {error.strerror or type(error).__name__}"


def _reading(part: LogPart | PosePart) -> bytes:
    # Without defaults: an option that is added later changes the digest of no log that does not use it.
    return part.model_dump_json(exclude_defaults=True).encode()


def _csv(data: bytes, path: str, wanted: tuple[str, ...]) -> Cells:
    try:
        lines = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise SidecarError(f"{path} is not a CSV table: {error}") from None
    header = lines[0] if lines else []
    if not header:
        raise SidecarError(f"{path} is not a CSV table: its first line must name the columns")
    if len(header) == 1 and header[0] not in wanted:
        for mark, name in ((";", "semicolons"), ("\t", "tabs")):
            if mark in header[0]:
                raise SidecarError(f"{path} is separated by {name}: write it with commas")
    _require(path, wanted, header)
    _once(path, wanted, header)
    blank = [not row or (len(row) == 1 and not row[0].strip()) for row in lines[1:]]
    rows = lines[1 : 1 + _count(blank, path)]
    for number, row in enumerate(rows):
        if blank[number]:
            rows[number] = [""] * len(header)
        elif len(row) < len(header) or any(cell.strip() for cell in row[len(header) :]):
            raise SidecarError(f"{path} row {number} has {len(row)} fields, its header {len(header)}")
    places = [(name, header.index(name)) for name in wanted]
    return {name: [row[i] for row in rows] for name, i in places}


def _jsonl(data: bytes, path: str, wanted: tuple[str, ...]) -> Cells:
    lines = data.splitlines()
    rows: list[dict[str, object]] = []
    for line in lines[: _count([not line.strip() for line in lines], path)]:
        place = f"{path} row {len(rows)}"
        try:
            # Objects as tuples of pairs: a dict would keep the last of two values under one name.
            row = json.loads(line, object_pairs_hook=tuple) if line.strip() else ()
        except (ValueError, RecursionError) as error:
            raise SidecarError(f"{place} is not JSON: {error}") from None
        if not isinstance(row, tuple):
            raise SidecarError(f"{place} is not a JSON object")
        _once(place, wanted, [name for name, _ in row])
        rows.append(dict(row))
    _require(path, wanted, sorted({name for row in rows for name in row}))
    return {name: [row.get(name) for row in rows] for name in wanted}


def _count(blank: list[bool], path: str) -> int:
    """How many rows there are: all but the blank ones at the end."""
    last = next((i for i in reversed(range(len(blank))) if not blank[i]), None)
    if last is None:
        raise SidecarError(f"{path} has no rows")
    return last + 1


def _require(path: str, wanted: tuple[str, ...], there: list[str]) -> None:
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"; did the key map mean {near[0]!r}?" if near else ""
            raise SidecarError(f"{path} has no column {name!r}{hint}")


def _once(place: str, wanted: tuple[str, ...], names: list[str]) -> None:
    if len(set(names)) == len(names):
        return
    for name in wanted:
        if names.count(name) > 1:
            raise SidecarError(f"{place} has column {name!r} twice: which one is meant?")


def _numbers(cells: list[object], path: str, name: str) -> npt.NDArray[np.float64]:
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        try:
            values[row] = _number(cell)
        except ValueError as error:
            raise SidecarError(f"{path} row {row}, column {name!r}: {error}") from None
    return values


def _number(cell: object) -> float:
    """NaN for what says nothing, 1 and 0 for true and false. Raises ValueError in one line."""
    if isinstance(cell, str):
        cell = cell.strip()
        if cell.lower() in _UNKNOWN:
            return float("nan")
        if cell.lower() in _TRUTH:
            return _TRUTH[cell.lower()]
    elif cell is None:
        return float("nan")
    shown = repr(cell)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    if not isinstance(cell, str | int | float) or (isinstance(cell, str) and "_" in cell):
        raise ValueError(f"{shown} is not a number")
    try:
        value = float(cell)
    except OverflowError:
        raise ValueError(f"{shown} is too large") from None
    except ValueError:
        raise ValueError(f"{shown} is not a number") from None
    if math.isinf(value):
        raise ValueError(f"{value} is not a finite number")
    if abs(value) > LARGEST:
        raise ValueError(f"{value} is too large (at most {LARGEST:g})")
    return value

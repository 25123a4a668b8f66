"""Event logs beside a recording: strict reading of the records that the key map names, and their digest.

Source: DESIGN rules 4, 10; described for users in docs/sources.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.sources.keymap import EventPart
from pipeline.sources.sidecar import SidecarError, sidecar_digest
from pipeline.store import Store, StoreError
from schemas.strict_json import StrictJsonError, loads

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an event log. number: its place in the list, from 0. start, end: in the unit of the key
    map's clock, as they stand in the file; the end is inclusive and not before the start."""

    number: int
    type: str
    start: float
    end: float
    fields: Fields


@dataclass(frozen=True, slots=True)
class Records:
    """The records of the types that are read, in the order of the file, and how many of each other type."""

    read: tuple[Record, ...]
    others: Mapping[str, int]


def read_records(source: Store, path: str, part: EventPart) -> Records:
    """Raises SidecarError, in one line that names file and record, when the log cannot be read, is not JSON
    (NaN is not) or has a key twice, or holds a record without type, or one that is read without a good start
    and end."""
    try:
        data = source.read(path)
    except StoreError as error:
        # The digest is made from it too, and must not depend on where the source lies.
        raise SidecarError(str(error).replace(source.url, "the source")) from None
    except OSError as error:
        raise SidecarError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    read, others = [], Counter[str]()
    for number, row in enumerate(_rows(data, path, part)):
        kind = row.get(part.type)
        if not isinstance(kind, str) or not kind:
            raise SidecarError(f"{path} record {number} has no {part.type!r} that names its type")
        if kind in part.types:
            read.append(_record(number, kind, row, path, part))
        else:
            others[kind] += 1
    return Records(tuple(read), dict(sorted(others.items())))


def field_of(record: Record, name: str, path: str) -> Any:
    """A field of a record; SidecarError when it is not there or says nothing."""
    value = record.fields.get(name)
    if value is None or value == "":
        raise SidecarError(f"{path} record {record.number} ({record.type}) has no {name!r}")
    return value


def number_of(record: Record, name: str, path: str) -> float:
    """A field of a record that is a number; SidecarError when it is not."""
    return _number(field_of(record, name, path), f"{path} record {record.number}", name)


def events_digest(source: Store, path: str, part: EventPart) -> str:
    """16 hex digits over the records that are read and the part of the key map that reads them; where the log
    cannot be read, over the reason, as for other logs. Records that no rule names may change freely."""
    whole = hashlib.sha256(part.model_dump_json(exclude_defaults=True).encode())
    if part.counters is not None:
        whole.update(sidecar_digest(source, path, part.counters).encode())
        return whole.hexdigest()[:16]
    try:
        for record in read_records(source, path, part).read:
            whole.update(b"\n" + json.dumps(record.fields, sort_keys=True).encode())
    except SidecarError as error:
        whole.update(f"unreadable: {error}".encode())
    return whole.hexdigest()[:16]


def _rows(data: bytes, path: str, part: EventPart) -> list[dict[str, Any]]:
    if path.endswith(".jsonl"):
        lines = [line for line in data.splitlines() if line.strip()]
        rows = [_json(line, f"{path} record {number}") for number, line in enumerate(lines)]
    else:
        rows = _json(data, path)
        if part.list:
            if not isinstance(rows, dict) or part.list not in rows:
                raise SidecarError(f"{path} is not a JSON object with the list {part.list!r}")
            rows = rows[part.list]
        if not isinstance(rows, list):
            raise SidecarError(f"{path}: {part.list or 'its top level'} is not a list of records")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SidecarError(f"{path} record {number} is not a JSON object")
    return rows


def _json(data: bytes, place: str) -> Any:
    try:
        return loads(data, printable=False)
    except StrictJsonError as error:
        raise SidecarError(f"{place} cannot be read: {error}") from None


def _record(number: int, kind: str, row: dict[str, Any], path: str, part: EventPart) -> Record:
    if part.clock is None:
        raise SidecarError(f"{path}: the key map states no clock for its records")
    place = f"{path} record {number}"
    bare = Record(number, kind, 0.0, 0.0, row)
    start = number_of(bare, part.clock.start, path)
    end = number_of(bare, part.clock.end, path) if part.clock.end else start
    if end < start:
        raise SidecarError(f"{place} ({kind}) ends at {end:g}, before its start at {start:g}")
    if part.clock.unit == "frame" and not (start.is_integer() and end.is_integer()):
        raise SidecarError(f"{place} ({kind}): {start:g} to {end:g} are no frame numbers")
    return Record(number, kind, start, end, row)


def _number(value: object, place: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SidecarError(f"{place}: {name} is {value!r:.40}, not a number")
    return float(value)

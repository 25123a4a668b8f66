"""Logs beside a recording: reading the mapped columns, and their digest.

The digest covers the values of the mapped columns and the part of the key map that reads them, nothing else:
a column that is not mapped can change or go without a trace, a sign in the key map cannot.
Source: DESIGN rules 4, 10.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json

import numpy as np
import numpy.typing as npt
import pandas as pd

from pipeline.sources.keymap import LogPart, PosePart
from pipeline.store import Store, StoreError

Columns = dict[str, npt.NDArray[np.float64]]


class SidecarError(ValueError):
    """A log that cannot be read as the key map says; one line: file, what, where."""


def columns_of(part: LogPart | PosePart) -> tuple[str, ...]:
    """Names of the columns that a part of the key map reads."""
    return part.columns if isinstance(part, LogPart) else part.columns_read


def read_columns(source: Store, path: str, part: LogPart | PosePart) -> Columns:
    """The mapped columns of a log, float64 [R] each; an empty cell is NaN.

    Raises SidecarError when the file is missing, is not a table, lacks a column, or holds something that is
    not a finite number.
    """
    wanted = columns_of(part)
    try:
        data = source.read(path)
    except StoreError:
        raise SidecarError(f"{path} is missing from the source") from None
    table = _jsonl(data, path, wanted) if path.endswith(".jsonl") else _csv(data, path, wanted)
    return {name: _numbers(table[name], path, name) for name in wanted}


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
    except StoreError:
        whole = hashlib.sha256(b"missing")
    except SidecarError as error:
        whole = hashlib.sha256(f"unreadable: {error}".encode())
        whole.update(b"" if part is None else _reading(part))
    return whole.hexdigest()[:16]


def _reading(part: LogPart | PosePart) -> bytes:
    # Without defaults: an option that is added later changes the digest of no log that does not use it.
    return part.model_dump_json(exclude_defaults=True).encode()


def _csv(data: bytes, path: str, wanted: tuple[str, ...]) -> dict[str, pd.Series]:
    try:
        header = pd.read_csv(io.BytesIO(data), nrows=0, encoding="utf-8-sig")
        _require(path, wanted, [str(c) for c in header.columns])
        frame = pd.read_csv(
            io.BytesIO(data), usecols=list(wanted), encoding="utf-8-sig", float_precision="round_trip"
        )
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise SidecarError(f"{path} is not a CSV table: {' '.join(str(error).split())}") from None
    return {name: frame[name] for name in wanted}


def _jsonl(data: bytes, path: str, wanted: tuple[str, ...]) -> dict[str, pd.Series]:
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SidecarError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SidecarError(f"{path} line {number} is not a JSON object")
        rows.append(row)
    _require(path, wanted, sorted({str(k) for row in rows for k in row}))
    return {name: pd.Series([row.get(name) for row in rows]) for name in wanted}


def _require(path: str, wanted: tuple[str, ...], there: list[str]) -> None:
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"; did the key map mean {near[0]!r}?" if near else ""
            raise SidecarError(f"{path} has no column {name!r}{hint}")


def _numbers(column: pd.Series, path: str, name: str) -> npt.NDArray[np.float64]:
    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    wrong = (np.isnan(values) & column.notna().to_numpy(bool)) | np.isinf(values)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise SidecarError(f"{path} row {row}, column {name!r}: {column.iloc[row]!r} is not a number")
    return values

"""The ledger: the receipts of every unit, by partition of about 1,000 clips.

    ledger/<partition>/segment-00000007.parquet       receipts published since the last seal
    ledger/<partition>/sealed-00000007-MARK.parquet   every receipt up to number 7, one row a (clip, stage)

A later number wins. Sealing writes the merged file first and removes what it replaces afterwards, so a kill
in between leaves files that the numbers already overrule. MARK is the digest of the clips and stage configs
for which every unit of the partition was found done ("open" when some were not), so that a resume needs the
listing alone and reads no row of a finished partition. One driver writes a ledger.
Source: DESIGN rules 2, 10.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.stage import Artefact, Receipt
from pipeline.store import Store
from schemas import SCHEMA_VERSION
from schemas.quality import Status

FOLDER = "ledger"
_NAME = re.compile(
    rf"{FOLDER}/(?P<partition>[a-z0-9-]+)/(segment|sealed)-(?P<number>\d{{8}})(-(?P<mark>\w+))?\.parquet"
)
_OPEN = "open"
_REMEDY = "delete it and run `wp2 curate` again, which makes the same units anew"

SCHEMA = pa.schema(
    [
        ("clip_id", pa.string()),
        ("stage", pa.string()),
        ("status", pa.string()),
        ("reasons", pa.list_(pa.string())),
        ("config", pa.string()),
        ("inputs", pa.string()),
        ("content", pa.string()),
        (
            "outputs",
            pa.list_(
                pa.struct(
                    [
                        ("name", pa.string()),
                        ("path", pa.string()),
                        ("bytes", pa.int64()),
                        ("sha256", pa.string()),
                    ]
                )
            ),
        ),
        ("facts", pa.string()),
        ("attempts", pa.int32()),
        ("seconds", pa.float64()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)

Receipts = dict[str, dict[str, Receipt]]
"""Receipts of one partition: clip id -> stage name -> receipt."""


@dataclass(frozen=True)
class PartitionFiles:
    """The files of one partition that count: the newest sealed one and the segments after it.

    mark: completion mark of the sealed file; None while there are later segments, or none was set.
    number: the highest in use. superseded: what a newer sealed file has replaced.
    """

    sealed: str | None = None
    mark: str | None = None
    segments: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    number: int = 0

    @property
    def live(self) -> tuple[str, ...]:
        return ((self.sealed,) if self.sealed else ()) + self.segments


@dataclass
class Ledger:
    """Reads and appends receipts of a corpus. Appended receipts are buffered until `flush`."""

    corpus: Store
    _buffer: dict[str, list[Receipt]] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    # --- reading ---

    def files(self) -> dict[str, PartitionFiles]:
        """The files of every partition, from one listing."""
        return self._list(FOLDER)

    def load(self, partition: str) -> Receipts:
        """The receipts of one partition, the latest of each (clip, stage)."""
        receipts: Receipts = {}
        files = self._files_of(partition)
        for path in files.live:
            for receipt in _decode(self.corpus.table(path, _REMEDY)):
                receipts.setdefault(receipt.clip_id, {})[receipt.stage] = receipt
        for receipt in self._buffer.get(partition, []):
            receipts.setdefault(receipt.clip_id, {})[receipt.stage] = receipt
        return receipts

    # --- writing ---

    def append(self, partition: str, receipts: Iterable[Receipt]) -> None:
        self._buffer.setdefault(partition, []).extend(receipts)

    def flush(self) -> None:
        """Publish what was appended, one segment a partition."""
        for partition, receipts in self._buffer.items():
            if receipts:
                number = self._next(partition)
                path = f"{FOLDER}/{partition}/segment-{number:08d}.parquet"
                self.corpus.write(path, _encode(receipts))
        self._buffer.clear()

    def seal(self, partition: str, receipts: Receipts, mark: str | None) -> None:
        """Replace what the ledger holds of a partition; set its completion mark, or clear it."""
        self._buffer.pop(partition, None)
        rows = [receipts[clip][stage] for clip in sorted(receipts) for stage in sorted(receipts[clip])]
        name = f"sealed-{self._next(partition):08d}-{mark or _OPEN}.parquet"
        self.corpus.write(f"{FOLDER}/{partition}/{name}", _encode(rows))
        for path in self._files_of(partition).superseded:
            self.corpus.remove(path)

    def _next(self, partition: str) -> int:
        if partition not in self._numbers:
            self._numbers[partition] = self._files_of(partition).number
        self._numbers[partition] += 1
        return self._numbers[partition]

    def _files_of(self, partition: str) -> PartitionFiles:
        return self._list(f"{FOLDER}/{partition}").get(partition, PartitionFiles())

    def _list(self, folder: str) -> dict[str, PartitionFiles]:
        found: dict[str, list[_File]] = {}
        for stat in self.corpus.list(folder):
            if match := _NAME.fullmatch(stat.path):
                file = _File(int(match["number"]), match["mark"], stat.path)
                found.setdefault(match["partition"], []).append(file)
        return {name: _choose(files) for name, files in sorted(found.items())}


class _File(NamedTuple):
    """mark: None for a segment."""

    number: int
    mark: str | None
    path: str


def _choose(files: list[_File]) -> PartitionFiles:
    sealed = max((f for f in files if f.mark is not None), default=None)
    floor = sealed.number if sealed else 0
    segments = tuple(f.path for f in sorted(files) if f.mark is None and f.number > floor)
    keep = {sealed.path, *segments} if sealed else set(segments)
    whole = sealed is not None and not segments and sealed.mark != _OPEN
    return PartitionFiles(
        sealed=sealed.path if sealed else None,
        mark=sealed.mark if sealed and whole else None,
        segments=segments,
        superseded=tuple(f.path for f in files if f.path not in keep),
        number=max(f.number for f in files),
    )


def _encode(receipts: list[Receipt]) -> bytes:
    columns = {
        "clip_id": [r.clip_id for r in receipts],
        "stage": [r.stage for r in receipts],
        "status": [str(r.status) for r in receipts],
        "reasons": [list(r.reasons) for r in receipts],
        "config": [r.config for r in receipts],
        "inputs": [r.inputs for r in receipts],
        "content": [r.content for r in receipts],
        "outputs": [[o.model_dump() for o in r.outputs] for r in receipts],
        "facts": [json.dumps(r.facts, sort_keys=True, allow_nan=False) for r in receipts],
        "attempts": [r.attempts for r in receipts],
        "seconds": [r.seconds for r in receipts],
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), sink, compression="zstd")
    return sink.getvalue()


def _decode(table: pa.Table) -> list[Receipt]:
    rows = table.to_pylist()
    return [
        # The ledger is our own and typed: building without validation keeps a partition's load under 0.1 s.
        Receipt.model_construct(
            **{
                **row,
                "status": Status(row["status"]),
                "reasons": tuple(row["reasons"]),
                "outputs": tuple(Artefact.model_construct(**o) for o in row["outputs"]),
                "facts": json.loads(row["facts"]),
            }
        )
        for row in rows
    ]

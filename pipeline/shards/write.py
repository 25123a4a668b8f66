"""Writes a partition's samples as tars, index and inventory, in that order, each complete or absent.

Source: DESIGN 2, rules 2, 8, 10; spec/faults.md S1, S2, S11.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.shards.check import check_tar
from pipeline.shards.inventory import (
    PARTITION_PATTERN,
    ROOT,
    FileEntry,
    Inventory,
    Root,
    file_entry,
    index_path,
    inventory_path,
    partition_names,
    read_inventory,
    root_hash,
    seal,
    unseal,
    whole,
)
from pipeline.shards.read import read_partition
from pipeline.shards.tar import END, Place, ShardError, TarWriter, header, padding, tar_path, tar_pattern
from pipeline.store import Store, StoreError
from schemas.clip import ID_PATTERN
from schemas.sample import FAMILIES, OPTIONAL, UNSELECTED, index_schema

ALWAYS = tuple(family for family in FAMILIES if family not in OPTIONAL)
"""Families that every partition has."""
_TARGET = 1 << 30
_FACTS = tuple(n for n in index_schema().names if n not in ("sample_id", *UNSELECTED, *FAMILIES))


class ShardConfig(BaseModel):
    """How large tars grow. A sample is never split, so a tar passes the target only to hold its one sample;
    the last tar of a partition is whatever remains.

    1 GiB: some 100 clips of 60 s at 480p in a media tar, a few seconds of reading at 500 MB/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    target_bytes: dict[str, int] = Field(
        default=dict.fromkeys(FAMILIES, _TARGET),
        description="size at which the next tar of a family starts; 1 GiB where a family is not named",
    )

    @field_validator("target_bytes")
    @classmethod
    def _every_family(cls, value: dict[str, int]) -> dict[str, int]:
        if not set(value) <= set(FAMILIES) or min(value.values(), default=1) <= 0:
            raise ValueError(f"target_bytes takes positive sizes of {', '.join(FAMILIES)}")
        return dict.fromkeys(FAMILIES, _TARGET) | value


@dataclass(frozen=True)
class Sample:
    """One sample to write.

    facts: the index columns, without sample_id, tiers and places.
    members: content by suffix, for every suffix of every family of the partition (a kept one's may be
        absent): bytes, or a local file that is streamed and must stay until the writer asks for the next
        sample (a generator may hold it open that long).
    """

    sample_id: str
    facts: Mapping[str, Any]
    members: Mapping[str, bytes | Path]


def write_partition(
    corpus: Store,
    partition: str,
    samples: Iterable[Sample],
    config: ShardConfig,
    keep: Collection[str] = (),
    families: Sequence[str] = ALWAYS,
) -> Inventory:
    """Write the samples, which come sorted by id, and publish them; the same samples give the same bytes.

    A tar is written under a temporary name, flushed, read back and compared member by member, then renamed.
    The index follows, the inventory last. An older inventory of the partition is withdrawn before anything
    that it describes changes, and tars that the new one does not name are removed at the end.
    keep: families whose published tars stay as they are, unread: their entries and places are carried over.
        The caller knows that nothing in them would change.
    families: those that the partition has from now on; tars of others are removed.
    Raises StoreError when a family is to be kept and the published partition is not whole.
    Raises ShardError, with nothing published under a new inventory, on an illegal, repeated or unsorted id,
    on missing or unknown members or facts, on content that disagrees with schemas.sample, and on other
    samples than those of a kept family.
    Source: DESIGN rules 2, 10; spec/faults.md S1, S2, S11.
    """
    if not PARTITION_PATTERN.fullmatch(partition) or partition == "root":
        raise ShardError(f"partition {partition!r} must match {PARTITION_PATTERN.pattern} and not be root")
    publisher = _Publisher(corpus, partition)
    kept = _kept(corpus, partition, keep)
    written = {f: kept.get(f) or _Tars(publisher, f, config.target_bytes[f]) for f in families}
    known = {s for family in families for s in FAMILIES[family]}
    wanted = {s for family in families if family not in kept for s in FAMILIES[family]}
    rows: list[dict[str, Any]] = []
    try:
        for sample in samples:
            _check(sample, rows[-1]["sample_id"] if rows else "", wanted, known)
            row = {"sample_id": sample.sample_id, **sample.facts, **UNSELECTED}
            rows.append(row)
            for family, tars in written.items():
                row[family] = tars.add(sample, row)
        for tars in written.values():
            tars.close()
    finally:
        for tars in written.values():
            tars.discard()
    entries = tuple(entry for tars in written.values() for entry in tars.entries)
    index = publisher.index(index_bytes(pa.Table.from_pylist(rows, schema=index_schema())))
    inventory = Inventory(
        partition=partition, samples=len(rows), tars=entries, index=index, bare=index.sha256
    )
    corpus.write(inventory_path(partition), seal(inventory))
    _remove_stale(corpus, inventory)
    return inventory


def write_root(corpus: Store) -> Root:
    """Publish index/root.json over every inventory, catalogue/, statistics/ and corpus.json.

    Raises StoreError when an inventory is damaged or corpus.json is missing. Source: DESIGN rule 2.
    """
    samples = 0
    paths = [inventory_path(p) for p in partition_names([s.path for s in corpus.list("index")], ".json")]
    for path in paths:
        samples += unseal(corpus.read(path), Inventory, path).samples
    paths += [s.path for folder in ("catalogue", "statistics") for s in corpus.list(folder)]
    files = tuple(file_entry(corpus, path) for path in sorted([*paths, "corpus.json"]))
    root = Root(samples=samples, files=files, root=root_hash(files))
    corpus.write(ROOT, seal(root))
    return root


class _Publisher:
    """Publishes the files of one partition and keeps its older inventory true meanwhile."""

    def __init__(self, corpus: Store, partition: str) -> None:
        self.corpus = corpus
        self.partition = partition
        path = inventory_path(partition)
        self._inventory_exists = corpus.exists(path)
        self._described: tuple[FileEntry, ...] = ()
        if self._inventory_exists:
            try:
                self._described = unseal(corpus.read(path), Inventory, path).files
            except StoreError:  # damaged: it describes nothing, and the first file published withdraws it
                self._described = ()

    def publish(self, temporary: Path, entry: FileEntry) -> None:
        if self._inventory_exists and entry not in self._described:
            self.corpus.remove(inventory_path(self.partition))
            self._inventory_exists = False
        self.corpus.publish(temporary, entry.path)

    def index(self, data: bytes) -> FileEntry:
        entry = FileEntry(
            path=index_path(self.partition), bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
        )
        temporary = self.corpus.scratch(entry.path)
        try:
            temporary.write_bytes(data)
            self.publish(temporary, entry)
        finally:
            temporary.unlink(missing_ok=True)
        return entry


@dataclass(frozen=True)
class _Open:
    """A tar that is being written: its name to be, the temporary, and the index rows of its samples."""

    path: str
    temporary: Path
    file: BinaryIO
    tar: TarWriter
    rows: list[dict[str, Any]]


class _Tars:
    """The tars of one family: those published, and the one that is being written."""

    def __init__(self, publisher: _Publisher, family: str, target: int) -> None:
        self.entries: list[FileEntry] = []
        self._publisher = publisher
        self._family = family
        self._target = target
        self._open: _Open | None = None

    def add(self, sample: Sample, row: dict[str, Any]) -> Place:
        """Append a sample's members of this family, in a new tar where the target would be passed."""
        contents = {f"{sample.sample_id}.{s}": sample.members[s] for s in FAMILIES[self._family]}
        if self._open and self._open.tar.size + _tar_bytes(contents) + len(END) > self._target:
            self.close()
        if self._open is None:
            self._open = self._begin()
        current = self._open
        start = current.tar.size
        members = [current.tar.add(name, content) for name, content in contents.items()]
        current.rows.append(row)
        return Place(tar=current.path, offset=start, size=current.tar.size - start, members=members)

    def close(self) -> None:
        """Finish the open tar, read it back, and publish it."""
        if self._open is None:
            return
        current = self._open
        digest = current.tar.finish()
        os.fsync(current.file.fileno())
        current.file.close()
        entry = FileEntry(path=current.path, bytes=current.tar.size, sha256=digest)
        with current.temporary.open("rb") as f:
            seen, findings = check_tar(f, current.path, self._family, current.rows)
        if findings:
            raise ShardError(f"{findings[0].member or current.path}: {findings[0].problem}; make it again")
        if seen != entry:
            raise ShardError(f"{current.path} does not read back as written; check the disk, then run again")
        self._publisher.publish(current.temporary, entry)
        self.entries.append(entry)
        self._open = None

    def discard(self) -> None:
        """Remove what is being written. Does nothing after `close`."""
        if self._open is not None:
            self._open.file.close()
            self._open.temporary.unlink(missing_ok=True)

    def _begin(self) -> _Open:
        path = tar_path(self._family, self._publisher.partition, len(self.entries))
        temporary = self._publisher.corpus.scratch(path)
        file = temporary.open("wb")
        return _Open(path, temporary, file, TarWriter(file), [])


class _Kept:
    """A family whose published tars stay, with the face of `_Tars`: gives each sample its old place."""

    def __init__(self, entries: list[FileEntry], rows: list[dict[str, Any]], family: str) -> None:
        self.entries = entries
        self._family = family
        self._places = ((row["sample_id"], row[family]) for row in rows)

    def add(self, sample: Sample, row: dict[str, Any]) -> Place:
        name, place = next(self._places, ("", None))
        if place is None or name != sample.sample_id:
            self._differs(name or "no more", sample.sample_id)
        return cast(Place, place)

    def close(self) -> None:
        name, _ = next(self._places, ("", None))
        if name:
            self._differs(name, "no more")

    def discard(self) -> None:
        """Nothing is being written."""

    def _differs(self, held: str, got: str) -> NoReturn:
        raise ShardError(
            f"the kept {self._family} tars hold sample {held} where sample {got} comes; write every family"
        )


def _kept(corpus: Store, partition: str, keep: Collection[str]) -> dict[str, _Kept]:
    if not keep:
        return {}
    if not whole(corpus, partition):
        raise StoreError(
            f"partition {partition} is not whole, so none of its tars can be kept; write it anew"
        )
    inventory = read_inventory(corpus, partition)
    rows = read_partition(corpus, inventory).to_pylist()
    tars = {f: [e for e in inventory.tars if e.path.startswith(f"shards/{f}/")] for f in keep}
    return {family: _Kept(entries, rows, family) for family, entries in tars.items()}


def _tar_bytes(contents: Mapping[str, bytes | Path]) -> int:
    total = 0
    for name, content in contents.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        total += len(header(name, size)) + size + padding(size)
    return total


def _check(sample: Sample, last: str, wanted: Collection[str], known: Collection[str]) -> None:
    name = sample.sample_id
    if not ID_PATTERN.fullmatch(name):
        raise ShardError(f"sample id {name!r} must match {ID_PATTERN.pattern}: a dot would end the key early")
    if name <= last:
        raise ShardError(f"sample {name} comes after {last}: give samples sorted by id, each once")
    for what, want, may, got in (
        ("member", set(wanted), set(known), set(sample.members)),
        ("fact", set(_FACTS), set(_FACTS), set(sample.facts)),
    ):
        if missing := sorted(want - got):
            raise ShardError(f"sample {name} lacks the {what} {', '.join(missing)}")
        if unknown := sorted(got - may):
            raise ShardError(f"sample {name} has the unknown {what} {', '.join(unknown)}")


def index_bytes(table: pa.Table) -> bytes:
    """Parquet of an index, every choice that could change its bytes stated."""
    out = io.BytesIO()
    pq.write_table(table, out, version="2.6", compression="zstd", compression_level=3, row_group_size=1 << 20)
    return out.getvalue()


def _remove_stale(corpus: Store, inventory: Inventory) -> None:
    """Remove tars that an earlier, longer write of the same partition left."""
    named = {entry.path for entry in inventory.tars}
    own = tar_pattern(inventory.partition)
    for family in FAMILIES:
        for stat in corpus.list(f"shards/{family}"):
            if own.fullmatch(stat.path) and stat.path not in named:
                corpus.remove(stat.path)

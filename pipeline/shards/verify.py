"""Checks a whole corpus: root -> inventories -> files -> members -> content. Reports, changes nothing.

Source: DESIGN rule 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.shards.check import Finding, check_rows, check_tar, diagnose
from pipeline.shards.inventory import (
    ROOT,
    FileEntry,
    Inventory,
    Root,
    file_entry,
    index_path,
    inventory_path,
    partition_names,
    root_hash,
    unseal,
)
from pipeline.store import Store, StoreError
from schemas.sample import FAMILIES, index_schema

Progress = Callable[[int, int], None]
"""Called after each file with the bytes read so far and the bytes to read."""

_FOLDERS = ("shards", "index", "catalogue", "statistics")


def verify(corpus: Store, progress: Progress | None = None) -> list[Finding]:
    """Everything that is wrong with the published files of a corpus; [] for a clean one.

    Covers shards/, index/, catalogue/, statistics/ and corpus.json; ledger/ and work/ are not published.
    Every file is read once, in chunks; memory grows with one partition's rows and with the sample ids.
    Source: DESIGN rule 2; spec/faults.md S1, S2, S11.
    """
    check = _Verify(corpus, progress)
    check.run()
    return check.findings


class _Verify:
    """One pass over a corpus: what was found, which files are accounted for, and whose digest is whose."""

    def __init__(self, corpus: Store, progress: Progress | None) -> None:
        self.findings: list[Finding] = []
        self._corpus = corpus
        self._progress = progress
        self._sizes = {stat.path: stat.size for folder in _FOLDERS for stat in corpus.list(folder)}
        if corpus.exists("corpus.json"):
            self._sizes["corpus.json"] = len(corpus.read("corpus.json"))
        self._accounted = {ROOT}
        self._owner: dict[str, str] = {}  # sha256 -> the file that should have it
        self._ids: list[pa.Array] = []
        self._read_bytes = 0

    def run(self) -> None:
        root = self._root()
        names = set(partition_names([*self._sizes, *(e.path for e in root)], ".json"))
        names |= set(partition_names(list(self._sizes), ".parquet"))
        inventories = {name: self._inventory(name) for name in sorted(names)}
        self._owner |= {e.sha256: e.path for e in root}
        self._owner |= {e.sha256: e.path for i in inventories.values() if i for e in i.files}
        for entry in root:
            self._file(entry)
        for name, inventory in inventories.items():
            path = inventory_path(name)
            if root and inventory is not None and path not in {e.path for e in root}:
                self._add(path, "", "the root does not name it; write the root again")
            self._accounted.add(path)
            self._partition(name, inventory)
        self._repeated_ids()
        for path in sorted(set(self._sizes) - self._accounted):
            self._add(path, "", "it is extra: neither the root nor an inventory names it")

    def _add(self, path: str, member: str, problem: str) -> None:
        self.findings.append(Finding(path, member, problem))

    def _done(self, path: str) -> None:
        self._read_bytes += self._sizes[path]
        if self._progress is not None:
            self._progress(self._read_bytes, sum(self._sizes.values()))

    def _missing(self, path: str) -> bool:
        self._accounted.add(path)
        if path not in self._sizes:
            self._add(path, "", "it is missing")
        return path not in self._sizes

    def _differs(self, seen: FileEntry, want: FileEntry) -> str:
        """How a file differs from its entry; "" when it does not."""
        if seen.sha256 == want.sha256:
            return ""
        if seen.sha256 in self._owner:
            return f"it holds the content of {self._owner[seen.sha256]}"
        if seen.bytes != want.bytes:
            return f"it is changed: {seen.bytes} bytes, {want.bytes} were written"
        return "it is changed (its sha256 differs)"

    # --- root and inventories ---

    def _root(self) -> tuple[FileEntry, ...]:
        """Entries of the root; none when it is gone, and then what stands beside the shards is unknown."""
        if self._missing(ROOT):
            self._accept_unnamed()
            return ()
        try:
            root = unseal(self._corpus.read(ROOT), Root, ROOT)
        except StoreError as error:
            self._add(ROOT, "", str(error))
            self._accept_unnamed()
            return ()
        if root.root != root_hash(root.files):
            self._add(ROOT, "", "its root hash is not that of its files")
        return root.files

    def _accept_unnamed(self) -> None:
        self._add(ROOT, "", "without it catalogue/, statistics/ and corpus.json were not checked")
        self._accounted |= {p for p in self._sizes if not p.startswith(("shards/", "index/"))}

    def _inventory(self, name: str) -> Inventory | None:
        path = inventory_path(name)
        if self._missing(path):
            return None
        try:
            inventory = unseal(self._corpus.read(path), Inventory, path)
        except StoreError as error:
            self._add(path, "", str(error))
            return None
        if inventory.partition != name:
            self._add(path, "", f"it holds the inventory of {inventory.partition}")
            return None
        return inventory

    def _file(self, entry: FileEntry) -> None:
        """A file that the root names. A damaged inventory has been reported by `_inventory`."""
        if any(f.path == entry.path for f in self.findings) or self._missing(entry.path):
            return
        if problem := self._differs(file_entry(self._corpus, entry.path), entry):
            self._add(entry.path, "", problem)
        self._done(entry.path)

    # --- partitions ---

    def _partition(self, name: str, inventory: Inventory | None) -> None:
        rows = self._rows(name, inventory)
        if inventory is not None:
            entries = {entry.path: entry for entry in inventory.tars}
            paths = list(entries)
        else:  # its loss is reported; the index still says what the tars hold
            entries = {}
            places = [row[f] for f in FAMILIES for row in rows]
            paths = list(dict.fromkeys(place["tar"] for place in places if place is not None))
        tars = {f: [p for p in paths if p.startswith(f"shards/{f}/")] for f in FAMILIES}
        if rows and (problems := check_rows(rows, tars)):
            for problem in problems:
                self._add(index_path(name), "", problem)
            rows = []
        for family in FAMILIES:
            for path in tars[family]:
                own = [row for row in rows if row[family] and row[family]["tar"] == path]
                self._tar(path, family, own, entries.get(path))

    def _rows(self, name: str, inventory: Inventory | None) -> list[dict[str, Any]]:
        """Rows of a partition's index; none when it is not what it should be."""
        path = index_path(name)
        if self._missing(path):
            return []
        data = self._corpus.read(path)
        self._done(path)
        seen = FileEntry(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        if inventory is not None and (problem := self._differs(seen, inventory.index)):
            self._add(path, "", problem)
            return []
        try:
            table = pq.read_table(pa.BufferReader(data))
        except (pa.ArrowException, OSError) as error:
            self._add(path, "", f"it is not Parquet ({' '.join(str(error).split())[:100]})")
            return []
        want = index_schema()
        if not table.schema.equals(want) or table.schema.metadata != want.metadata:
            self._add(path, "", "its columns are not those of schemas.sample.index_schema()")
            return []
        if inventory is not None and inventory.samples != len(table):
            self._add(path, "", f"it has {len(table)} rows, the inventory says {inventory.samples}")
        self._ids += table["sample_id"].chunks
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows

    def _tar(self, path: str, family: str, rows: Sequence[Mapping[str, Any]], want: FileEntry | None) -> None:
        if self._missing(path):
            return
        if not rows:  # the index cannot be trusted: the file as a whole is all that can be checked
            if want is not None and (problem := self._differs(file_entry(self._corpus, path), want)):
                self._add(path, "", problem)
            self._done(path)
            return
        with self._corpus.open(path) as f:
            seen, findings = check_tar(f, path, family, rows)
            problem = self._differs(seen, want) if want is not None else ""
            if problem.startswith("it holds"):
                findings = []
            elif findings:
                members = [m for row in rows for m in row[family]["members"]]
                findings = diagnose(f, path, members, findings)
            if problem and not findings:
                findings = [Finding(path, "", problem)]
        self.findings += findings
        self._done(path)

    def _repeated_ids(self) -> None:
        if not self._ids:
            return
        counts = pc.value_counts(pa.chunked_array(self._ids))
        for count in counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist():
            self._add("index", "", f"sample {count['values']} is in {count['counts']} partitions")

"""From what lies in a source to catalogue rows: the digests, and a cache so that no video is read twice.

The cache (`ledger/scan.parquet`) is keyed by what a listing shows: path, size and version of a video and of
its sidecars, and the key map entry that reads them. It is bookkeeping and never published. Everything that
grows with the corpus is an Arrow table here: 710,000 Python records would not fit the driver's 2 GB.
Source: DESIGN rules 8, 10.
"""

from __future__ import annotations

import hashlib
import io
import time
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.catalogue import DESCRIPTION
from pipeline.sources.found import Discovery, Found, sidecars_of
from pipeline.sources.keymap import KeyMap
from pipeline.stage import digest
from pipeline.store import Store
from schemas.clip import Clip

PATH = "ledger/scan.parquet"
SAVE_S = 30.0
ID_HEX = 16
_CHUNK = 1 << 20
_SCHEMA = pa.schema([("key", pa.string()), *DESCRIPTION])


def cache_keys(source: str, listing: Discovery) -> list[str]:
    """A key for each recording of a listing, in its order: equal keys mean equal bytes and equal reading.
    source: "kind:url"; paths of two sources may be equal."""
    entries = [digest(entry) for entry in listing.key_map.games]
    keys = []
    for found in listing.found:
        entry = entries[found.entry] if found.entry >= 0 else "none"
        beside = [listing.sidecars.get(path) for path in (found.log, found.poses, found.events)]
        seen = [f"{s.path}:{s.size}:{s.version}" if s else "-" for s in beside]
        about = (source, found.path, str(found.size), found.version, found.licence, entry)
        text = "\x1f".join((*about, *seen))
        keys.append(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=12).hexdigest())
    return keys


Row = dict[str, object]


def scan(source: Store, key_map: KeyMap, batch: list[Found]) -> list[Row | str]:
    """Task: a catalogue row of each recording, by reading it once; or, in one line, why it cannot be read."""
    return [_scan_one(source, key_map, found) for found in batch]


def _scan_one(source: Store, key_map: KeyMap, found: Found) -> Row | str:
    try:
        return _clip(source, key_map, found).model_dump(mode="json")
    except OSError as error:
        return f"{found.path}: {error.strerror or error}"


def _clip(source: Store, key_map: KeyMap, found: Found) -> Clip:
    sha, size = hashlib.sha256(), 0
    with source.open(found.path) as f:
        while block := f.read(_CHUNK):
            sha.update(block)
            size += len(block)
    identity = sha.hexdigest()[:ID_HEX]
    return Clip(
        clip_id=identity,
        recording_id=_recording_id(found) or identity,
        source_path=found.path,
        bytes=size,
        sha256=sha.hexdigest(),
        game=found.game,
        perspective=found.perspective,
        licence=found.licence,
        **sidecars_of(found, source, key_map),
    )


def _recording_id(found: Found) -> str:
    """Cuts of one recording share it, so that they fall into one split; "" for a recording of its own."""
    return (
        hashlib.sha256(f"recording:{found.recording}".encode()).hexdigest()[:ID_HEX]
        if found.recording
        else ""
    )


@dataclass
class ScanCache:
    """Catalogue rows by cache key, kept in the corpus."""

    corpus: Store
    table: pa.Table
    _new: list[Row] = field(default_factory=list)
    _saved: float = field(default_factory=time.monotonic)

    @staticmethod
    def load(corpus: Store) -> ScanCache:
        if not corpus.exists(PATH):
            return ScanCache(corpus, _SCHEMA.empty_table())
        remedy = "delete it and run `wp2 curate` again, which reads the source anew"
        return ScanCache(corpus, corpus.table(PATH, remedy, schema=_SCHEMA))

    def missing(self, keys: list[str]) -> list[int]:
        """Positions of the keys that the cache does not hold."""
        held = pc.is_in(pa.array(keys, pa.string()), value_set=self.table.column("key"))
        return [int(i) for i in np.flatnonzero(~held.to_numpy(zero_copy_only=False))]

    def add(self, keys: list[str], rows: list[Row | str]) -> list[str]:
        """Take the answers of a `scan`, in the order of its keys; returns those that are no rows."""
        for key, row in zip(keys, rows, strict=True):
            if not isinstance(row, str):
                self._new.append({"key": key, **row})
        if time.monotonic() - self._saved > SAVE_S:
            self.save()
        return [row for row in rows if isinstance(row, str)]

    def save(self) -> None:
        if not self._new:
            return
        self.table = pa.concat_tables([self.table, pa.Table.from_pylist(self._new, schema=_SCHEMA)])
        self._new.clear()
        sink = io.BytesIO()
        pq.write_table(self.table, sink, compression="zstd")
        self.corpus.write(PATH, sink.getvalue())
        self._saved = time.monotonic()

    def describe(self, source: str, keys: list[str]) -> pa.Table:
        """One row per content (the catalogue's `DESCRIPTION`), that of the first path in order that the key
        map knows, else of the first; the other paths with the same bytes stand in `also_at`."""
        db = duckdb.connect()
        db.register("cache", self.table)
        db.register("wanted", pa.table({"key": pa.array(keys, pa.string())}))
        others = [n for n in DESCRIPTION.names if n not in ("source", "also_at")]
        db.sql(f"create temp table held as select {', '.join(others)} from wanted join cache using (key)")
        # Copies are rare: their paths are gathered apart, and every other row passes as it is. Of copies, one
        # that the key map knows goes before one that it does not.
        db.sql("""create temp table copies as
                  select clip_id, list(source_path order by game = '', source_path) as paths
                  from held group by clip_id having count(*) > 1""")
        columns = {n: n for n in DESCRIPTION.names} | {
            "source": "$source as source",
            "also_at": "coalesce(paths[2:], []::varchar[]) as also_at",
        }
        chosen = ", ".join(columns.values())
        query = f"""select {chosen} from held left join copies using (clip_id)
                    where paths is null or source_path = paths[1]"""
        return db.sql(query, params={"source": source}).to_arrow_table().cast(DESCRIPTION)

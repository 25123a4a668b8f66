"""The catalogue: which clips a corpus holds, in generations whose membership never changes.

A generation is the set of clips that one run found new, sorted by id and cut into partitions. What a row says
of its source (path, game, sidecar digests) follows the source on later runs; clip ids, partitions and splits
do not. Source: DESIGN rules 8, 10.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.store import Store, StoreError
from schemas import SCHEMA_VERSION
from schemas.clip import Clip, ClipKind, Perspective, Sidecar

FOLDER = "catalogue"
_PARTS = b"partitions"

_SIDECAR = pa.struct([("path", pa.string()), ("digest", pa.string())])
DESCRIPTION = pa.schema(
    [
        ("clip_id", pa.string()),
        ("recording_id", pa.string()),
        ("source", pa.string()),
        ("source_path", pa.string()),
        ("also_at", pa.list_(pa.string())),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("kind", pa.string()),
        ("game", pa.string()),
        ("perspective", pa.string()),
        ("licence", pa.string()),
        ("log", _SIDECAR),
        ("poses", _SIDECAR),
        ("events", _SIDECAR),
        ("signals", _SIDECAR),
    ]
)
"""What a source says of a clip: the fields of `schemas.clip.Clip`."""

SCHEMA = pa.schema(
    [("partition", pa.string()), ("split", pa.string()), *DESCRIPTION],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""A row of the catalogue: fixed place and split, and the description."""


@dataclass(frozen=True, slots=True)
class Part:
    """A partition: how many clips it has, and the digest of their rows."""

    rows: int
    digest: str


@dataclass(frozen=True)
class Catalogue:
    """Every clip of a corpus. parts: partitions in order, from the footers of the generation files alone.

    A generation file has one row group a partition, sorted by clip id, so a partition is read by itself.
    """

    corpus: Store
    parts: dict[str, Part]

    @staticmethod
    def load(corpus: Store) -> Catalogue:
        parts: dict[str, Part] = {}
        for stat in corpus.list(FOLDER):
            with corpus.open(stat.path) as f, _readable(stat.path, corpus):
                held = json.loads((pq.read_schema(f).metadata or {})[_PARTS])
            parts |= {name: Part(rows, value) for name, (rows, value) in held.items()}
        return Catalogue(corpus, parts)

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts.values())

    def read(self, partition: str) -> pa.Table:
        """Rows of one partition (`SCHEMA`)."""
        generation, number = int(partition[1:5]), int(partition[7:])
        path = _path(generation)
        with self.corpus.open(path) as f, _readable(path, self.corpus):
            return pq.ParquetFile(f).read_row_group(number)

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """Rows of every partition; all columns of `SCHEMA`, or some."""
        paths = sorted({_path(int(name[1:5])) for name in self.parts})
        tables = [self.corpus.table(p, _REMEDY, columns=columns) for p in paths]
        return pa.concat_tables(tables) if tables else SCHEMA.empty_table().select(columns or SCHEMA.names)

    def games(self, having: str = "", without: str = "") -> set[str]:
        """Games with clips that have one kind of sidecar, or lack it; clips of no game do not count."""
        sidecar = having or without
        table = self.table(["game", sidecar])
        there = pc.is_valid(table.column(sidecar))
        chosen = table.filter(there if having else pc.invert(there))
        return set(chosen.column("game").to_pylist()) - {""}

    def sources(self) -> dict[str, int]:
        """Clips by source ("kind:url")."""
        counts = self.table(["source"]).column("source").value_counts().to_pylist()
        return {c["values"]: c["counts"] for c in counts}

    def update(
        self, found: pa.Table, partition_size: int, val_share: float, leave: Collection[str] = ()
    ) -> Catalogue:
        """Bring the descriptions of known clips to what the source says now, and publish clips that are new
        as the next generation. What does not change is not written.

        found: `DESCRIPTION` rows, one per clip. leave: sources whose clips keep their description.
        """
        db = duckdb.connect()
        db.register("known", self.table())
        db.register("listed", found)
        db.register("others", pa.table({"source": pa.array(sorted(leave), pa.string())}))
        db.sql("create temp view kept as select clip_id from known semi join others using (source)")
        db.sql("create temp view found as select * from listed anti join kept using (clip_id)")
        about = f"clip_id, hash(({', '.join(DESCRIPTION.names)}))"
        news = db.sql(f"select clip_id from (select {about} from found except select {about} from known)")
        if not news.limit(1).fetchall():
            return self
        fields = ", ".join(f"if(f.clip_id is null, k.{n}, f.{n}) as {n}" for n in DESCRIPTION.names)
        parts = dict(self.parts)
        for (generation,) in db.sql("select distinct partition[2:5] from known order by 1").fetchall():
            rows = db.sql(
                f"select k.partition, k.split, {fields} from known k left join found f using (clip_id) "
                f"where k.partition[2:5] = '{generation}' order by k.partition, clip_id"
            ).to_arrow_table()
            if any(parts[name] != part for name, part in _digests(rows).items()):
                parts |= _publish(self.corpus, int(generation), rows)
        names = ", ".join(DESCRIPTION.names)
        new = db.sql(f"select {names} from found anti join known using (clip_id) order by clip_id")
        return Catalogue(self.corpus, parts)._grown(new.to_arrow_table(), partition_size, val_share)

    def _grown(self, new: pa.Table, size: int, val_share: float) -> Catalogue:
        if new.num_rows == 0:
            return self
        generation = max((int(name[1:5]) for name in self.parts), default=-1) + 1
        partition = [f"g{generation:04d}-p{i // size:05d}" for i in range(new.num_rows)]
        split = [split_of(r, val_share) for r in new.column("recording_id").to_pylist()]
        rows = new.add_column(0, "split", pa.array(split)).add_column(0, "partition", pa.array(partition))
        return Catalogue(self.corpus, self.parts | _publish(self.corpus, generation, rows))


_REMEDY = "restore it from another copy of the corpus"


@contextlib.contextmanager
def _readable(path: str, corpus: Store) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, KeyError, OSError):
        raise StoreError(f"{path} of {corpus.url} is damaged: {_REMEDY}") from None


def _path(generation: int) -> str:
    return f"{FOLDER}/g{generation:04d}.parquet"


def _publish(corpus: Store, generation: int, table: pa.Table) -> dict[str, Part]:
    """Write a generation, one row group a partition. table: sorted by partition and clip id."""
    parts = _digests(table)
    held = json.dumps({name: (part.rows, part.digest) for name, part in parts.items()})
    schema = SCHEMA.with_metadata({**(SCHEMA.metadata or {}), _PARTS: held.encode()})
    rows = table.cast(SCHEMA)
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        start = 0
        for part in parts.values():
            writer.write_table(rows.slice(start, part.rows).cast(schema), row_group_size=part.rows)
            start += part.rows
    corpus.write(_path(generation), sink.getvalue())
    return parts


def _digests(table: pa.Table) -> dict[str, Part]:
    """Partitions of a table in order; a digest is of the rows, whatever their chunking in memory."""
    db = duckdb.connect()
    db.register("rows", table)
    row = "concat_ws(chr(31), " + ", ".join(f"coalesce({n}::varchar, '')" for n in SCHEMA.names) + ")"
    digest = f"sha256(string_agg({row}, chr(30) order by clip_id))[:16]"
    found = db.sql(f"select partition, count(*), {digest} from rows group by partition order by partition")
    return {name: Part(rows, value) for name, rows, value in found.fetchall()}


def to_clips(table: pa.Table) -> Iterator[tuple[Clip, str]]:
    """(clip, split) of each row. Rows were validated when they were published."""
    for row in table.to_pylist():
        del row["partition"]
        split = row.pop("split")
        for name in ("log", "poses", "events", "signals"):
            row[name] = row[name] and Sidecar.model_construct(**row[name])
        row["perspective"] = Perspective(row["perspective"])
        row["kind"] = ClipKind(row["kind"])
        row["also_at"] = tuple(row["also_at"])
        yield Clip.model_construct(**row), split


def split_of(recording_id: str, val_share: float) -> str:
    """train or val, by recording, from its id alone: growth never moves a recording to the other side."""
    place = int(hashlib.sha256(f"split:{recording_id}".encode()).hexdigest()[:8], 16) / 2**32
    return "val" if place < val_share else "train"

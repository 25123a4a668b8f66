"""The catalogue: which clips a corpus holds, in generations whose membership never changes.

A generation is the set of clips that one run found new, sorted by id and cut into partitions. What a row says
of its source (path, game, sidecar digests) follows the source on later runs; clip ids, partitions and splits
do not. Source: DESIGN rules 8, 10.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.store import Store
from schemas import SCHEMA_VERSION
from schemas.clip import Clip, Perspective, Sidecar

FOLDER = "catalogue"

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
        ("game", pa.string()),
        ("perspective", pa.string()),
        ("licence", pa.string()),
        ("log", _SIDECAR),
        ("poses", _SIDECAR),
        ("events", _SIDECAR),
    ]
)
"""What a source says of a clip: the fields of `schemas.clip.Clip`."""

SCHEMA = pa.schema(
    [("partition", pa.string()), ("split", pa.string()), *DESCRIPTION],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""A row of the catalogue: fixed place and split, and the description."""


@dataclass(frozen=True)
class Catalogue:
    """Every clip of a corpus, sorted by partition and id. `table` has `SCHEMA`."""

    table: pa.Table

    @staticmethod
    def load(corpus: Store) -> Catalogue:
        paths = [s.path for s in corpus.list(FOLDER) if s.path.endswith(".parquet")]
        tables = [pq.read_table(io.BytesIO(corpus.read(p)), schema=SCHEMA) for p in paths]
        return Catalogue(pa.concat_tables(tables) if tables else SCHEMA.empty_table())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def partitions(self) -> dict[str, pa.Table]:
        """Rows of each partition, in order, without copying."""
        column = self.table.column("partition").combine_chunks()
        if len(column) == 0:
            return {}
        runs = pc.run_end_encode(column)
        out, start = {}, 0
        for stop, name in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            out[name] = self.table.slice(start, stop - start)
            start = stop
        return out

    def digests(self) -> dict[str, str]:
        """Digest of the rows of each partition, whatever their chunking in memory."""
        db = duckdb.connect()
        db.register("known", self.table)
        row = "concat_ws(chr(31), " + ", ".join(f"coalesce({n}::varchar, '')" for n in SCHEMA.names) + ")"
        query = (
            f"select partition, sha256(string_agg({row}, chr(30) order by clip_id)) from known group by all"
        )
        return {name: value[:16] for name, value in db.sql(query).fetchall()}

    def update(self, corpus: Store, found: pa.Table, partition_size: int, val_share: float) -> Catalogue:
        """Bring the descriptions of known clips to what the source says now, and publish clips that are new
        as the next generation. found: `DESCRIPTION` rows, one per clip, sorted by id. Generations that do not
        change are not written."""
        db = duckdb.connect()
        db.register("known", self.table)
        db.register("found", found)
        fields = ", ".join(f"if(f.clip_id is null, k.{n}, f.{n}) as {n}" for n in DESCRIPTION.names)
        joined = "from known k left join found f using (clip_id)"
        names = ", ".join(DESCRIPTION.names)
        query = f"select k.partition, k.split, {fields} {joined} order by k.partition, clip_id"
        now = db.sql(query).to_arrow_table().cast(SCHEMA)
        db.register("now", now)
        rows = f"select partition, {names} from"
        changed = f"select distinct partition[2:5] from ({rows} now except {rows} known)"
        for (generation,) in db.sql(changed).fetchall():
            table = now.filter(pc.starts_with(now.column("partition"), f"g{generation}-"))
            _publish(corpus, int(generation), table)
        new = db.sql(f"select {names} from found anti join known using (clip_id) order by clip_id")
        return Catalogue(now).add_generation(
            corpus, new.to_arrow_table().cast(DESCRIPTION), partition_size, val_share
        )

    def add_generation(self, corpus: Store, new: pa.Table, size: int, val_share: float) -> Catalogue:
        """Publish clips as the next generation, cut into partitions of `size`. new: `DESCRIPTION` rows,
        sorted by clip id; none of them leaves the catalogue as it is."""
        if new.num_rows == 0:
            return self
        last = pc.max(self.table.column("partition")).as_py()
        generation = int(last[1:5]) + 1 if last else 0
        partition = [f"g{generation:04d}-p{i // size:05d}" for i in range(new.num_rows)]
        split = [split_of(r, val_share) for r in new.column("recording_id").to_pylist()]
        rows = new.add_column(0, "split", pa.array(split)).add_column(0, "partition", pa.array(partition))
        _publish(corpus, generation, rows.cast(SCHEMA))
        return Catalogue(pa.concat_tables([self.table, rows.cast(SCHEMA)]))


def _publish(corpus: Store, generation: int, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    corpus.write(f"{FOLDER}/g{generation:04d}.parquet", sink.getvalue())


def to_clips(table: pa.Table) -> Iterator[tuple[Clip, str]]:
    """(clip, split) of each row. Rows were validated when they were published."""
    for row in table.to_pylist():
        del row["partition"]
        split = row.pop("split")
        for name in ("log", "poses", "events"):
            row[name] = row[name] and Sidecar.model_construct(**row[name])
        row["perspective"] = Perspective(row["perspective"])
        row["also_at"] = tuple(row["also_at"])
        yield Clip.model_construct(**row), split


def split_of(recording_id: str, val_share: float) -> str:
    """train or val, by recording, from its id alone: growth never moves a recording to the other side."""
    place = int(hashlib.sha256(f"split:{recording_id}".encode()).hexdigest()[:8], 16) / 2**32
    return "val" if place < val_share else "train"

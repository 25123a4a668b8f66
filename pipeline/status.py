"""What a corpus holds and what is left of it, from the ledger alone: one scan, whatever its size."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import duckdb
import pyarrow.dataset as ds

from pipeline.catalogue import Catalogue
from pipeline.ledger import SCHEMA, Ledger, PartitionFiles
from pipeline.store import Store, StoreError
from schemas.quality import Status

_BY_STAGE = "select stage, status, count(*), sum(seconds) from {} group by all"
_REASONS = (
    "select stage, status, split_part(reasons[1], ':', 1), count(*) from {} where status <> 'ok' group by all"
)


@dataclass
class CorpusStatus:
    """clips: in the catalogue. stages: (stage, status) -> units. reasons: (stage, status, reason) -> units.
    marked: partitions whose every unit was found done by the last run; partitions: all of them."""

    clips: int
    partitions: int
    marked: int
    stages: Counter[tuple[str, Status]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: Counter[tuple[str, Status, str]] = field(default_factory=Counter)

    def against(self, status: Status) -> int:
        """Clips with this verdict: a clip has at most one, at the stage where it ended."""
        return sum(n for (_, s), n in self.stages.items() if s is status)

    def passed(self, last_stage: str) -> int:
        return self.stages[last_stage, Status.OK]


def corpus_status(corpus: Store) -> CorpusStatus:
    """Count the receipts of a corpus. Sealed files are scanned by DuckDB; the few partitions in work, whose
    segments overrule one another, are read through the ledger."""
    catalogue = Catalogue.load(corpus)
    ledger = Ledger(corpus)
    files = ledger.files()
    marked = sum(f.mark is not None for f in files.values())
    out = CorpusStatus(len(catalogue), len(catalogue.parts), marked)
    for name, f in files.items():
        if f.segments:
            for stages in ledger.load(name).values():
                for r in stages.values():
                    out.stages[r.stage, r.status] += 1
                    out.seconds[r.stage] += r.seconds
                    if r.status is not Status.OK:
                        out.reasons[r.stage, r.status, r.reasons[0].split(":")[0]] += 1
    sealed = sealed_files(files)
    if sealed:
        db = duckdb.connect()
        table = relation(db, corpus, sealed)
        try:
            by_stage = db.execute(_BY_STAGE.format(table)).fetchall()
        except duckdb.Error as error:
            what = " ".join(str(error).split())[:200]
            raise StoreError(
                f"a ledger file is damaged, delete it and run `wp2 curate` again: {what}"
            ) from None
        for stage, status, n, seconds in by_stage:
            out.stages[stage, Status(status)] += n
            out.seconds[stage] += seconds
        for stage, status, reason, n in db.execute(_REASONS.format(table)).fetchall():
            out.reasons[stage, Status(status), reason] += n
    return out


def sealed_files(files: dict[str, PartitionFiles]) -> list[str]:
    """Sealed files of partitions without later segments: their rows need no overruling."""
    return [f.sealed for f in files.values() if f.sealed and not f.segments]


def relation(db: duckdb.DuckDBPyConnection, corpus: Store, paths: list[str]) -> str:
    """Make receipt files visible to DuckDB; returns the SQL name of the table."""
    if corpus.is_local:
        quoted = ", ".join("'" + corpus.full(p).replace("'", "''") + "'" for p in paths)
        return f"read_parquet([{quoted}])"
    filesystem, root = corpus.arrow()
    data = ds.dataset([f"{root}/{p}" for p in paths], filesystem=filesystem, schema=SCHEMA, format="parquet")
    db.register("receipts", data)
    return "receipts"

"""What selection reads of a corpus: a row a clip, from catalogue and ledger alone, in bulk.

Sealed receipts are scanned by DuckDB, a few partitions at a time; those of partitions in work, whose segments
overrule one another, come through the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.catalogue import Catalogue
from pipeline.ledger import Ledger, PartitionFiles
from pipeline.quality.duplicates import HashTable
from pipeline.quality.hashes import DIGITS, ClipHashes, from_text
from pipeline.status import relation, sealed_files
from pipeline.store import Store, StoreError
from schemas.errors import UserError
from schemas.policy import AXES

QUALITY, HASHED = "quality", "observe"
"""Stages whose facts are read: q_<axis> and the flags of the first, `hashes` of the second."""
_CLIP = ["clip_id", "recording_id", "source", "game", "partition", "split"]
_PARTITIONS = 8
_MEMORY = "512MB"


class ScaleError(UserError):
    """Scores that are not on the scale of 0 to 1, or not of one scorer."""


@dataclass(frozen=True)
class Facts:
    """C clips in the order of partition and id, which is that of generations.

    table: clip_id, partition, recording_id, split, group (game, else source), ended (the first stage that it
        has not passed; null when it passed all), status (there; null while it has not run), reason (its first
        reason there, else ""), hud_share, text_share, watermark, aesthetics_by (null where not measured).
    scores: float64 [C, len(AXES)], NaN where not measured. stages: those that a clip passes, in order.
    """

    stages: tuple[str, ...]
    table: pa.Table
    scores: npt.NDArray[np.float64]
    hashes: HashTable

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """bool [C]: has scores, whatever came after."""
        return np.asarray(~np.isnan(self.scores).all(axis=1))

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """bool [C]: passed every stage, and has scores."""
        return np.asarray(pc.is_null(self.table.column("ended"))) & self.scored

    def column(self, name: str) -> npt.NDArray[Any]:
        """[C] values of a column of the table, as Python objects."""
        values: npt.NDArray[Any] = self.table.column(name).to_numpy(zero_copy_only=False)
        return values


def read_facts(corpus: Store, stages: Sequence[str]) -> Facts:
    """Every clip of a corpus. stages: those that a clip passes, in order.

    Raises StoreError on a damaged ledger, ScaleError on a score outside 0..1.
    """
    catalogue = Catalogue.load(corpus)
    tables, scores, hashes, counts = [], [], [], []
    ledger, parts = Ledger(corpus), list(catalogue.parts)
    files = ledger.files()
    for at in range(0, len(parts), _PARTITIONS):
        held = {name: files[name] for name in parts[at : at + _PARTITIONS] if name in files}
        clips = pa.concat_tables([catalogue.read(n).select(_CLIP) for n in parts[at : at + _PARTITIONS]])
        rows = _rows(corpus, ledger, clips, held, stages)
        scores.append(np.stack([_numbers(rows, f"q_{axis}") for axis in AXES], axis=1))
        texts = [text or "" for text in rows.column("hashes").to_pylist()]
        hashes.append(from_text("".join(texts)))
        counts += [len(text) // DIGITS for text in texts]
        # A copy: what DuckDB answers is freed as a whole, and the hashes as text are most of it.
        kept = rows.drop_columns(["hashes", *(f"q_{axis}" for axis in AXES)])
        tables.append(kept.take(pa.array(range(len(kept)))))
    if not tables:
        raise StoreError(f"{corpus.url} holds no clips: bring some with `wp2 curate`")
    facts = Facts(
        tuple(stages),
        pa.concat_tables(tables),
        np.concatenate(scores),
        _joined(hashes, counts),
    )
    _check_scale(facts)
    return facts


def _joined(parts: list[ClipHashes], counts: list[int]) -> HashTable:
    """One table of all hashes. Empties `parts` on the way, for two copies of them would not fit."""
    start = np.concatenate([[0], np.cumsum(counts)])
    ms, bits = np.empty(start[-1], np.uint32), np.empty(start[-1], np.uint64)
    at = 0
    while parts:
        part = parts.pop(0)
        ms[at : at + len(part)], bits[at : at + len(part)] = part.ms, part.bits
        at += len(part)
    return HashTable(start, ms, bits)


def _numbers(rows: pa.Table, name: str) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = rows.column(name).cast(pa.float64()).to_numpy()
    return values


def _check_scale(facts: Facts) -> None:
    wrong = np.argwhere((facts.scores < 0) | (facts.scores > 1))
    if len(wrong):
        clip, axis = (int(i) for i in wrong[0])
        raise ScaleError(
            f"{AXES[axis]} of clip {facts.column('clip_id')[clip]} is {facts.scores[clip, axis]:g}; scores "
            "run from 0 to 1: mend its scorer, then run `wp2 curate --from quality`"
        )


def _rows(
    corpus: Store, ledger: Ledger, clips: pa.Table, files: dict[str, PartitionFiles], stages: Sequence[str]
) -> pa.Table:
    db = duckdb.connect(config={"memory_limit": _MEMORY, "threads": 2})
    db.register("clips", clips)
    sealed = sealed_files(files)
    db.register("in_work", _in_work(ledger, [n for n, f in files.items() if f.segments]))
    wanted = "select clip_id, stage, status, reasons, facts from"
    receipts = f"{wanted} in_work"
    if sealed:
        receipts += f" union all {wanted} {relation(db, corpus, sealed)}"
    scores = ", ".join(f"(quality->>'$.q_{axis}')::double as q_{axis}" for axis in AXES)
    order = "[" + ", ".join(f"'{name}'" for name in stages) + "]"
    query = f"""
        with receipts as ({receipts}),
        found as (
            select clip_id,
                   map(list(stage), list(status)) as status_at,
                   map(list(stage), list(coalesce(reasons[1], ''))) as reason_at,
                   list(stage) filter (where status = 'ok') as passed,
                   any_value(facts) filter (where stage = '{QUALITY}' and status = 'ok') as quality,
                   any_value(facts->>'$.hashes') filter (where stage = '{HASHED}' and status = 'ok') as hashes
            from receipts where stage in (select unnest({order})) group by clip_id
        ),
        placed as (
            select clips.*, found.* exclude (clip_id), quality->>'$.watermark' as mark,
                   list_filter({order}, lambda s: not coalesce(list_contains(passed, s), false))[1] as ended
            from clips left join found using (clip_id)
        )
        select clip_id, partition, recording_id, split, if(game = '', source, game) as "group", ended,
               status_at[ended] as status, coalesce(reason_at[ended], '') as reason,
               (quality->>'$.hud_share')::double as hud_share,
               (quality->>'$.text_share')::double as text_share,
               if(mark in ('true', 'false'), (mark = 'true')::double, mark::double) as watermark,
               quality->>'$.aesthetics_by' as aesthetics_by,
               {scores}, hashes
        from placed order by partition, clip_id"""
    try:
        return db.sql(query).to_arrow_table()
    except duckdb.Error as error:
        what = " ".join(str(error).split())[:200]
        raise StoreError(f"a ledger file is damaged, delete it and run `wp2 curate` again: {what}") from None


def _in_work(ledger: Ledger, names: Sequence[str]) -> pa.Table:
    kinds = [("clip_id", pa.string()), ("stage", pa.string()), ("status", pa.string())]
    schema = pa.schema([*kinds, ("reasons", pa.list_(pa.string())), ("facts", pa.string())])
    return pa.Table.from_pylist([row for name in names for row in _plain(ledger, name)], schema=schema)


def _plain(ledger: Ledger, partition: str) -> Iterator[dict[str, object]]:
    for receipts in ledger.load(partition).values():
        for r in receipts.values():
            yield {
                "clip_id": r.clip_id,
                "stage": r.stage,
                "status": str(r.status),
                "reasons": list(r.reasons),
                "facts": json.dumps(r.facts),
            }

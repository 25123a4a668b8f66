"""Recordings and the clips that they were cut into.

The recordings of a corpus are a catalogue and a ledger of their own, in `recordings/`; their one stage is the
cut. What it answers becomes rows of the catalogue of clips once, when a recording is new: later settings cut
later recordings, and no clip ever changes its frames. Source: DESIGN 2, rules 8, 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import duckdb
import pyarrow as pa

from pipeline.catalogue import DESCRIPTION, Catalogue, to_clips
from pipeline.clips.stage import SIGNALS, Clips, read_spans
from pipeline.ledger import Ledger
from pipeline.scan import ID_HEX
from pipeline.stage import Receipt
from pipeline.store import Store
from schemas.clip import Clip, Sidecar
from schemas.quality import Status

FOLDER = "recordings"
_OF_THE_CLIP = ("clip_id", "start", "stop", "kind", "signals")


def recordings_of(corpus: Store) -> Store:
    """The store that holds a corpus's recordings: their catalogue, ledger and what the cut saw."""
    return Store(f"{corpus.url}/{FOLDER}", corpus.options)


def clip_rows(corpus: Store, held: Catalogue) -> pa.Table:
    """The clips of every recording (the catalogue's `DESCRIPTION`): those that the corpus holds, with what
    their recording's source says now, and those of recordings that were cut since."""
    recordings = recordings_of(corpus)
    db = duckdb.connect()
    db.register("listed", Catalogue.load(recordings).table())
    db.register("held", held.table(["sha256", *_OF_THE_CLIP]))
    columns = ", ".join(f"{'h' if n in _OF_THE_CLIP else 'r'}.{n}" for n in DESCRIPTION.names)
    known = db.sql(f"select {columns} from listed r join held h using (sha256)").to_arrow_table()
    fresh = db.sql("select * from listed anti join held using (sha256) order by partition, clip_id")
    new = [row.model_dump(mode="json") for row in _cut(recordings, fresh.to_arrow_table())]
    return pa.concat_tables([known.cast(DESCRIPTION), pa.Table.from_pylist(new, schema=DESCRIPTION)])


def _cut(recordings: Store, rows: pa.Table) -> Iterator[Clip]:
    ledger = Ledger(recordings)
    for name in dict.fromkeys(rows.column("partition").to_pylist()):
        receipts = ledger.load(name)
        chosen = rows.filter(pa.compute.equal(rows.column("partition"), name))
        for recording, _ in to_clips(chosen):
            receipt = receipts.get(recording.clip_id, {}).get(Clips.name)
            if receipt is not None and receipt.status is Status.OK:
                yield from clips_of(recording, receipt)


def clips_of(recording: Clip, receipt: Receipt) -> Iterator[Clip]:
    """The clips that a recording was cut into. One that is the whole recording has the recording's id."""
    seen = receipt.output(SIGNALS) if receipt.has(SIGNALS) else None
    signals = Sidecar(path=f"{FOLDER}/{seen.path}", digest=seen.sha256[:ID_HEX]) if seen else None
    for start, stop, kind in read_spans(receipt):
        about = {"start": start, "stop": stop, "kind": kind, "signals": signals}
        if stop:
            about["clip_id"] = part_id(recording.sha256, start, stop)
        yield recording.model_copy(update=about)


def part_id(sha256: str, start: int, stop: int) -> str:
    """Id of the presented frames [start, stop) of the file with this sha256."""
    return hashlib.sha256(f"{sha256}:{start}:{stop}".encode()).hexdigest()[:ID_HEX]

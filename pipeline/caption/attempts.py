"""Every request for a caption: what was asked, what came, what it cost. Accepted captions are found here.

    captions/attempts/<partition>/segment-00000007-1f3a90cc.parquet

Rows are buffered and published every few seconds, a segment a partition, complete or not at all: a kill loses
the rows of the last seconds and nothing else. Several processes may write: a writer's name is part of its
segments' names. A row that stands in two files (a kill while segments were merged) counts once, by its id.
Nothing of this enters the bytes of a shard. Source: DESIGN rules 2, 6, 10.
"""

from __future__ import annotations

import io
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store import Store, StoreError
from schemas import SCHEMA_VERSION

FOLDER = "captions/attempts"
REPLY_CHARACTERS = 8000
"""Of a reply's text are kept: a whole reply for 12 intervals has under 4,000; the rest is repetition."""
PARTITIONS_HELD = 4
"""Partitions whose accepted captions stay in memory: 3 MB each; a run works through them in order."""
_NAME = re.compile(
    rf"{FOLDER}/(?P<partition>[a-z0-9-]+)/segment-(?P<number>\d{{8}})-(?P<writer>[0-9a-f]+)\.parquet"
)
_REMEDY = "delete it; captions that it alone held are asked for again, and what they cost is no longer known"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request.

    key: of the caption that was wanted (pictures, prompt, schema, model, first settings). clip_id: empty for
    a canary, which is no clip. number: 1, 2, ...
    within one go at a clip. change: what differs from the attempt before. parts: fields asked, joined by ",".
    status: of HTTP, 0 where none came. faults: "field:kind" or "kind" joined by ", "; empty when all that was
    asked is right. caption: the accepted reply in whole, JSON; empty unless this attempt completed it.
    tokens: None where the server did not count believably. bound_tokens: the most that it can have been.
    seconds: wall time; engine_seconds: the request's share of its engine's time. at: Unix time.
    """

    id: str
    key: str
    clip_id: str
    number: int
    change: str
    parts: str
    endpoint: str
    model: str
    status: int
    finish: str
    faults: str
    tokens_in: int | None
    tokens_out: int | None
    bound_tokens: int
    seconds: float
    engine_seconds: float
    at: float
    reply: str
    caption: str = ""


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("key", pa.string()),
        ("clip_id", pa.string()),
        ("number", pa.int32()),
        ("change", pa.string()),
        ("parts", pa.string()),
        ("endpoint", pa.string()),
        ("model", pa.string()),
        ("status", pa.int32()),
        ("finish", pa.string()),
        ("faults", pa.string()),
        ("tokens_in", pa.int64()),
        ("tokens_out", pa.int64()),
        ("bound_tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("engine_seconds", pa.float64()),
        ("at", pa.float64()),
        ("reply", pa.string()),
        ("caption", pa.string()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)


@dataclass
class AttemptLog:
    """Appends attempts of one process to a corpus, and finds accepted captions of every process."""

    corpus: Store
    writer: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _buffer: dict[str, list[Attempt]] = field(default_factory=dict)
    _held: dict[str, _Held] = field(default_factory=dict)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0
    _segments: int = 0

    def next_id(self) -> str:
        self._count += 1
        return f"{self.writer}-{self._count}"

    def add(self, partition: str, attempt: Attempt) -> None:
        self._buffer.setdefault(partition, []).append(attempt)
        if partition in self._held:
            self._held[partition].note(attempt)

    def flush(self) -> None:
        """Publish what was added, one segment a partition. Raises StoreError, and then keeps what was not."""
        for partition in list(self._buffer):
            self._segments += 1
            path = f"{FOLDER}/{partition}/segment-{self._segments:08d}-{self.writer}.parquet"
            attempts = self._buffer.pop(partition)
            try:
                self.corpus.write(path, _encode(attempts))
            except StoreError:
                self._buffer.setdefault(partition, [])[:0] = attempts
                raise

    def accepted(self, partition: str, key: str) -> list[Attempt]:
        """Attempts that completed a caption of this key, whichever process made them, the first one first."""
        with self._looking:  # many clips ask at once, from threads
            held = self._held.pop(partition, None) or _Held()
            self._held[partition] = held
            while len(self._held) > PARTITIONS_HELD:
                del self._held[next(iter(self._held))]
            for path in segments(self.corpus, partition):
                if path not in held.read:  # published since, by this process or another
                    for attempt in read_segment(self.corpus, path, accepted_only=True):
                        held.note(attempt)
                    held.read.add(path)
            found = held.accepted.get(key, {})
            return sorted(found.values(), key=lambda a: (a.at, a.id))


@dataclass
class _Held:
    """What is known of one partition: segments read, and completed captions by key and attempt id."""

    read: set[str] = field(default_factory=set)
    accepted: dict[str, dict[str, Attempt]] = field(default_factory=dict)

    def note(self, attempt: Attempt) -> None:
        if attempt.caption:
            self.accepted.setdefault(attempt.key, {})[attempt.id] = attempt


def segments(corpus: Store, partition: str = "") -> list[str]:
    """Paths of published segments: of one partition, or of all."""
    folder = f"{FOLDER}/{partition}" if partition else FOLDER
    return [s.path for s in corpus.list(folder) if _NAME.fullmatch(s.path)]


def read_segment(corpus: Store, path: str, accepted_only: bool = False) -> list[Attempt]:
    """Raises StoreError when the file is damaged."""
    how = {"filters": [("caption", "!=", "")]} if accepted_only else {}
    try:
        return [Attempt(**row) for row in corpus.table(path, _REMEDY, **how).to_pylist()]
    except (TypeError, pa.ArrowInvalid):
        raise StoreError(f"{path} of {corpus.url} holds no attempts: {_REMEDY}") from None


def read_attempts(corpus: Store, partition: str = "") -> Iterator[Attempt]:
    """Every attempt of a partition, or of the corpus, each once; in no particular order."""
    seen: set[str] = set()
    for path in segments(corpus, partition):
        for attempt in read_segment(corpus, path):
            if attempt.id not in seen:
                seen.add(attempt.id)
                yield attempt


def merge(corpus: Store, least: int = 16) -> int:
    """Make one segment of each partition's, where there are at least so many; returns how many are gone.
    For the sole writer, before it starts. The merged segment is published first."""
    gone = 0
    by_partition: dict[str, list[str]] = {}
    for path in segments(corpus):
        by_partition.setdefault(path.split("/")[-2], []).append(path)
    for partition, paths in by_partition.items():
        if len(paths) >= least:
            path = f"{FOLDER}/{partition}/segment-00000000-{uuid.uuid4().hex[:8]}.parquet"
            corpus.write(path, _encode(read_attempts(corpus, partition)))
            for old in paths:
                corpus.remove(old)
            gone += len(paths)
    return gone


def _encode(attempts: Iterable[Attempt]) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist([asdict(a) for a in attempts], schema=SCHEMA)
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def now() -> float:
    return round(time.time(), 3)


def storable(text: str) -> str:
    """A text as a table can hold it: what UTF-8 has no code for (unpaired surrogates) is written out."""
    return text.encode("utf-8", "backslashreplace").decode()

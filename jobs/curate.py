"""`wp2 curate`: a source of clips to verified shards, resumable after any death.

    discover -> scan (digests; new recordings) -> the cut -> new clips (a generation) -> each clip through the
    stages -> shards a partition -> root

The driver holds the receipts of the partitions in work and of no others. Every outcome reaches the ledger; a
kill loses at most the receipts of the last seconds, whose units then make the same bytes again.
Source: DESIGN rules 2, 7, 10.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from jobs.config import CurateConfig
from jobs.progress import Progress
from jobs.runner import Lost, Pool, RunnerError
from pipeline.catalogue import Catalogue, to_clips
from pipeline.flow import Flow, forget
from pipeline.ledger import Ledger, Receipts
from pipeline.quality.select import Report
from pipeline.scan import ScanCache, cache_keys, scan
from pipeline.shards.inventory import read_inventory, whole
from pipeline.shards.read import read_partition
from pipeline.shards.stage import Shards
from pipeline.shards.write import write_root
from pipeline.sources.found import Discovery
from pipeline.stage import Receipt, Unit, digest
from pipeline.store import Store
from schemas.clip import Clip
from schemas.errors import UserError
from schemas.quality import Reason, Status, because

FLUSH_S = 2.0
SCAN_BATCH = 16


class BudgetExceeded(UserError):
    """More clips failed than the run allows."""


@dataclass(frozen=True)
class Task:
    """One attempt at a clip, or at the shards of a partition when `clip_id` is empty."""

    partition: str
    clip_id: str
    attempt: int


@dataclass
class Work:
    """A partition in work.

    open: clips of this run's source that have not come to their end. elsewhere: how many of other sources
    have not; while there are any, the partition gets no shards.
    """

    clips: dict[str, Clip]
    splits: dict[str, str]
    receipts: Receipts
    mark: str
    open: set[str] = field(default_factory=set)
    elsewhere: int = 0


@dataclass
class Outcome:
    """What a run did: clips it brought to their end, by status, and the partitions it wrote.

    unreadable: files of the source that gave no bytes, one line each; the next run tries them again.
    seconds: wall time from the first task of a clip to the last result. selection: what the tiers came to,
    where shards were written.
    """

    counts: dict[Status, int] = field(default_factory=lambda: dict.fromkeys(Status, 0))
    already_done: int = 0
    partitions: int = 0
    shard_failures: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ignored: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    selection: Report | None = None


def run_clip(flow: Flow, unit: Unit, attempt: int) -> list[Receipt]:
    """Task: one attempt at one clip."""
    return flow.run(unit, attempt)


def run_shards(
    shards: Shards, partition: str, units: list[tuple[Unit, str]], held: Receipt | None
) -> Receipt:
    """Task: the tars, index and inventory of one partition. held: the receipt of the last time."""
    return shards.run(partition, units, held)


class Curator:
    """One run over one corpus.

    source: "kind:url"; clips that another source brought are left as they are. shards: None leaves tars
    unwritten. alone: there are no shards to come: a partition whose units are done is done (recordings).
    anew: this stage and all after it are made again; "shards": the tars alone. retry_failed: failed clips get
    new attempts.
    Raises BudgetExceeded after the running tasks have ended and the ledger is written.
    """

    def __init__(
        self,
        corpus: Store,
        config: CurateConfig,
        source: str,
        flow: Flow,
        shards: Shards | None,
        pool: Pool,
        progress: Progress,
        anew: str | None = None,
        retry_failed: bool = False,
        alone: bool = False,
    ) -> None:
        self.alone = alone
        self.corpus, self.config, self.source, self.flow, self.shards = corpus, config, source, flow, shards
        self.pool, self.progress, self.retry_failed = pool, progress, retry_failed
        self.rewrite = anew == Shards.name
        self.anew = None if self.rewrite else anew
        self.ledger = Ledger(corpus)
        self.outcome = Outcome()
        self._base = digest(flow.configs(), shards.identity() if shards else "")
        self._work: dict[str, Work] = {}
        self._again: deque[Task] = deque()
        self._whole: deque[Task] = deque()
        self._flushed = time.monotonic()
        self._stop = False
        self._failed = 0

    # --- the catalogue ---

    def update_catalogue(self, source: Store, listing: Discovery) -> Catalogue:
        """Digest what is new in a listing, and publish the next generation of recordings when there is one.

        A recording that another source brought keeps its description while that source is there; once it is
        gone, it follows the source where it is found now.
        """
        self.progress.enter("scan")
        found = self._scan(source, listing)
        held = Catalogue.load(self.corpus)
        others = [s for s in held.sources() if s != self.source and self._is_there(s)]
        run = self.config.run
        return held.update(found, run.partition_size, run.val_share, leave=others)

    def _is_there(self, source: str) -> bool:
        try:
            return Store(source.partition(":")[2], dict(self.config.storage)).exists("")
        except (OSError, ValueError):  # a host that does not answer, a protocol that is not installed
            return False

    def _scan(self, source: Store, listing: Discovery) -> pa.Table:
        cache = ScanCache.load(self.corpus)
        keys = cache_keys(self.source, listing)
        todo = cache.missing(keys)
        self.progress.total, self.progress.finished = len(keys), len(keys) - len(todo)
        waiting = deque((todo[i : i + SCAN_BATCH], 1) for i in range(0, len(todo), SCAN_BATCH))
        flying: dict[int, tuple[list[int], int]] = {}
        while waiting or self.pool.busy:
            while waiting and self.pool.free > 0:
                batch, attempt = waiting.popleft()
                flying[batch[0]] = batch, attempt
                found = [listing.found[i] for i in batch]
                self.pool.submit(batch[0], scan, source, listing.key_map, found)
            for key, result in self.pool.wait(0.5):
                batch, attempt = flying.pop(key)
                if not isinstance(result, Lost):
                    self.outcome.unreadable += cache.add([keys[i] for i in batch], result)
                    self.progress.finished += len(batch)
                elif attempt < self.config.run.attempts:
                    waiting.append((batch, attempt + 1))
                else:
                    first = listing.found[batch[0]].path
                    raise RunnerError(f"scanning {first} and the next {len(batch) - 1}: {result.reason}")
            self.progress.tick()
        cache.save()
        return cache.describe(self.source, keys)

    # --- the clips ---

    def run(self, catalogue: Catalogue) -> Outcome:
        """Bring every clip of the catalogue to its end, and every partition to its shards."""
        self.progress.total, self.progress.finished = len(catalogue), 0
        self.progress.enter("recordings" if self.alone else "clips")
        flow, shards = self.pool.share(self.flow), self.pool.share(self.shards)
        new = self._open_clips(catalogue)
        started = time.perf_counter()
        try:
            while True:
                while self.pool.free > 0 and (task := self._next(new)) is not None:
                    if task.clip_id:
                        unit = self._unit(task.partition, task.clip_id)
                        self.pool.submit(task, run_clip, flow, unit, task.attempt)
                    else:
                        units = self._ok(task.partition)
                        held = None if self.rewrite else self._held(task.partition)
                        self.pool.submit(task, run_shards, shards, task.partition, units, held)
                if self.pool.busy == 0:
                    break
                for task, result in self.pool.wait(0.5):
                    self._take(task, result)
                self._flush()
                self.progress.tick()
        finally:
            self.ledger.flush()
        self.outcome.seconds = time.perf_counter() - started
        if self._stop:
            raise BudgetExceeded(
                f"{self._failed} clips failed, over the budget of {self._limit:.0f} (run.max_failed_share, "
                "run.min_failed): see `wp2 table CORPUS failures`, then try them again with --retry-failed"
            )
        if self.shards:
            write_root(self.corpus)
        return self.outcome

    def _open_clips(self, catalogue: Catalogue) -> Iterator[Task]:
        """Tasks for every clip that is not done, a partition at a time, each loaded when it is reached."""
        self._limit = self._budget(catalogue)
        files = self.ledger.files()
        sizes = {s.path: s.size for part in ("index", "shards") for s in self.corpus.list(part)}
        again = self.anew or self.rewrite or self.retry_failed
        for name, part in catalogue.parts.items():
            mark = digest(self._base, part.digest)
            marked = name in files and files[name].mark == mark
            if marked and not again and (self.alone or whole(self.corpus, name, sizes)):
                self.progress.finished += part.rows
                self.outcome.already_done += part.rows
                continue
            rows = list(to_clips(catalogue.read(name)))
            work = Work(
                {c.clip_id: c for c, _ in rows}, {c.clip_id: s for c, s in rows}, self.ledger.load(name), mark
            )
            if self.anew:  # of clips; the partition keeps its own, and tars stay where nothing came out anew
                work.receipts = {
                    i: r if i == name else forget(r, self.flow.stages, self.anew)
                    for i, r in work.receipts.items()
                }
            self._work[name] = work
            left = [
                c for i, c in work.clips.items()
                if not self.flow.done(c, work.receipts.get(i, {}), self.retry_failed)
            ]  # fmt: skip
            work.open = {c.clip_id for c in left if c.source == self.source}
            work.elsewhere = len(left) - len(work.open)
            self._failed += sum(self._has_failed(work, i) for i in work.clips if i not in work.open)
            self._stop = self._stop or self._failed > self._limit
            self.progress.finished += len(work.clips) - len(work.open)
            self.outcome.already_done += len(work.clips) - len(work.open)
            if not work.open:
                self._complete(name)
            for clip_id in sorted(work.open):
                yield Task(name, clip_id, 1)

    def _has_failed(self, work: Work, clip_id: str) -> bool:
        held = work.receipts.get(clip_id, {})
        return any(s.name in held and held[s.name].status is Status.FAILED for s in self.flow.stages)

    def _next(self, new: Iterator[Task]) -> Task | None:
        if self._stop:
            return None
        if self._again:
            return self._again.popleft()
        if not self._whole:
            task = next(new, None)
            if task is not None:
                return task
        return self._whole.popleft() if self._whole else None

    def _unit(self, partition: str, clip_id: str) -> Unit:
        work = self._work[partition]
        return self.flow.unit(work.clips[clip_id], partition, work.receipts.get(clip_id, {}))

    def _ok(self, partition: str) -> list[tuple[Unit, str]]:
        """Units of a partition's clips that passed every stage, or keep what they had where one failed;
        by id, each with its split."""
        work = self._work[partition]
        names = [stage.name for stage in self.flow.stages]  # a stage that is off speaks against no clip
        passed = [
            i for i in sorted(work.clips)
            if all(n in (r := work.receipts.get(i, {})) and r[n].usable for n in names)
        ]  # fmt: skip
        return [(self._unit(partition, i), work.splits[i]) for i in passed]

    def _held(self, partition: str) -> Receipt | None:
        """The receipt of a partition's shards as they were last written."""
        return self._work[partition].receipts.get(partition, {}).get(Shards.name)

    # --- results ---

    def _take(self, task: Task, result: Any) -> None:
        if not task.clip_id:
            self._take_shards(task, result)
            return
        work = self._work[task.partition]
        if isinstance(result, Lost):
            reason = Reason.WORKER_DIED if result.worker_died else Reason.INTERNAL
            unit = self._unit(task.partition, task.clip_id)
            result = [self.flow.lost(unit, because(reason, result.reason), task.attempt)]
        mine = work.receipts.setdefault(task.clip_id, {})
        for receipt in result:
            mine[receipt.stage] = receipt
        ended = result[-1].status if result else Status.OK
        again = ended is Status.FAILED and not result[-1].reasons[0].startswith(Reason.NO_ANSWER)
        if again and task.attempt < self.config.run.attempts:  # a captioner has tried again by itself
            self._again.append(Task(task.partition, task.clip_id, task.attempt + 1))
            self._record(task.partition, result[:-1])
            return
        self._record(task.partition, result)
        self.outcome.counts[ended] += 1
        self._failed += ended is Status.FAILED
        self._stop = self._stop or self._failed > self._limit
        self.progress.clip_finished()
        work.open.discard(task.clip_id)
        if not work.open:
            self._complete(task.partition)

    def _record(self, partition: str, receipts: list[Receipt]) -> None:
        self.ledger.append(partition, receipts)
        self.progress.receipts(receipts)

    def _complete(self, partition: str) -> None:
        """Every clip of a partition is at its end: write its shards, unless they are fresh or not wanted."""
        work = self._work[partition]
        if self.shards is None or work.elsewhere:
            self._seal(partition, work.mark if self.alone and not work.elsewhere else None)
            return
        held = self._held(partition)
        fresh = held is not None and self.shards.is_fresh(held, self._ok(partition))
        if fresh and not self.rewrite and whole(self.corpus, partition):
            self._seal(partition, work.mark)
        elif not self.rewrite and (lost := self._published_and_failed(partition)):
            self.outcome.shard_failures.append(
                f"{partition} stay as they were: {len(lost)} clips that stand in them failed now, such as "
                f"{lost[0]} (`wp2 table CORPUS failures`); repair and use --retry-failed, or drop them "
                "with --from shards"
            )
            self._seal(partition, None)
        else:
            self._whole.append(Task(partition, "", 1))

    def _published_and_failed(self, partition: str) -> list[str]:
        """Published samples whose clips failed since: a failure never takes a sample away."""
        if not whole(self.corpus, partition):
            return []
        index = read_partition(self.corpus, read_inventory(self.corpus, partition), ["sample_id"])
        published = index.column("sample_id").to_pylist()
        written = {unit.clip.clip_id for unit, _ in self._ok(partition)}
        return [i for i in published if i not in written and self._has_failed(self._work[partition], i)]

    def _take_shards(self, task: Task, result: Any) -> None:
        if isinstance(result, Lost):
            if task.attempt < self.config.run.attempts:
                self._whole.append(Task(task.partition, "", task.attempt + 1))
            else:
                self.outcome.shard_failures.append(f"{task.partition}: {result.reason}")
                self._seal(task.partition, None)
            return
        self._work[task.partition].receipts[task.partition] = {result.stage: result}
        self._record(task.partition, [result])
        self.outcome.partitions += 1
        self.outcome.shard_failures += [f"{task.partition}, left out: {r}" for r in result.reasons]
        self._seal(task.partition, None if result.reasons else self._work[task.partition].mark)

    def _seal(self, partition: str, mark: str | None) -> None:
        work = self._work.pop(partition)
        self.ledger.seal(partition, {i: self.flow.prune(r) for i, r in work.receipts.items()}, mark)

    def _flush(self) -> None:
        if time.monotonic() - self._flushed > FLUSH_S:
            self.ledger.flush()
            self._flushed = time.monotonic()

    def _budget(self, catalogue: Catalogue) -> float:
        run = self.config.run
        return max(run.min_failed, run.max_failed_share * len(catalogue))

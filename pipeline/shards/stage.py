"""The last stage: a partition's clips that passed every other one become its tars, index and inventory.

Unlike the stages of a clip, its unit is a partition; its receipt stands in the ledger under the partition's
name. Source: DESIGN 2, rule 10.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from pipeline.media import media
from pipeline.shards.inventory import inventory_path
from pipeline.shards.sample import build
from pipeline.shards.write import Sample, ShardConfig, write_partition
from pipeline.stage import Artefact, Receipt, Unit, digest
from pipeline.store import Store
from schemas import SCHEMA_VERSION
from schemas.quality import Status

Member = tuple[Unit, str]
"""A clip with the receipts of every stage before, and its split."""


@dataclass(frozen=True)
class Shards:
    """Writes partitions of one corpus."""

    config: ShardConfig
    corpus: Store
    name: ClassVar[str] = "shards"
    version: ClassVar[int] = 1

    def identity(self) -> str:
        return digest(SCHEMA_VERSION, self.name, self.version, self.config)

    def inputs(self, members: list[Member]) -> str:
        """Digest of all that reaches a shard: the clips' descriptions and what their stages made."""
        return digest([_seen(unit, split) for unit, split in members])

    def is_fresh(self, held: Receipt, members: list[Member]) -> bool:
        return held.config == self.identity() and held.inputs == self.inputs(members)

    def run(self, partition: str, members: list[Member]) -> Receipt:
        """Write one partition. members: sorted by clip id. Raises StoreError or ShardError."""
        started = time.perf_counter()
        with contextlib.closing(self._samples(members)) as samples:
            inventory = write_partition(self.corpus, partition, samples, self.config)
        path = inventory_path(partition)
        return Receipt(
            clip_id=partition,
            stage=self.name,
            config=self.identity(),
            inputs=self.inputs(members),
            status=Status.OK,
            outputs=(Artefact(name="inventory", path=path, bytes=self.corpus.size(path) or 0, sha256=""),),
            facts={"samples": inventory.samples, "tars": len(inventory.tars)},
            content=self.inputs(members),
            seconds=round(time.perf_counter() - started, 3),
        )

    @staticmethod
    def _samples(members: list[Member]) -> Generator[Sample, None, None]:
        for unit, split in members:
            with media(unit) as path:
                yield build(unit, split, path)


def _seen(unit: Unit, split: str) -> list[object]:
    clip = unit.clip
    about = [clip.clip_id, clip.recording_id, split, clip.game, clip.perspective, clip.licence]
    return [*about, sorted((name, r.content) for name, r in unit.receipts.items())]

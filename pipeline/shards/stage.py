"""The last stage: a partition's clips that passed every other one become its tars, index and inventory.

Unlike the stages of a clip, its unit is a partition; its receipt stands in the ledger under the partition's
name. Source: DESIGN 2, rules 7, 10.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeline.media import media, media_sha256
from pipeline.shards.inventory import file_entry, index_path, read_inventory, whole
from pipeline.shards.recover import recover
from pipeline.shards.sample import build
from pipeline.shards.write import Sample, ShardConfig, write_partition
from pipeline.stage import Receipt, Unit, digest
from pipeline.store import Store, StoreError
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
    version: ClassVar[int] = 2

    def identity(self) -> str:
        return digest(SCHEMA_VERSION, self.name, self.version, self.config)

    def inputs(self, members: list[Member]) -> str:
        """Digest of all that reaches a shard: the clips' descriptions and what their stages made."""
        return digest([_seen(unit, split) for unit, split in members])

    def media_inputs(self, members: list[Member]) -> str:
        """Digest of all that reaches a media tar: ids and files in their order, and how large tars grow."""
        files = [(unit.clip.clip_id, media_sha256(unit)) for unit, _ in members]
        return digest(SCHEMA_VERSION, self.version, self.config.target_bytes["media"], files)

    def is_fresh(self, held: Receipt, members: list[Member]) -> bool:
        """Was the partition written from exactly this, with no clip left out, and is it what is published?"""
        same = held.config == self.identity() and held.inputs == self.inputs(members)
        return same and not held.reasons and self._published(held)

    def run(self, partition: str, members: list[Member], held: Receipt | None = None) -> Receipt:
        """Write one partition. members: sorted by clip id. held: the receipt of the last time.

        Media tars that the held receipt vouches for stay, and no media is read. Otherwise a clip that cannot
        be read any more is taken out of the tars that it stands in, or else left out: the receipt then has a
        reason "<clip id>: <why>" for it, and is never fresh.
        Raises StoreError or ShardError.
        """
        started = time.perf_counter()
        written = list(members)
        reasons: list[str] = []
        with contextlib.ExitStack() as stack:
            if self._keeps_media(partition, members, held):
                keep = ["media"]
                samples = self._annotations(members)
            else:
                keep = []
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wp2-")))
                recovered = recover(self.corpus, partition, (unit for unit, _ in members), folder)
                written.clear()
                samples = self._samples(members, recovered, written, reasons)
            stack.enter_context(contextlib.closing(samples))
            inventory = write_partition(self.corpus, partition, samples, self.config, keep)
        return Receipt(
            clip_id=partition,
            stage=self.name,
            config=self.identity(),
            inputs=self.inputs(members),
            status=Status.OK,
            reasons=tuple(reasons),
            facts={
                "published": inventory.identity,
                "samples": inventory.samples,
                "tars": len(inventory.tars),
                "skipped": len(reasons),
                "media_inputs": self.media_inputs(written),
            },
            content=self.inputs(written),
            seconds=round(time.perf_counter() - started, 3),
        )

    def _keeps_media(self, partition: str, members: list[Member], held: Receipt | None) -> bool:
        return (
            held is not None
            and held.facts.get("media_inputs") == self.media_inputs(members)
            and self._published(held)
            and whole(self.corpus, partition)
            and file_entry(self.corpus, index_path(partition)) == read_inventory(self.corpus, partition).index
        )

    def _published(self, held: Receipt) -> bool:
        """Is what this receipt tells of what is published, whatever the tiers in its index? A kill between
        the two loses the receipt."""
        try:
            return read_inventory(self.corpus, held.clip_id).identity == held.facts.get("published")
        except StoreError:  # missing or damaged: it is not published, which is the answer
            return False

    @staticmethod
    def _annotations(members: list[Member]) -> Generator[Sample, None, None]:
        for unit, split in members:
            yield build(unit, split, None)

    @staticmethod
    def _samples(
        members: list[Member], recovered: Mapping[str, Path], written: list[Member], reasons: list[str]
    ) -> Generator[Sample, None, None]:
        """Samples of what can be read, each told in `written`; of what cannot, a line in `reasons`."""
        for unit, split in members:
            name = unit.clip.clip_id
            with contextlib.ExitStack() as held:
                try:
                    path = recovered.get(name) or held.enter_context(media(unit))
                    sample = build(unit, split, path)
                except StoreError as error:
                    reasons.append(f"{name}: {error}")
                    continue
                written.append((unit, split))
                yield sample


def _seen(unit: Unit, split: str) -> list[object]:
    clip = unit.clip
    about = [clip.clip_id, clip.recording_id, split, clip.game, clip.perspective, clip.licence]
    return [*about, sorted((name, r.content) for name, r in unit.receipts.items())]

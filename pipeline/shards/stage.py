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
from pipeline.shards.write import ALWAYS, Sample, ShardConfig, write_partition
from pipeline.stage import Receipt, Unit, digest
from pipeline.store import Store, StoreError
from schemas import SCHEMA_VERSION
from schemas.quality import Status
from schemas.sample import OPTIONAL

Member = tuple[Unit, str]
"""A clip with the receipts of every stage before, and its split."""


@dataclass(frozen=True)
class Shards:
    """Writes partitions of one corpus. families: what a partition has; stages of the names of the optional
    ones have run."""

    config: ShardConfig
    corpus: Store
    families: tuple[str, ...] = ALWAYS
    name: ClassVar[str] = "shards"
    version: ClassVar[int] = 3

    def identity(self) -> str:
        return digest(SCHEMA_VERSION, self.name, self.version, self.config, self.families)

    def inputs(self, members: list[Member]) -> str:
        """Digest of all that reaches the partition."""
        return digest([self.family_inputs(family, members) for family in self.families])

    def family_inputs(self, family: str, members: list[Member]) -> str:
        """Digest of all that reaches the tars of a family: what its members are made of, clip by clip in
        their order, and how large tars grow."""
        seen = {"media": _media, "annotations": _described}.get(family)
        made = [(u.clip.clip_id, seen(u, split) if seen else _files(u, family)) for u, split in members]
        return digest(SCHEMA_VERSION, self.version, family, self.config.target_bytes[family], made)

    def is_fresh(self, held: Receipt, members: list[Member]) -> bool:
        """Was the partition written from exactly this, with no clip left out, and is it what is published?"""
        same = held.config == self.identity() and held.inputs == self.inputs(members)
        return same and not held.reasons and self._published(held)

    def run(self, partition: str, members: list[Member], held: Receipt | None = None) -> Receipt:
        """Write one partition. members: sorted by clip id. held: the receipt of the last time.

        Tars of a family that the held receipt vouches for stay, and nothing that they hold is read; where the
        media are written again, so is all else. A clip whose media cannot be read any more is taken out of
        the tars that it stands in, or else left out: the receipt then has a reason "<clip id>: <why>" for it,
        and is never fresh.
        Raises StoreError or ShardError.
        """
        started = time.perf_counter()
        written = list(members)
        reasons: list[str] = []
        with contextlib.ExitStack() as stack:
            if keep := self._kept(partition, members, held):
                samples = self._labels(members, [f for f in self.families if f not in keep])
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wp2-")))
                recovered = recover(self.corpus, partition, (unit for unit, _ in members), folder)
                written.clear()
                samples = self._samples(members, recovered, written, reasons)
            stack.enter_context(contextlib.closing(samples))
            inventory = write_partition(self.corpus, partition, samples, self.config, keep, self.families)
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
                **{f"{family}_inputs": self.family_inputs(family, written) for family in self.families},
            },
            content=self.inputs(written),
            seconds=round(time.perf_counter() - started, 3),
        )

    def _kept(self, partition: str, members: list[Member], held: Receipt | None) -> list[str]:
        """Families whose published tars are those that would be written; none where the media's are not."""
        if (
            held is None
            or not self._published(held)
            or not whole(self.corpus, partition)
            or file_entry(self.corpus, index_path(partition)) != read_inventory(self.corpus, partition).index
        ):
            return []
        same = [f for f in self.families if held.facts.get(f"{f}_inputs") == self.family_inputs(f, members)]
        return same if "media" in same else []

    def _published(self, held: Receipt) -> bool:
        """Is what this receipt tells of what is published, whatever the tiers in its index? A kill between
        the two loses the receipt."""
        try:
            return read_inventory(self.corpus, held.clip_id).identity == held.facts.get("published")
        except StoreError:  # missing or damaged: it is not published, which is the answer
            return False

    @staticmethod
    def _labels(members: list[Member], families: list[str]) -> Generator[Sample, None, None]:
        for unit, split in members:
            with contextlib.ExitStack() as held:
                yield build(unit, split, families, held)

    def _samples(
        self,
        members: list[Member],
        recovered: Mapping[str, Path],
        written: list[Member],
        reasons: list[str],
    ) -> Generator[Sample, None, None]:
        """Samples of what can be read, each told in `written`; of what cannot, a line in `reasons`."""
        for unit, split in members:
            name = unit.clip.clip_id
            with contextlib.ExitStack() as held:
                try:
                    path = recovered.get(name) or held.enter_context(media(unit))
                    sample = build(unit, split, self.families, held, path)
                except StoreError as error:
                    reasons.append(f"{name}: {error}")
                    continue
                written.append((unit, split))
                yield sample


def _media(unit: Unit, split: str) -> object:
    return media_sha256(unit)


def _described(unit: Unit, split: str) -> object:
    """The clip's description, and what every stage but those of other families made of it."""
    clip = unit.clip
    about = [clip.recording_id, clip.kind, split, clip.game, clip.perspective, clip.licence]
    made = sorted((name, r.content) for name, r in unit.receipts.items() if name not in OPTIONAL)
    return [*about, made]


def _files(unit: Unit, family: str) -> object:
    return sorted((made.name, made.sha256) for made in unit.receipts[family].outputs)

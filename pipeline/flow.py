"""A clip's way through the stages, and what is left of it to do.

Runs in a worker, or in the driver: the same functions on the same receipts. Source: DESIGN rules 7, 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.stage import Receipt, Stage, Unit, config_digest, digest, inputs_of, is_fresh, run_unit
from pipeline.store import Store
from schemas.clip import Clip
from schemas.errors import UserError
from schemas.quality import Status


class StageOrderError(UserError):
    """A stage that no list of stages can satisfy, or a name that is none of them."""


@dataclass(frozen=True)
class Flow:
    """Stages in order, the corpus they publish to, and options for opening source stores."""

    stages: tuple[Stage, ...]
    corpus: Store
    source_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for stage in self.stages:
            if missing := set(stage.needs) - seen:
                raise StageOrderError(f"stage {stage.name} needs {', '.join(sorted(missing))} before it")
            seen.add(stage.name)

    def unit(self, clip: Clip, partition: str, receipts: Mapping[str, Receipt]) -> Unit:
        url = clip.source.partition(":")[2]
        return Unit(clip, partition, Store(url, dict(self.source_options)), self.corpus, receipts)

    def configs(self) -> str:
        """Digest of every stage's identity and config."""
        return digest([config_digest(s) for s in self.stages])

    def done(self, clip: Clip, receipts: Mapping[str, Receipt], retry_failed: bool = False) -> bool:
        """Has the clip come to its end: every stage fresh and ok, or a fresh verdict against it?"""
        for stage in self.stages:
            if not is_fresh(stage, clip, receipts):
                return False
            status = receipts[stage.name].status
            if status is not Status.OK:
                return not (retry_failed and status is Status.FAILED)
        return True

    def run(self, unit: Unit, attempt: int) -> list[Receipt]:
        """Run what is not fresh, in order, up to the first verdict against the clip. Returns new receipts."""
        receipts = dict(unit.receipts)
        made: list[Receipt] = []
        for stage in self.stages:
            if self._usable(stage, unit, receipts):
                continue
            receipt = run_unit(stage, replace(unit, receipts=receipts), attempt)
            receipts[stage.name] = receipt
            made.append(receipt)
            if receipt.status is not Status.OK:
                break
        return made

    def _usable(self, stage: Stage, unit: Unit, receipts: Mapping[str, Receipt]) -> bool:
        """Fresh, ok, and its files still there with their sizes (their content is `wp2 verify`'s)."""
        if not is_fresh(stage, unit.clip, receipts) or receipts[stage.name].status is not Status.OK:
            return False
        return all(unit.corpus.size(o.path) == o.bytes for o in receipts[stage.name].outputs)

    def first_open(self, clip: Clip, receipts: Mapping[str, Receipt]) -> Stage:
        """The first stage that is not fresh and ok; the last one when all are."""
        for stage in self.stages:
            if not is_fresh(stage, clip, receipts) or receipts[stage.name].status is not Status.OK:
                return stage
        return self.stages[-1]

    def prune(self, receipts: Mapping[str, Receipt]) -> dict[str, Receipt]:
        """Receipts without those of stages behind a verdict against the clip: an earlier config made them."""
        kept = dict(receipts)
        against = False
        for stage in self.stages:
            if against:
                kept.pop(stage.name, None)
            elif stage.name in kept:
                against = not kept[stage.name].usable
        return kept

    def lost(self, unit: Unit, reason: str, attempt: int) -> Receipt:
        """Receipt of a unit whose worker died before it could answer."""
        stage = self.first_open(unit.clip, unit.receipts)
        return Receipt(
            clip_id=unit.clip.clip_id,
            stage=stage.name,
            config=config_digest(stage),
            inputs=inputs_of(stage, unit.clip, unit.receipts),
            status=Status.FAILED,
            reasons=(reason,),
            content=digest(Status.FAILED, reason),
            attempts=attempt,
        )


def select(stages: tuple[Stage, ...], only: str | None) -> tuple[Stage, ...]:
    """The stages up to and including `only`; all of them for None. Raises StageOrderError on a wrong name."""
    if only is None:
        return stages
    names = [s.name for s in stages]
    if only not in names:
        raise StageOrderError(f"no stage is named {only!r}; the stages are {', '.join(names)}")
    return stages[: names.index(only) + 1]


def forget(receipts: Mapping[str, Receipt], stages: tuple[Stage, ...], first: str) -> dict[str, Receipt]:
    """Receipts without those of stage `first` and every stage after it: they are made anew."""
    names = [s.name for s in stages]
    if first not in names:
        raise StageOrderError(f"no stage is named {first!r}; the stages are {', '.join(names)}")
    return {name: r for name, r in receipts.items() if name in names[: names.index(first)]}

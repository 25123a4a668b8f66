"""The contract every stage fulfils, and the one boundary where its errors become outcomes.

A stage is a small class built from its own config section. It knows nothing of Ray, of other clips, or of
where its outputs go: it is given one unit and a scratch folder, and answers with a verdict, files and facts.
A unit's receipt is fresh when the stage's version and config and everything that the unit reads are what
they were. Source: DESIGN rules 2, 7, 10.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from pipeline.store import Store, StoreError, sha256_file
from schemas import SCHEMA_VERSION
from schemas.clip import Clip
from schemas.errors import StopRun
from schemas.quality import Reason, Status, Verdict, because

Fact = str | int | float | bool


class Artefact(BaseModel):
    """A published output file: its path in the corpus, size and sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    path: str
    bytes: int
    sha256: str


class Receipt(BaseModel):
    """Outcome of one unit (clip, stage). `content` digests what downstream stages can see of it; `config`
    and `inputs` say what it was made from; `attempts` and `seconds` never reach shard bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    clip_id: str
    stage: str
    config: str
    inputs: str
    status: Status
    reasons: tuple[str, ...] = ()
    outputs: tuple[Artefact, ...] = ()
    facts: dict[str, Fact] = {}
    content: str
    attempts: int = 1
    seconds: float = 0.0

    @property
    def usable(self) -> bool:
        """Ok, or failed while what was there before stands: its outputs are then those of the time before."""
        return self.status is Status.OK or (self.status is Status.FAILED and bool(self.outputs))

    def output(self, name: str) -> Artefact:
        for artefact in self.outputs:
            if artefact.name == name:
                return artefact
        raise KeyError(f"stage {self.stage} of clip {self.clip_id} has no output {name!r}")

    def has(self, name: str) -> bool:
        return any(a.name == name for a in self.outputs)


@dataclass(frozen=True)
class Unit:
    """One clip on its way through the stages: where its source and corpus are, and the receipts so far."""

    clip: Clip
    partition: str
    source: Store
    corpus: Store
    receipts: Mapping[str, Receipt] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a stage answers: a verdict, local files to publish by name (with suffix), and scalar facts."""

    verdict: Verdict
    files: Mapping[str, Path] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Stage(Protocol):
    """name, version: identity; a change of either re-runs every unit of the stage and what depends on it.
    needs: stages whose receipts it reads. reads: fields of `Clip` that it reads from outside the corpus."""

    name: ClassVar[str]
    version: ClassVar[int]
    needs: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]]

    @property
    def config(self) -> BaseModel: ...

    def frozen(self, clip: Clip) -> object:
        """What the stage reads of the corpus's frozen statistics for a clip; None when it reads none."""

    def run(self, unit: Unit, scratch: Path) -> Result: ...


def digest(*parts: object) -> str:
    """16 hex digits over the canonical JSON of the parts."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no canonical form")


def config_digest(stage: Stage) -> str:
    return digest(SCHEMA_VERSION, stage.name, stage.version, stage.config)


def inputs_of(stage: Stage, clip: Clip, receipts: Mapping[str, Receipt]) -> str:
    """What a unit reads, joined by "+": digests of its `reads` fields and of its share of the frozen
    statistics, and the contents of its `needs`."""
    own = [read_digest(clip, name) for name in stage.reads]
    frozen = stage.frozen(clip)
    own += [digest(frozen)] if frozen is not None else []
    return "+".join(own + [receipts[need].content for need in stage.needs])


def read_digest(clip: Clip, name: str) -> str:
    """Digest of one field of a clip that a stage reads; "none" when the clip has no such thing."""
    value = getattr(clip, name)
    if value is None or value == "":
        return "none"
    return value.digest if hasattr(value, "digest") else digest(value)


def is_fresh(stage: Stage, clip: Clip, receipts: Mapping[str, Receipt]) -> bool:
    """Does the clip hold a receipt of this stage made from the present version, config and inputs?"""
    receipt = receipts.get(stage.name)
    return (
        receipt is not None
        and (receipt.config == config_digest(stage) or _stands(stage, receipt))
        and all(need in receipts for need in stage.needs)
        and receipt.inputs == inputs_of(stage, clip, receipts)
    )


def _stands(stage: Stage, receipt: Receipt) -> bool:
    """Does the stage let a receipt stand that was made with another config? Most have no such method."""
    stands = getattr(stage, "stands", None)
    return stands is not None and bool(stands(receipt))


def run_unit(stage: Stage, unit: Unit, attempt: int = 1) -> Receipt:
    """Run one stage on one clip, publish its files, and answer with the receipt. Never raises for what is
    wrong with the clip: an unexpected error becomes a failed outcome with the error in one line. Raises
    StopRun, which is wrong for every clip."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="wp2-") as folder:
        try:
            result = stage.run(unit, Path(folder))
        except StopRun:
            raise
        except StoreError as error:
            result = Result(Verdict.failed(because(Reason.SOURCE_UNREADABLE, one_line(error))))
        except Exception as error:  # noqa: BLE001 - the one boundary where any error becomes an outcome
            result = Result(Verdict.failed(because(Reason.INTERNAL, one_line(error))))
        outputs = tuple(_publish(stage, unit, name, path) for name, path in sorted(result.files.items()))
    verdict = result.verdict
    seen = digest(verdict.status, verdict.reasons, [(o.name, o.sha256) for o in outputs], dict(result.facts))
    return Receipt(
        clip_id=unit.clip.clip_id,
        stage=stage.name,
        config=config_digest(stage),
        inputs=inputs_of(stage, unit.clip, unit.receipts),
        status=verdict.status,
        reasons=verdict.reasons,
        outputs=outputs,
        facts=dict(result.facts),
        content=seen,
        attempts=attempt,
        seconds=round(time.perf_counter() - started, 3),
    )


def _publish(stage: Stage, unit: Unit, name: str, local: Path) -> Artefact:
    path = f"work/{stage.name}/{unit.partition}/{unit.clip.clip_id}.{name}"
    unit.corpus.put(local, path)
    return Artefact(name=name, path=path, bytes=local.stat().st_size, sha256=sha256_file(local))


def one_line(error: BaseException) -> str:
    """Type and message of an error on one line, at most 300 characters."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:300]

"""Corpora of clips with given scores, verdicts and hashes, for the tests of selection: catalogue and ledger
as `wp2 curate` leaves them, without a video."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline.catalogue import DESCRIPTION, Catalogue, split_of
from pipeline.corpus import open_corpus
from pipeline.ledger import Ledger
from pipeline.quality.hashes import ClipHashes, to_text
from pipeline.stage import Fact, Receipt
from pipeline.store import Store
from schemas.clip import Clip
from schemas.policy import AXES
from schemas.quality import Status

STAGES = ("ingest", "gates", "observe", "pose", "actions", "quality")
VAL_SHARE = 0.2


@dataclass(frozen=True)
class Made:
    """A clip to make. scores: by axis; the rest is 0.5. ends: stage and verdict against it, or with status
    None the stage that has not run."""

    name: str
    game: str = "doom"
    split: str = "train"
    scores: dict[str, float | None] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    hashes: ClipHashes | None = None
    ends: tuple[str, Status | None, str] | None = None
    clip_id: str = ""

    @property
    def id(self) -> str:
        return self.clip_id or hashlib.sha256(self.name.encode()).hexdigest()[:16]


def make(folder: str, clips: Iterable[Made], partition_size: int = 1000) -> Store:
    """A corpus of these clips, as one more generation of what lies there."""
    corpus = open_corpus(folder, create=True)
    clips = {c.id: c for c in clips}
    rows = [_row(c).model_dump(mode="json") for c in clips.values()]
    catalogue = Catalogue.load(corpus).update(
        pa.Table.from_pylist(rows, schema=DESCRIPTION), partition_size, VAL_SHARE
    )
    ledger = Ledger(corpus)
    for partition in catalogue.parts:
        ids = catalogue.read(partition).column("clip_id").to_pylist()
        if set(ids) <= set(clips):
            ledger.seal(partition, {i: _receipts(clips[i]) for i in ids}, "done")
    return corpus


def _row(clip: Made) -> Clip:
    names = (f"{clip.name}-{n}" for n in itertools.count())
    recording = next(n for n in names if split_of(n, VAL_SHARE) == clip.split)
    return Clip(
        clip_id=clip.id,
        recording_id=recording,
        source="folder:/somewhere",
        source_path=f"{clip.name}.mp4",
        bytes=1,
        sha256=hashlib.sha256(clip.name.encode()).hexdigest(),
        game=clip.game,
    )


def _receipts(clip: Made) -> dict[str, Receipt]:
    out: dict[str, Receipt] = {}
    for stage in STAGES:
        if clip.ends is not None and clip.ends[0] == stage:
            if clip.ends[1] is not None:
                out[stage] = _receipt(clip, stage, {}, clip.ends[1], (clip.ends[2], "second: reason"))
            break
        facts: dict[str, Fact] = {}
        if stage == "observe" and clip.hashes is not None:
            facts = {"hashes": to_text(clip.hashes)}
        if stage == "quality":
            scores = {f"q_{axis}": clip.scores.get(axis, 0.5) for axis in AXES}
            facts = {n: v for n, v in scores.items() if v is not None}
            facts |= {"aesthetics_by": "proxy", "hud_share": 0.0, "text_share": 0.0, "watermark": False}
            facts |= clip.facts
        out[stage] = _receipt(clip, stage, facts, Status.OK, ())
    return out


def _receipt(
    clip: Made, stage: str, facts: dict[str, Fact], status: Status, reasons: tuple[str, ...]
) -> Receipt:
    return Receipt(
        clip_id=clip.id,
        stage=stage,
        config="c",
        inputs="i",
        status=status,
        reasons=reasons,
        facts=facts,
        content="x",
    )

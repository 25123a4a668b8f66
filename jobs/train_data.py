"""Which clips of a corpus a run trains on, which it is measured on, and whether the two fit the model.

Everything that cannot work is refused here, before the first step. Source: spec/faults.md S5; DESIGN rule 9.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jobs.corpus_reader import Corpus
from jobs.train_config import DataConfig, TrainError
from pipeline.corpus import open_corpus
from pipeline.shards.inventory import ROOT
from pipeline.shards.read import read_index
from pipeline.store import StoreError
from schemas.latents import LatentsNote, TextNote
from schemas.policy import OUT
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.plan import Draw, Plan, PlanError, SampleTable, latents_read
from trainer.data.stream import share

VAL = "val"
PAIR = 2
"""Clips held out, at least, for a measure: most compare a clip with another one's actions or memory."""


@dataclass(frozen=True)
class TrainingData:
    """train: what is trained on. held_out: what gates and videos are made from; is_held_out: whether it is
    apart from `train` at all. root: hash of the corpus. codec, text: identities of what made its latents.
    redrawn: by "STAGE/EXPERT", steps that draw other samples, and how often they were asked to."""

    corpus: Corpus
    train: SampleTable
    held_out: SampleTable
    is_held_out: bool
    root: str
    codec: str
    text: str
    redrawn: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @staticmethod
    def open(url: str, config: DataConfig, preset: Preset) -> TrainingData:
        """Raises StoreError, CorpusError, or TrainError when latents or text are not what the model reads."""
        store = open_corpus(url)
        corpus = Corpus.open(store)
        table = corpus.table
        wanted = np.isin(table.tier, config.tiers) if config.tiers else table.tier != OUT
        if not wanted.any():
            tiers = ", ".join(f"{n} {tier}" for tier, n in Counter(table.tier.tolist()).items())
            raise TrainError(f"{url}: no sample is of the wanted tiers (there are {tiers})")
        held = _held_out(corpus, config.held_out) & wanted
        train, apart = wanted & ~held, np.count_nonzero(held) >= PAIR
        if not train.any():
            raise TrainError(
                f"{url}: every sample of the wanted tiers is held out (split {VAL}, or by its id, see "
                "`data: {held_out: ..}`): give more recordings"
            )
        codec, text = _fitting(corpus, int(table.row[wanted][0]), preset)
        return TrainingData(
            corpus,
            table.filter(train),
            table.filter(held if apart else train),
            bool(apart),
            _root(corpus),
            codec,
            text,
        )

    def plan(
        self, stage: Stage, preset: Preset, seed: int, data_world: int, expert: str = "all"
    ) -> RedrawnPlan:
        """Raises TrainError where a batch does not split over the ranks, or no clip can be used."""
        share(stage, 0, data_world)
        needed = min(latents_read(stage, preset, h) for h in stage.histories)
        usable = np.minimum(self.train.latents, self.train.actions_known)
        if not (usable >= needed).any():
            short = int(np.count_nonzero(self.train.latents < needed))
            unknown = len(self.train) - short
            raise TrainError(
                f"stage {stage.name} reads {needed} latents of a clip, and of {len(self.train)} clips "
                f"{short} are shorter and {unknown} have too few with known actions: give longer clips"
            )
        if stage.segments:
            self._segments(stage, int(self.train.row[np.argmax(usable >= needed)]))
        times = self.redrawn.get(f"{stage.name}/{expert}", {})
        try:
            return RedrawnPlan(self.train, stage, preset, seed, {int(k): n for k, n in times.items()})
        except PlanError as error:
            raise TrainError(f"{error} (`stages: {{{stage.name}: {{events: ..}}}}` of --config)") from None

    def _segments(self, stage: Stage, row: int) -> None:
        """Refuse latents without what stage 1 alone reads. row: of a clip that is long enough for one."""
        note = LatentsNote.model_validate_json(
            bytes(self.corpus.read(row, ("latents",))["latents"]["latents.json"])
        )
        if not note.segments:
            raise TrainError(
                f"stage {stage.name} reads independent segments, and the latents of {self.corpus.store.url} "
                "have none: curate with `latents: {segments: 4}`"
            )


class RedrawnPlan(Plan):
    """A plan in which some steps draw what another one of no run would: step k what step k + n * steps does,
    n times redrawn. All others draw what they did. times: n by step."""

    def __init__(
        self, table: SampleTable, stage: Stage, preset: Preset, seed: int, times: Mapping[int, int]
    ) -> None:
        super().__init__(table, stage, preset, seed)
        self._times = times

    def batch(self, step: int) -> tuple[Draw, ...]:
        return super().batch(step + self._times.get(step, 0) * self.stage.steps)


def _held_out(corpus: Corpus, part: float) -> npt.NDArray[np.bool_]:
    """bool [N]: split `val`; where there is none, about `part` of the recordings, each by its id alone:
    growth never holds out what was trained on."""
    table = corpus.table
    if (table.split == VAL).any():
        return np.asarray(table.split == VAL)
    index = read_index(corpus.store, ["sample_id", "recording_id"])
    of = dict(zip(index["sample_id"].to_pylist(), index["recording_id"].to_pylist(), strict=True))
    places = [_place(of[name]) for name in table.sample_id.tolist()]
    return np.array(places) < part


def _place(recording_id: str) -> float:
    """In [0, 1), keyed by the id."""
    return int(hashlib.sha256(f"held:{recording_id}".encode()).hexdigest()[:8], 16) / 2**32


def _fitting(corpus: Corpus, row: int, preset: Preset) -> tuple[str, str]:
    """(codec, text encoder) of a corpus, whose sizes are the model's. Raises TrainError."""
    members = corpus.read(row, ("latents", "text"))
    latents = LatentsNote.model_validate_json(bytes(members["latents"]["latents.json"]))
    text = TextNote.model_validate_json(bytes(members["text"]["text.json"]))
    size, wanted = (latents.height, latents.width), (preset.geometry.height, preset.geometry.width)
    if size != wanted:
        raise TrainError(
            f"{corpus.store.url} has latents of {size[0]}x{size[1]} pixels, preset {preset.name} is made for "
            f"{wanted[0]}x{wanted[1]}: curate with `latents: {{height: {wanted[0]}, width: {wanted[1]}}}`"
        )
    if text.width != preset.model.text_dim:
        raise TrainError(
            f"{corpus.store.url} has text of {text.width} values a token ({text.encoder}), preset "
            f"{preset.name} reads {preset.model.text_dim}: curate with the other text encoder"
        )
    return latents.codec, text.encoder


def _root(corpus: Corpus) -> str:
    try:
        return str(json.loads(corpus.store.read(ROOT))["root"])
    except (ValueError, KeyError, StoreError):
        raise TrainError(f"{corpus.store.url}/{ROOT} is missing or damaged: run `wp2 verify`") from None

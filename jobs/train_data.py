"""Which clips of a corpus a run trains on, which it is measured on, and whether the two fit the model.

Everything that cannot work is refused here, before the first step. Source: spec/faults.md S5; DESIGN rule 9.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass

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
from trainer.data.plan import Plan, PlanError, SampleTable, latents_read
from trainer.data.stream import share

VAL = "val"
LEAST = 8
"""Recordings without which none is held out: two of four would be half of a demo corpus."""


@dataclass(frozen=True)
class TrainingData:
    """train: what is trained on. held_out: what gates and videos are made from; is_held_out: whether it is
    apart from `train` at all. root: hash of the corpus. codec, text: identities of what made its latents."""

    corpus: Corpus
    train: SampleTable
    held_out: SampleTable
    is_held_out: bool
    root: str
    codec: str
    text: str

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
        train, apart = wanted & ~held, bool(held.any())
        codec, text = _fitting(corpus, int(table.row[wanted][0]), preset)
        return TrainingData(
            corpus,
            table.filter(train),
            table.filter(held if apart else train),
            apart,
            _root(corpus),
            codec,
            text,
        )

    def plan(self, stage: Stage, preset: Preset, seed: int, data_world: int) -> Plan:
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
        try:
            return Plan(self.train, stage, preset, seed)
        except PlanError as error:
            raise TrainError(f"{error} (`stages: {{{stage.name}: {{events: ..}}}}` of --config)") from None


def _held_out(corpus: Corpus, part: float) -> npt.NDArray[np.bool_]:
    """bool [N]: split `val`; where there is none, the recordings of the lowest keys, two or more of them."""
    table = corpus.table
    if (table.split == VAL).any():
        return np.asarray(table.split == VAL)
    index = read_index(corpus.store, ["sample_id", "recording_id"])
    of = dict(zip(index["sample_id"].to_pylist(), index["recording_id"].to_pylist(), strict=True))
    recordings = np.array([of[name] for name in table.sample_id.tolist()])
    names = sorted(set(recordings.tolist()), key=lambda r: hashlib.sha256(f"held:{r}".encode()).digest())
    if part <= 0 or len(names) < LEAST:
        return np.zeros(len(table), np.bool_)
    return np.isin(recordings, names[: max(2, round(part * len(names)))])


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

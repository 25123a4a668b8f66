"""`history` of what lies on disk: a run of `wp2 train`, or weights, on the held-out clips of a corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from jobs.evaluate.history import HistoryOptions, histories_of, measure, report
from jobs.evaluate.report import Report
from jobs.evaluate.world import EvaluationError
from jobs.export import choose
from jobs.model import checked_device
from jobs.train_config import DataConfig, load
from jobs.train_data import TrainingData
from trainer.config import ConfigError, Preset, preset
from trainer.curriculum import Objective, Stage, select
from trainer.model.adapters import Contents
from trainer.model.wan import WanModel
from trainer.run_folder import RUN, RunFolder
from trainer.state import load_weights
from trainer.weights.checkpoint import open_checkpoint
from trainer.weights.transfer import load as load_files

DEFAULT = "2b"
"""How weights are asked whose stage nobody names."""
MEASURED = ("1", "2a", "2b", "3")
NOT_HELD_OUT = "NO CLIP IS HELD OUT: a run trains on all of this corpus."
ASKED = (Objective.CLIP, Objective.QUERIES, Objective.CHUNKS)


def run(
    path: Path,
    corpus: str,
    stage: str | None,
    lengths: tuple[int, int],
    options: HistoryOptions,
    *,
    average: bool = True,
    device: str = "cpu",
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Measure a model. lengths: how many histories, and chunks of the longest.

    Raises UserError of the part that is wrong, in one line.
    """
    checked_device(device)
    sizes, models, name = _of_run(path, stage, average) if (path / RUN).is_file() else _of_files(path, stage)
    asked = _stage(sizes, name)
    data = TrainingData.open(corpus, DataConfig(), sizes)
    options = replace(options, histories=histories_of(asked, lengths[1], lengths[0]))
    place = torch.device(device)
    models = {expert: model.to(place) for expert, model in models.items()}
    readings = measure(models, sizes, asked, data.held_out, data.corpus.read, options, place, tick)
    settings = {
        "model": str(path),
        "corpus": corpus,
        "corpus root": data.root,
        "asked as stage": name,
        "held out": data.is_held_out,
        **asdict(options),
    }
    made = report(f"{path.name}, stage {name}", readings, settings)
    if data.is_held_out:
        return made
    return replace(made, notes=(*made.notes, NOT_HELD_OUT))


def _of_run(path: Path, stage: str | None, average: bool) -> tuple[Preset, dict[str, WanModel], str]:
    sizes = preset(str(RunFolder(path).read()["preset"]))
    if stage is None:  # the last one whose heads are of one velocity
        there = [name for name in MEASURED if (path / name).is_dir()]
        stage = there[-1] if there else None
    saved = choose(path, stage, None, lambda line: None)
    models = {}
    for expert, found in saved.items():
        with torch.device("meta"):
            model = WanModel(sizes.model)
        model = model.to_empty(device="cpu")
        load_weights(found, model, average=average)
        models[expert] = model.eval().requires_grad_(False)
    return sizes, models, stage or str(next(iter(saved.values())).note["stage"])


def _of_files(path: Path, stage: str | None) -> tuple[Preset, dict[str, WanModel], str]:
    found = open_checkpoint(path)
    if [e.name for e in found.experts] != list(found.preset.experts):
        raise EvaluationError(
            f"{path} is one expert of {len(found.preset.experts)}: give the folder that holds them"
        )
    if found.contents is not Contents.VELOCITY:
        raise EvaluationError(f"{path} is {found.contents.words}: flow loss is of models of one velocity")
    return found.preset, {e.name: load_files(e) for e in found.experts}, stage or DEFAULT


def _stage(sizes: Preset, name: str) -> Stage:
    try:
        stages = select(load(None, sizes.name).stages, name)
    except ConfigError as error:
        raise EvaluationError(f"--stage: {error}") from None
    if len(stages) != 1 or stages[0].objective not in ASKED:
        raise EvaluationError(f"--stage {name}: give 1, 2a, 2b or 3")
    return stages[0]

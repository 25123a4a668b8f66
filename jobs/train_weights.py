"""Weights that a run starts from or has finished: averages of its checkpoints, and exported files."""

from __future__ import annotations

from pathlib import Path

import torch

from jobs.train_config import TrainError
from trainer.checkpoint import Checkpoints
from trainer.config import Preset
from trainer.export import same_schedule
from trainer.model.adapters import Contents
from trainer.model.pdd_head import IntervalHead
from trainer.model.wan import WanModel
from trainer.run_folder import RunFolder
from trainer.schedule import PddSchedule
from trainer.state import load_weights, weight_shapes
from trainer.weights.checkpoint import open_checkpoint
from trainer.weights.transfer import load


def from_run(folder: RunFolder, stage: str, expert: str, preset: Preset, schedule: PddSchedule) -> WanModel:
    """The newest average of a stage, fp32 on the host, with the head that was trained.

    Raises TrainError where there is none, CheckpointError on few-step heads of another schedule.
    """
    checkpoints = Checkpoints(folder.checkpoints(stage, expert), say=lambda line: None)
    try:
        saved = checkpoints.newest()
    finally:
        checkpoints.close()
    if saved is None:
        raise TrainError(f"{folder.path} has no weights of stage {stage}, expert {expert}")
    heads = weight_shapes(saved).get("head.bank_weight", (1,))[0]
    if heads > 1:
        same_schedule(saved, schedule)
    model = unfilled(preset, heads)
    load_weights(saved, model, average=True)
    return model


def unfilled(preset: Preset, heads: int = 1) -> WanModel:
    """A network on the host for a checkpoint to fill, every parameter of it. heads: of few-step training."""
    with torch.device("meta"):
        sizes = preset.model
        head = IntervalHead(sizes.dim, sizes.patch_out, sizes.eps, heads) if heads > 1 else None
        model = WanModel(sizes, head)
    return model.to_empty(device="cpu")


def from_files(path: Path, expert: str, preset: Preset) -> WanModel:
    """An expert of exported weights with one velocity, fp32 on the host. Raises TrainError."""
    found = {e.name: e for e in open_checkpoint(path).experts}
    if expert not in found:
        raise TrainError(f"{path} has no expert {expert}: it has {', '.join(found)}")
    chosen = found[expert]
    if chosen.found.preset.name != preset.name:
        raise TrainError(f"{path} is of preset {chosen.found.preset.name}, not {preset.name}")
    if chosen.found.contents not in (Contents.BASE, Contents.VELOCITY):
        raise TrainError(f"{path} is {chosen.found.contents.words}: one velocity is needed")
    return load(chosen)

"""Curves of training, and what was made side by side with the truth."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.learn.evidence import HISTORIES, Evidence
from benchmarks.learn.model import (
    answers,
    decode,
    next_chunk,
    read_clips,
    usable,
    with_actions,
)
from jobs.evaluate.history import rolled
from schemas.action import YAW
from trainer.codec.base import to_rgb
from trainer.data.batch import Batch
from trainer.model.layout import Kind, teacher_forced
from trainer.run_folder import RunFolder

SHOWN = 6
SMOOTH = 25
"""Steps that a point of a curve is the mean of, at most."""

Picture = npt.NDArray[np.uint8]


def curves(runs: dict[str, Path], stages: tuple[str, ...], experts: tuple[str, ...], out: Path) -> None:
    """Loss of every stage and expert over its steps, a line a corpus."""
    figure = Figure(figsize=(3.0 * len(stages), 2.4 * len(experts)))
    FigureCanvasAgg(figure)
    for row, expert in enumerate(experts):
        for column, stage in enumerate(stages):
            axes = figure.add_subplot(len(experts), len(stages), row * len(stages) + column + 1)
            for name, run in runs.items():
                losses = _losses(RunFolder(run).expert(stage, expert) / "metrics.jsonl")
                if losses:
                    width = min(SMOOTH, len(losses))
                    smooth = np.convolve(losses, np.full(width, 1 / width), "valid")
                    axes.plot(np.arange(len(smooth)) + width, smooth, label=name, linewidth=1)
            axes.set_title(f"stage {stage}, expert {expert}", fontsize=8)
            axes.tick_params(labelsize=7)
            if axes.lines:
                axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def _losses(file: Path) -> list[float]:
    """By step; a step that was done again after a restart counts once."""
    if not file.is_file():
        return []
    by: dict[int, float] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        if "loss" in row:
            by[int(row["step"])] = float(row["loss"])
    return [by[step] for step in sorted(by)]


def next_chunks(evidence: Evidence, out: Path) -> None:
    """A row a clip: last known frame; ends of the true chunk, of the made one, of that under flipped yaw."""
    history = HISTORIES[-1]
    batch = _some(evidence, history, 4)
    rows = batch.actions[:, -4:].clone()
    rows[..., YAW] *= -1
    made = next_chunk(evidence.playing, evidence.preset, batch)
    flipped = next_chunk(evidence.playing, evidence.preset, with_actions(batch, rows))
    truth = batch.latents[:, :, -4:]
    shown = [decode(evidence.codec, batch, evidence.preset, t) for t in (truth, made, flipped)]
    ends = [shown[0].last, *(d.pixels[:, :, -1:] for d in shown)]
    _write(out, ("last known frame", "truth", "made", "made, yaw flipped"), _grid(ends))


def recalled(evidence: Evidence, out: Path) -> None:
    """A row a clip: what is asked for, and the answer of the own memory, of another's."""
    times, latents = (4, 13), 24
    batch = _some(evidence, 6, 0)
    known = evidence.codec.decode(batch.latents[:, :, :1])[1]
    parts = [batch.latents[:, :, list(times)]]
    parts += [
        answers(evidence.recalling, evidence.preset, batch, times, memory=m) for m in (None, rolled(batch))
    ]
    pictures = [evidence.codec.decode(p, known)[0] for p in parts]
    columns = [p[:, :, at : at + 1] for at in (3, 7) for p in pictures]
    labels = [
        f"latent {t} of {latents}: {what}" for t in times for what in ("truth", "own memory", "another's")
    ]
    _write(out, tuple(labels), _grid(columns))


def returns(evidence: Evidence, out: Path) -> None:
    """A row a return: last known frame, truth, and what was made with the own memory, none, another's."""
    places, _ = evidence.places()
    by: dict[int, list[int]] = {}
    for place in places:
        by.setdefault(place.history, []).append(place.clip)
    if not by:
        return
    history = max(by, key=lambda h: len(by[h]))
    clips = by[history][:SHOWN]
    if len(clips) < 2:
        return
    batch = read_clips(evidence.data, evidence.preset, clips, 4 * (history + 1), history)
    usual = teacher_forced(evidence.preset, history, 1)
    made = [
        batch.latents[:, :, -4:],
        next_chunk(evidence.playing, evidence.preset, batch),
        next_chunk(evidence.playing, evidence.preset, batch, layout=usual.without(Kind.CMP)),
        next_chunk(evidence.playing, evidence.preset, batch, memory=rolled(batch)),
    ]
    shown = [decode(evidence.codec, batch, evidence.preset, m) for m in made]
    ends = [shown[0].last, *(d.pixels[:, :, -1:] for d in shown)]
    _write(out, ("last known frame", "truth", "own memory", "no memory", "another's memory"), _grid(ends))


def _some(evidence: Evidence, history: int, target: int) -> Batch:
    latents = 4 * history + target
    rows = usable(evidence.data, latents)[:SHOWN]
    return read_clips(evidence.data, evidence.preset, rows, latents, history)


def _grid(columns: list[Tensor]) -> Picture:
    """Columns of [B, 3, 1, H, W] as one picture, twice as large."""
    rows = [
        np.concatenate([to_rgb(column[k : k + 1]).numpy()[0] for column in columns], axis=1)
        for k in range(columns[0].shape[0])
    ]
    whole = np.concatenate(rows)
    size = (2 * whole.shape[1], 2 * whole.shape[0])
    return np.asarray(cv2.resize(whole, size, interpolation=cv2.INTER_NEAREST), np.uint8)


def _write(out: Path, labels: tuple[str, ...], picture: Picture) -> None:
    """With a line of labels above the columns."""
    head = np.full((22, picture.shape[1], 3), 255, np.uint8)
    width = picture.shape[1] // len(labels)
    for k, label in enumerate(labels):
        cv2.putText(
            head, label, (k * width + 4, 15), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA
        )
    cv2.imwrite(str(out), np.concatenate([head, picture])[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])

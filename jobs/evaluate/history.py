"""`history`: does a model use its actions and its memory? Held-out flow loss, with one of them made wrong.

The same latents, noise and noise levels are predicted five times, so that all else is paired:
  own        as in training
  actions    the rows of the target are those of another clip
  other      the compressed memory is that of another clip; sink and anchor stay
  zeroed     the compressed memory is made of zeros; sink and anchor stay
  window     instead of memory, the newest latents at full resolution, as many as cost the same tokens
Loss by sigma and by length of the history; differences with bootstrap intervals over clips.
Source: issue of evaluation, 6; spec/worldplay2.md c.3, c.4, e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from jobs.evaluate.report import Figure, Line, Number, Report
from jobs.evaluate.stats import Interval, interval, paired
from jobs.evaluate.world import EvaluationError
from trainer.config import Preset
from trainer.curriculum import Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import Draw, SampleTable, latents_read
from trainer.data.sample import Reader, make_batch
from trainer.model.layout import (
    Frame,
    Kind,
    Layout,
    Rule,
    clip,
    frame_queries,
    memory,
    target,
    teacher_forced,
)
from trainer.noise import noise_of
from trainer.objectives.flow import Network, velocity_error
from trainer.objectives.sigma import even_levels

QUERIES = 4
"""Latents of the history that are asked for in stage 2a, evenly spread over it."""


class Condition(StrEnum):
    OWN = "own"
    ACTIONS = "actions"
    OTHER = "other"
    ZEROED = "zeroed"
    WINDOW = "window"


@dataclass(frozen=True)
class HistoryOptions:
    """clips: of each history, at most. batch: of a pass, two or more. levels: noise levels of each expert.
    histories: in chunks, of the target behind them."""

    clips: int = 32
    batch: int = 4
    levels: int = 4
    histories: tuple[int, ...] = (2, 4, 8)
    seed: int = 0


@dataclass(frozen=True)
class Reading:
    """Loss of one clip at one noise level under one condition. history: in chunks."""

    sample: str
    expert: str
    sigma: float
    history: int
    condition: Condition
    loss: float


def conditions(stage: Stage, history: int) -> tuple[Condition, ...]:
    """What can be made wrong: there is no memory without history, and no window in frame queries."""
    if not history:
        return (Condition.OWN, Condition.ACTIONS)
    every = tuple(Condition)
    return every[:-1] if stage.objective is Objective.QUERIES else every


def histories_of(stage: Stage, most: int, count: int = 2) -> tuple[int, ...]:
    """At most `count` of a stage's histories, up to `most` chunks, the longest among them; those with memory
    where there are any."""
    known = sorted(h for h in stage.histories if h) or [0]
    fit = [h for h in known if h <= most] or known[:1]
    return tuple(
        sorted({fit[-1 - k * (len(fit) - 1) // max(1, count - 1)] for k in range(min(count, len(fit)))})
    )


def layout_of(stage: Stage, preset: Preset, history: int, condition: Condition) -> tuple[Layout, Rule]:
    """The sequence that is predicted. Stage 3: one chunk, as in a rollout."""
    rule = Rule.CAUSAL if stage.objective is Objective.CHUNKS else Rule.FULL
    chunks = stage.target // preset.chunk
    if stage.objective is Objective.QUERIES:
        latents = history * preset.chunk
        times = tuple(sorted({(2 * k + 1) * latents // (2 * QUERIES) for k in range(QUERIES)}))
        return frame_queries(preset, history, times), rule
    if condition is Condition.WINDOW:
        return window(preset, history) + target(preset, history, history + chunks), rule
    if stage.objective is Objective.CHUNKS:
        return teacher_forced(preset, history, chunks), rule
    return clip(preset, history, chunks), rule


def window(preset: Preset, history: int) -> Layout:
    """The newest latents before the target, at full resolution, that cost no more tokens than its memory."""
    budget = memory(preset, history).tokens // preset.grid.tokens
    stop = history * preset.chunk
    times = range(max(0, stop - budget), stop)
    return Layout(tuple(Frame(Kind.TMP, history, k, preset.grid) for k in times))


def held(stage: Stage, preset: Preset) -> Stage:
    """A stage as it is measured: no text is dropped, and stage 3 predicts one chunk."""
    short = preset.chunk if stage.objective is Objective.CHUNKS else stage.target
    return replace(stage, target=short, text_drop=0.0, field_drop=0.0)


@torch.no_grad()
def measure(
    models: Mapping[str, Network],
    preset: Preset,
    stage: Stage,
    table: SampleTable,
    reader: Reader,
    options: HistoryOptions,
    device: torch.device,
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> list[Reading]:
    """Every clip of a table, at most `options.clips` of each history, under every condition.

    models: experts by name. Raises EvaluationError where no two clips have a history of the options.
    """
    measured = held(stage, preset)
    groups = [(h, rows) for h in options.histories for rows in _batches(table, measured, preset, h, options)]
    if not groups:
        needed = min(latents_read(measured, preset, h) for h in options.histories)
        raise EvaluationError(
            f"stage {stage.name}: no two of {len(table)} clips have {needed} latents with known actions: "
            "give more or longer clips"
        )
    found: list[Reading] = []
    for done, (history, rows) in enumerate(groups):
        tick(done, len(groups))
        draws = [Draw(int(table.row[k]), 0, int(table.row[k]), history) for k in rows]
        batch = make_batch(draws, reader, measured, preset, options.seed).to(device)
        for expert, model in models.items():
            levels = even_levels(stage.sigma, preset, expert, options.levels)
            found += read(model, batch, measured, preset, expert, levels, options.seed)
    tick(len(groups), len(groups))
    return found


def read(
    model: Network,
    batch: Batch,
    stage: Stage,
    preset: Preset,
    expert: str,
    levels: Tensor,
    seed: int,
    wanted: Sequence[Condition] | None = None,
) -> Iterator[Reading]:
    """One batch at each of `levels` under each condition. Another clip is the next one of the batch.

    Raises EvaluationError on a loss that is no finite number."""
    for number, sigma in enumerate(levels.tolist()):
        for condition in wanted or conditions(stage, batch.history):
            layout, rule = layout_of(stage, preset, batch.history, condition)
            value = error(model, batch, stage, layout, rule, sigma, seed, number, condition)
            for sample, loss in zip(batch.samples, value.tolist()):
                if not math.isfinite(loss):
                    raise EvaluationError(
                        f"clip {sample}, expert {expert}, sigma {sigma:.4g}, {batch.history} chunks of "
                        f"history, {condition}: the loss is {loss}: these weights, or the latents of this "
                        "clip, are no finite numbers"
                    )
                yield Reading(sample, expert, sigma, batch.history, condition, loss)


def error(
    model: Network,
    batch: Batch,
    stage: Stage,
    layout: Layout,
    rule: Rule,
    sigma: float,
    seed: int,
    number: int,
    condition: Condition,
    share: float = 1.0,
) -> Tensor:
    """[B] loss under a condition. share: how much of what is wrong is mixed in, for controls of this measure;
    of actions, the share of rows."""
    given = batch
    if condition is Condition.ACTIONS:
        given = replace(batch, actions=_other_actions(batch, layout, share))
    source = {Condition.OTHER: rolled(batch), Condition.ZEROED: zeroed(batch)}.get(condition)
    memory_of = None if source is None else mixed(batch, source, share)
    frames = layout.count(Kind.PRED)
    shape = (*batch.latents.shape[1:2], frames, *batch.latents.shape[3:])
    noise = noise_of(batch.positions, shape, batch.latents.device, seed, "history", number)
    level = torch.full((len(batch), 1), sigma, dtype=torch.float64, device=batch.latents.device)
    image = stage.objective is not Objective.QUERIES
    return velocity_error(model, given, layout, rule, level, noise, memory=memory_of, image=image)[:, 0]


def rolled(batch: Batch) -> Batch:
    """The latents of another clip in place of each."""
    return _with(batch, lambda latents: latents.roll(1, 0))


def zeroed(batch: Batch) -> Batch:
    return _with(batch, torch.zeros_like)


def mixed(batch: Batch, other: Batch, share: float) -> Batch:
    """(1 - share) of a batch's latents and `share` of another's."""
    return replace(
        batch,
        latents=torch.lerp(batch.latents, other.latents, share),
        condition=torch.lerp(batch.condition, other.condition, share),
        low=torch.lerp(batch.low, other.low, share),
    )


def _with(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    latents, condition, low = map(change, (batch.latents, batch.condition, batch.low))
    return replace(batch, latents=latents, condition=condition, low=low)


def _other_actions(batch: Batch, layout: Layout, share: float) -> Tensor:
    """Rows of the predicted latents, from the last back, are those of the next clip."""
    times = [k for k in layout.only(Kind.PRED).times if k]
    chosen = times[len(times) - round(share * len(times)) :]
    actions = batch.actions.clone()
    actions[:, chosen] = batch.actions.roll(1, 0)[:, chosen]
    return actions


def _batches(
    table: SampleTable, stage: Stage, preset: Preset, history: int, options: HistoryOptions
) -> list[list[int]]:
    """Places in the table of clips that have such a history, in batches of two or more."""
    usable = np.minimum(table.latents, table.actions_known)
    fit = np.flatnonzero(usable >= latents_read(stage, preset, history))[: options.clips].tolist()
    cut = [fit[k : k + options.batch] for k in range(0, len(fit), options.batch)]
    if len(cut) > 1 and len(cut[-1]) == 1:
        cut[-2:] = [cut[-2] + cut[-1]]
    return [rows for rows in cut if len(rows) > 1]


# --- what the readings say --------------------------------------------------------------------------------


def losses(readings: Sequence[Reading], condition: Condition) -> Interval:
    own = [r for r in readings if r.condition is condition]
    return interval([r.loss for r in own], [r.sample for r in own])


def worse(readings: Sequence[Reading], condition: Condition) -> Interval:
    """How much larger the loss is under a condition than as in training: paired, case by case."""
    by = {_case(r): r.loss for r in readings if r.condition is Condition.OWN}
    wrong = [r for r in readings if r.condition is condition]
    return paired([r.loss for r in wrong], [by[_case(r)] for r in wrong], [r.sample for r in wrong])


def _case(reading: Reading) -> tuple[str, str, float, int]:
    return reading.sample, reading.expert, reading.sigma, reading.history


def report(world: str, readings: Sequence[Reading], settings: dict[str, object]) -> Report:
    """Tables, curves over sigma and over history, and every reading."""
    there = [c for c in Condition if any(r.condition is c for r in readings)]
    parts = [("all", list(readings))]
    for expert in dict.fromkeys(r.expert for r in readings):
        parts.append((f"expert {expert}", [r for r in readings if r.expert == expert]))
    for history in sorted({r.history for r in readings}):
        parts.append((f"history {history}", [r for r in readings if r.history == history]))
    numbers = []
    for part, own in parts:
        numbers.append(Number(part, "loss", losses(own, Condition.OWN), "lower"))
        numbers += [
            Number(part, f"{c} - own", worse(own, c), "higher", 0.0) for c in there if c is not Condition.OWN
        ]
    sigmas = tuple(sorted({r.sigma for r in readings}))
    lengths = tuple(sorted({r.history for r in readings}))
    figures = (
        Figure("Loss by noise level", "sigma", _lines(readings, there, sigmas, lambda r: r.sigma)),
        Figure("Loss by chunks of history", "chunks", _lines(readings, there, lengths, lambda r: r.history)),
    )
    return Report(
        "history",
        world,
        settings,
        tuple(numbers),
        figures,
        cases=tuple({**asdict(r), "condition": str(r.condition)} for r in readings),
        notes=(
            "Flow loss of held-out clips, all under the same noise. A positive difference means that the "
            "model was using what was made wrong.",
            "window: a model is not trained on it; it says what so many tokens of the newest past are worth.",
        ),
    )


def _lines(
    readings: Sequence[Reading],
    there: Sequence[Condition],
    places: Sequence[float],
    of: Callable[[Reading], float],
) -> tuple[Line, ...]:
    return tuple(
        Line(
            str(condition),
            tuple(float(x) for x in places),
            tuple(losses([r for r in readings if of(r) == x], condition) for x in places),
        )
        for condition in there
    )

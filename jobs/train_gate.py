"""Gates: whether a stage learnt what the next one builds on, measured on held-out clips.

  actions     (stage 1)   the loss is higher under another clip's actions
  recall      (stage 2a)  frame queries: it is higher with another clip's memory
  memory      (stage 2b)  it is higher with another clip's memory, and with zeroed memory
  next_chunk  (stage 3)   all three
  few_steps   (stage 4)   four steps of the student come nearer to many of the teacher than four of its own
Value: the lower end of the 95 % interval of the difference, as a share of the loss; the least of several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from jobs.evaluate.few_steps import SHARE, Pair, compare, verdict
from jobs.evaluate.history import (
    Condition,
    HistoryOptions,
    histories_of,
    losses,
    measure,
    report,
    worse,
)
from jobs.evaluate.world import EvaluationError
from jobs.train import Gate, GateResult
from jobs.train_config import TrainConfig, TrainError
from jobs.train_data import TrainingData
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.plan import Draw
from trainer.data.sample import make_batch
from trainer.model.wan import WanModel
from trainer.sampler import ManySteps
from trainer.schedule import schedule_of

ASKED = {
    "actions": (Condition.ACTIONS,),
    "recall": (Condition.OTHER,),
    "memory": (Condition.OTHER, Condition.ZEROED),
    "next_chunk": (Condition.ACTIONS, Condition.OTHER, Condition.ZEROED),
}
BAR = 0.0


def make_gate(
    data: TrainingData, preset: Preset, config: TrainConfig, device: torch.device | None = None
) -> Gate:
    """device: where the networks compute; where their weights lie if None, which with offloaded ones is not
    the same."""

    def gate(stage: Stage, models: Mapping[str, WanModel]) -> GateResult:
        if stage.gate not in ASKED:
            raise TrainError(f"stage {stage.name}: no gate {stage.gate!r}: one of {', '.join(ASKED)}")
        options = HistoryOptions(
            clips=config.gate.clips,
            batch=config.gate.batch,
            levels=config.gate.levels,
            histories=histories_of(stage, config.gate.history),
            seed=config.seed,
        )
        place = device or next(iter(models.values())).patch_embedding.weight.device
        try:
            readings = measure(models, preset, stage, data.held_out, data.corpus.read, options, place)
        except EvaluationError as error:
            return GateResult(stage.gate, -1.0, BAR, False, data.is_held_out, f"not measured: {error}")
        base = losses(readings, Condition.OWN).mean
        found = {condition: worse(readings, condition) for condition in ASKED[stage.gate]}
        ends = [i.low / base for i in found.values()]
        value = min(ends) if all(math.isfinite(e) for e in ends) else -1.0
        detail = "; ".join(
            f"{condition} - own {100 * i.mean / base:+.2f} % of the loss "
            f"({100 * i.low / base:+.2f} to {100 * i.high / base:+.2f})"
            for condition, i in found.items()
        )
        clips = len({r.sample for r in readings})
        kept = "held-out" if data.is_held_out else "TRAINED"
        return GateResult(
            stage.gate,
            value,
            BAR,
            value > BAR,
            data.is_held_out,
            f"{detail}; {clips} {kept} clips",
            {k: v for k, v in report("", readings, {}).json().items() if k in ("numbers",)},
        )

    return gate


def few_steps_gate(
    data: TrainingData,
    preset: Preset,
    config: TrainConfig,
    stage: Stage,
    student: Mapping[str, WanModel],
    teacher: Mapping[str, WanModel],
    codec: Codec | None,
    device: torch.device | None = None,
) -> GateResult:
    """Of a stage 4; value: the lower end of the interval of the gain in dB, where the share is reached.
    device: as for `make_gate`.

    Not passed where it cannot be measured: not all experts are trained, nothing decodes, no clip is long
    enough."""

    def unmeasured(why: str) -> GateResult:
        return GateResult(stage.gate, -1.0, BAR, False, data.is_held_out, f"not measured: {why}")

    if set(student) != set(preset.experts):
        return unmeasured("a chunk is sampled with all experts")
    if codec is None:
        return unmeasured("nothing decodes the latents: give `look: {codec: ..}`")
    table = data.held_out
    behind = max(h for h in histories_of(stage, config.gate.history))
    fit = np.flatnonzero(np.minimum(table.latents, table.actions_known) >= preset.chunk * (behind + 1))
    if not len(fit):
        return unmeasured(f"no held-out clip has {preset.chunk * (behind + 1)} latents with known actions")
    one = replace(stage, target=preset.chunk, histories=(behind,), text_drop=0.0, field_drop=0.0)
    place = device or next(iter(student.values())).patch_embedding.weight.device
    pairs: list[Pair] = []
    chosen = fit[: config.gate.clips].tolist()
    for at in range(0, len(chosen), config.gate.batch):
        draws = [Draw(k, 0, int(table.row[k]), behind) for k in chosen[at : at + config.gate.batch]]
        batch = make_batch(draws, data.corpus.reader(one), one, preset, config.seed).to(place)
        schedule = schedule_of(preset)
        many = ManySteps(guidance=stage.pdd.guidance)
        pairs += compare(student, teacher, preset, schedule, batch, codec, config.seed, many)
    found = verdict(pairs)
    kept = "held-out" if data.is_held_out else "TRAINED"
    return GateResult(
        stage.gate,
        found.gain.low if found.share >= SHARE and math.isfinite(found.gain.low) else -1.0,
        BAR,
        found.passed,
        data.is_held_out,
        f"{found.line()}; {len(pairs)} {kept} clips",
        {"share": found.share, "student_db": found.student, "euler_db": found.euler},
    )

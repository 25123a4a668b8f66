"""Gates: whether a stage learnt what the next one builds on, measured on held-out clips.

  actions     (stage 1)   the loss is higher under another clip's actions
  recall      (stage 2a)  frame queries: it is higher with another clip's memory
  memory      (stage 2b)  it is higher with another clip's memory, and with zeroed memory
  next_chunk  (stage 3)   all three
Value: the lower end of the 95 % interval of the difference, as a share of the loss; the least of several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.model.wan import WanModel

ASKED = {
    "actions": (Condition.ACTIONS,),
    "recall": (Condition.OTHER,),
    "memory": (Condition.OTHER, Condition.ZEROED),
    "next_chunk": (Condition.ACTIONS, Condition.OTHER, Condition.ZEROED),
}
BAR = 0.0


def make_gate(data: TrainingData, preset: Preset, config: TrainConfig) -> Gate:
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
        device = next(iter(models.values())).patch_embedding.weight.device
        try:
            readings = measure(models, preset, stage, data.held_out, data.corpus.read, options, device)
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

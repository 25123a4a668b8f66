"""A run of the loop on little: fed from a list, with checkpoints that only remember."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.trainer.flow_support import batch_of
from tests.trainer.model_support import PRESET, noisy_expert
from trainer.curriculum import Objective, OptimConfig, Stage
from trainer.data.batch import Batch
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.parallelize import parallelize
from trainer.loop import Hooks, Task, train_expert
from trainer.metrics import StepRecord
from trainer.objectives.flow import Minimised

PARALLEL = Parallel(checkpointing=False)


def two_chunks(steps: int) -> Stage:
    """Stage 3 with two chunks as target, two samples a step."""
    optim = OptimConfig(lr=1e-3, ema=0.5)
    return Stage("3", Objective.CHUNKS, None, steps, 8, (1, 2), batch=2, micro=1, optim=optim)


@dataclass
class Fed:
    """A loader of one sample a pass. slow: seconds that a step's data take here. history: of a step."""

    rank: int = 0
    passes: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)
    history: Callable[[int], int] = lambda step: 1
    waited_s: float = 0.0

    def steps(self, first: int) -> Iterator[list[Batch]]:
        step = first
        while True:
            took = self.slow.get(step, 0.0)
            time.sleep(took)
            self.waited_s += took
            places = [4 * step + self.passes * self.rank + k for k in range(self.passes)]
            yield [batch_of((place,), self.history(step), 2) for place in places]
            step += 1


@dataclass
class Remembered:
    """Checkpoints that note which steps were saved."""

    steps: list[int] = field(default_factory=list)

    def newest(self) -> None:
        return None

    def save(self, step: int, state: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        self.steps.append(step)

    def wait(self) -> None:
        pass


def run_loop(
    mesh: Mesh,
    folder: Path,
    loader: Fed,
    *,
    steps: int = 2,
    checkpoints: Any = None,
    minimise: Minimised | None = None,
    save_every: int = 100,
    parallel: Parallel = PARALLEL,
    say: Callable[[str], None] = lambda line: None,
    seen: Callable[[StepRecord], None] = lambda record: None,
) -> list[StepRecord]:
    """Train the expert `high` of `two_chunks`. Returns what the first rank was told."""
    told: list[StepRecord] = []

    def hear(record: StepRecord) -> None:
        told.append(record)
        seen(record)

    model = parallelize(noisy_expert(), mesh, PARALLEL)
    task = Task(
        two_chunks(steps), PRESET, "high", 7, parallel, folder, save_every=save_every, minimise=minimise
    )
    kept = Remembered() if checkpoints is None else checkpoints
    train_expert(task, model, mesh, loader, kept, Hooks(seen=hear, say=say))  # type: ignore[arg-type]
    return told

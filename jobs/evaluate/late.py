"""A world whose weights are read when it plays for the first time: a run that goes on may have nothing to
play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jobs.evaluate.world import Case, Frames, ModelWorld
from jobs.model import OpenModel, Tick


@dataclass
class LateWorld:
    """weights: folder, whose name is the world's. model: what was opened of it."""

    weights: Path
    model: OpenModel
    tick: Tick
    _world: ModelWorld | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.weights.name or str(self.weights)

    def check(self, cases: Iterable[Case]) -> None:
        """Loads codec and text encoder, and reads every prompt. Raises UserError of what cannot be played."""
        self.tick("loading codec and text encoder", 0, 1)
        _ = self.model.codec
        for where, prompt in {
            prompt: (case.name, prompt) for case in cases for prompt in case.prompts
        }.values():
            self.model.encoded(prompt, where)

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        if self._world is None:
            self._world = ModelWorld.loaded(self.weights, self.model, self.tick)
        return self._world.play(case, seed)

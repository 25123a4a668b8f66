"""What a run reads of its folder before it trains: where a stage starts, what is finished, what gates said.

Disks show ranks different things at different times, so the first rank asks, and tells all (`Mesh.first`).
Source: spec/faults.md S5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.train_config import TrainError
from trainer.checkpoint import list_steps
from trainer.config import Preset
from trainer.curriculum import STAGES, Objective, Stage
from trainer.run_folder import RUN, RunFolder, read_json

if TYPE_CHECKING:
    from jobs.train import Options


@dataclass(frozen=True)
class OnDisk:
    """stages, experts: those that this run trains."""

    folder: RunFolder
    preset: Preset
    stages: tuple[Stage, ...]
    experts: tuple[str, ...]
    options: Options

    def source(self, stage: Stage) -> str | Path:
        """What a stage starts from: the name of a stage, a path of weights, or "fresh weights"."""
        names = [s.name for s in self.stages]
        here = stage.start in names or (
            stage.start is not None and all(self.finished(stage.start, e) for e in self.experts)
        )
        if here and not (self.options.init is not None and stage is self.stages[0]):
            return _after(stage)
        if self.options.init is not None:
            return self.options.init.absolute()
        if stage.start is None:
            return "fresh weights"
        alone = stage.objective not in (Objective.PDD, Objective.STABLE)  # these read it at every step
        if alone and all(self.begun(stage.name, e) for e in self.experts):
            return str(self.folder.read()["stages"][stage.name]["start_weights"])
        raise TrainError(
            f"stage {stage.name} starts from stage {stage.start}, which {self.folder.path} has not finished: "
            "train it first, or give --init WEIGHTS"
        )

    def known(self, stage: Stage, what: str, source: str) -> None:
        """Refuse weights that will not be there when a stage wants them."""
        if source in {s.name for s in STAGES}:
            before = [s.name for s in self.stages[: self.stages.index(stage)]]
            known = source in before or all(self.finished(source, e) for e in self.experts)
        else:
            known = Path(source).exists()
        if not known:
            raise TrainError(
                f"stage {stage.name}: `stable: {{{what}: {source}}}` is no finished stage of "
                f"{self.folder.path} and no path of exported weights"
            )

    def finished(self, stage: str, expert: str) -> bool:
        """Has an expert come to the last step that the run remembers for a stage."""
        steps = [s.steps for s in self.stages if s.name == stage]
        if not steps and (self.folder.path / RUN).is_file():
            known = self.folder.read()["stages"]
            steps = [known[stage]["steps"]] if stage in known else []
        done = list_steps(self.folder.checkpoints(stage, expert))[0]
        return bool(steps) and done[-1:] == steps

    def check_step(self) -> None:
        """Raises TrainError where --step would be passed over: nothing of this command is in training."""
        if self.options.step is None or any(s.objective is Objective.STABLE for s in self.stages):
            return
        if all(self.finished(s.name, e) for s in self.stages for e in self.experts):
            raise TrainError(
                f"--step {self.options.step}: all of {', '.join(s.name for s in self.stages)} is finished, "
                "and it takes back what is in training: move the later checkpoints of an expert away first"
            )

    def begun(self, stage: str, expert: str) -> bool:
        """Is there a checkpoint of it to go on from."""
        return bool(list_steps(self.folder.checkpoints(stage, expert))[0])

    def needs_gate(self, stage: Stage, source: str | Path) -> None:
        """Raises TrainError where the stage before has not passed its gate, which no override names. source:
        what the stage starts from."""
        known = self.folder.read()["stages"]
        if (
            stage.start is None
            or stage.start not in known
            or not known[stage.start]["gate"]
            or source != _after(stage)
        ):
            return
        name = known[stage.start]["gate"]
        if name in self.options.overrides:
            return
        measured = (self.gate(stage.start), self.folder.gate(stage.start, ()))  # of all experts: of these too
        file = next((f for f in measured if f.is_file()), None)
        if file is None:
            if any(self.begun(stage.name, e) for e in self.experts):
                return  # behind the gate
            raise TrainError(
                f"stage {stage.name} does not start: gate {name} of stage {stage.start} was not measured: "
                f"run --stages {stage.start} again, or give --gate-override {name}"
            )
        found = read_json(file)
        if not found["passed"]:
            raise TrainError(
                f"stage {stage.name} does not start: gate {found['name']} of stage {stage.start} failed "
                f"({found['detail']}); look at {file}, or give --gate-override {found['name']}"
            )

    def gate(self, stage: str) -> Path:
        """The file of a stage's gate, of the experts that are trained."""
        return self.folder.gate(stage, self.experts if self.experts != self.preset.experts else ())

    def remember(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Write what the run is, or hold it against what it was: see `RunFolder.remember`."""
        options = self.options
        return self.folder.remember(
            identity, self._at(), accept=options.accept_changes, redraw=options.redraw
        )

    def _at(self) -> dict[str, dict[str, int]]:
        """By stage and expert, the step from which training goes on; stage 5 trains "all" at once."""
        found: dict[str, dict[str, int]] = {}
        asked = self.options.step  # of the first that is not finished, or of stage 5
        for stage in self.stages:
            at, together = {}, stage.objective is Objective.STABLE
            for expert in self.preset.experts:
                steps = list_steps(self.folder.checkpoints(stage.name, expert))[0]
                at[expert] = steps[-1] if steps else 0
                if together or (expert in self.experts and at[expert] < stage.steps):
                    at[expert] = asked if asked in steps else at[expert]
                    asked = asked if together else None
            found[stage.name] = {"all": min(at.values())} if together else at
        return found


def _after(stage: Stage) -> str:
    return f"stage {stage.start}"

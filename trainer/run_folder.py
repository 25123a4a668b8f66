"""Where a run of training keeps what: one owner of its paths.

RUN/run.json                              what is trained, from what; what was changed, from which step
RUN/<stage>/<expert>/checkpoints/         trainer/checkpoint.py
RUN/<stage>/<expert>/metrics.jsonl        a row a step; tensorboard/ beside it
RUN/<stage>/rollouts/<expert>-00000100/   validation videos; `end-` of both experts
RUN/<stage>/gate.json                     the held-out measure, and whether the next stage may start
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import UserError

RUN = "run.json"
CHANGES, REDRAWN = "changes", "redrawn"
CHANGEABLE = re.compile(
    r"stages\.[^.]+\.(precision|optim\..+|stable\.(critic_lr|critic_steps|guidance|floor|limit))"
)
"""Settings that may change within a run, so that one which diverges is no dead end: with them, steps draw the
same samples and checkpoints fit."""


class RunError(UserError):
    """A run folder that belongs to something else; one line."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    def stage(self, stage: str) -> Path:
        return self.path / stage

    def expert(self, stage: str, expert: str) -> Path:
        return self.path / stage / expert

    def checkpoints(self, stage: str, expert: str) -> Path:
        return self.expert(stage, expert) / "checkpoints"

    def rollouts(self, stage: str, expert: str, step: int) -> Path:
        """expert: that was in training, or "end" for both of a finished stage."""
        return self.stage(stage) / "rollouts" / f"{expert}-{step:08d}"

    def gate(self, stage: str, experts: tuple[str, ...] = ()) -> Path:
        """experts: where only some were trained and measured."""
        return self.stage(stage) / f"{'-'.join(('gate', *experts))}.json"

    def remember(
        self,
        identity: Mapping[str, Any],
        at: Mapping[str, Mapping[str, int]],
        *,
        accept: bool = False,
        redraw: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Write what this run is, or hold it against what it was; returns what is written.

        identity: JSON values by key. `stages` maps names to settings: stages that the run did not have yet
        are added, all else must be equal. at: by stage and expert, the step from which training goes on.
        accept: settings of CHANGEABLE may differ; `changes` has each change, and the step of each expert from
        which it holds. redraw: STAGE/EXPERT/STEP of steps to come that draw other samples, once for each time
        that it is given; `redrawn` counts them.
        Raises RunError that names the keys which differ.
        """
        given: dict[str, Any] = json.loads(json.dumps(identity))
        file = self.path / RUN
        known = read_json(file) if file.is_file() else given
        for name in known["stages"].keys() & given["stages"].keys():  # of a run that did not remember it
            known["stages"][name].setdefault("precision", given["stages"][name]["precision"])
        before = {k: v for k, v in known.items() if k not in (CHANGES, REDRAWN)}
        stages = {**given["stages"], **known["stages"]}
        wanted = {**given, "stages": {**stages, **given["stages"]}}
        changed = differences({**before, "stages": stages}, wanted)
        fixed = {key: line for key, line in changed.items() if not CHANGEABLE.fullmatch(key)}
        if fixed or (changed and not accept):
            lines = list((fixed or changed).values())
            shown = "; ".join(lines[:6]) + ("; ..." if len(lines) > 6 else "")
            way = "choose another --out" if fixed else "choose another --out, or give --accept-changes"
            if fixed and accept:
                way += "; --accept-changes is for rates, optimizer and precision, not for what is learnt"
            raise RunError(f"{self.path} was begun with other settings ({shown}): {way}")
        changes = known.get(CHANGES, [])
        if changed:
            names = sorted({key.split(".")[1] for key in changed})
            since = {name: dict(at[name]) for name in names}
            changes = [*changes, {"settings": list(changed.values()), "from": since}]
        for entry in changes:  # who goes back to an earlier step goes on from it with the settings of now
            for name, steps in entry["from"].items():
                steps |= {e: min(steps[e], step) for e, step in at.get(name, {}).items() if e in steps}
        redrawn = _redrawn(known.get(REDRAWN, {}), redraw, at, wanted["stages"])
        wanted = {**wanted, CHANGES: changes, REDRAWN: redrawn}
        write_json(file, wanted)
        return wanted

    def read(self) -> dict[str, Any]:
        """What this run is. Raises RunError where the folder is no run."""
        if not (self.path / RUN).is_file():
            raise RunError(f"{self.path} is no run of `wp2 train`: it has no {RUN}")
        return read_json(self.path / RUN)


def _redrawn(
    known: Mapping[str, Mapping[str, int]],
    redraw: Sequence[str],
    at: Mapping[str, Mapping[str, int]],
    stages: Mapping[str, Any],
) -> dict[str, dict[str, int]]:
    """STAGE/EXPERT -> step -> how often other samples were asked for."""
    found = {place: dict(times) for place, times in known.items()}
    for text, times in Counter(redraw).items():
        place, _, step = text.rpartition("/")
        stage, _, expert = place.partition("/")
        if expert not in at.get(stage, {}) or not step.isdecimal():
            there = ", ".join(f"{s}/{e}/.." for s, experts in at.items() for e in experts)
            raise RunError(f"--redraw {text}: give STAGE/EXPERT/STEP, of {there}")
        if int(step) >= stages[stage]["steps"]:
            last = stages[stage]["steps"] - 1
            raise RunError(f"--redraw {text}: the steps of stage {stage} are 0 to {last}")
        step = str(int(step))
        if times <= found.get(place, {}).get(step, 0):
            continue  # the same command again
        if int(step) < at[stage][expert]:
            raise RunError(
                f"--redraw {text}: that step is made, training goes on from step {at[stage][expert]}: give "
                "--step to go back before it"
            )
        found.setdefault(place, {})[step] = times
    return found


def differences(before: Any, after: Any, where: str = "") -> dict[str, str]:
    """`key: before -> after` of every leaf in which two JSON values differ, by dotted key."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, str] = {}
        for key in sorted(before.keys() | after.keys()):
            found |= differences(before.get(key), after.get(key), f"{where}.{key}" if where else key)
        return found
    return {} if before == after else {where: f"{where}: {_short(before)} -> {_short(after)}"}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """Raises RunError when it is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise RunError(f"{path} is damaged: remove it, or choose another --out") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: remove it, or choose another --out")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """There under its name when it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

"""Where a run of training keeps what: one owner of its paths.

RUN/run.json                              what is trained, from what
RUN/<stage>/<expert>/checkpoints/         trainer/checkpoint.py
RUN/<stage>/<expert>/metrics.jsonl        a row a step; tensorboard/ beside it
RUN/<stage>/rollouts/<expert>-00000100/   validation videos; `end-` of both experts
RUN/<stage>/gate.json                     the held-out measure, and whether the next stage may start
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import UserError

RUN = "run.json"


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

    def remember(self, identity: Mapping[str, Any]) -> None:
        """Write what this run is, or hold it against what it was.

        identity: JSON values by key. `stages` maps names to settings: stages that the run did not have yet
        are added, all else must be equal.
        Raises RunError that names the keys which differ.
        """
        given: dict[str, Any] = json.loads(json.dumps(identity))
        file = self.path / RUN
        known = read_json(file) if file.is_file() else None
        if known is not None:
            stages = {
                **known["stages"],
                **{k: v for k, v in given["stages"].items() if k not in known["stages"]},
            }
            wanted = {**given, "stages": {**stages, **given["stages"]}}
            changed = differences({**known, "stages": stages}, wanted)
            if changed:
                shown = "; ".join(changed[:6]) + ("; ..." if len(changed) > 6 else "")
                raise RunError(f"{self.path} was begun with other settings ({shown}): choose another --out")
            given = wanted
        write_json(file, given)

    def read(self) -> dict[str, Any]:
        """What this run is. Raises RunError where the folder is no run."""
        if not (self.path / RUN).is_file():
            raise RunError(f"{self.path} is no run of `wp2 train`: it has no {RUN}")
        return read_json(self.path / RUN)


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """`key: before -> after` of every leaf in which two JSON values differ, by dotted key."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[str] = []
        for key in sorted(before.keys() | after.keys()):
            found += differences(before.get(key), after.get(key), f"{where}.{key}" if where else key)
        return found
    return [] if before == after else [f"{where}: {_short(before)} -> {_short(after)}"]


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

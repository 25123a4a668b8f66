"""Settings of `wp2 train`: frozen dataclasses with a default each, and a YAML file that changes some.

A file holds what differs from the defaults of its preset; `stages` is by name there. An unknown key is
refused by name. `wp2 train --show-config` prints all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from pipeline import strict_yaml
from schemas.errors import UserError
from trainer import config as sizes
from trainer.curriculum import Stage, curriculum, select
from trainer.distributed.mesh import Parallel
from trainer.stable.watch import WatchConfig


class TrainError(UserError):
    """A run that cannot be begun or go on; one line."""


@dataclass(frozen=True)
class DataConfig:
    """tiers: of selection that are trained on; empty for all but `out`. threads: that read; ahead: steps that
    are read before they are needed. held_out: share of recordings that gates measure on where the corpus has
    no split `val`, each by its own id."""

    tiers: tuple[str, ...] = ()
    threads: int = 4
    ahead: int = 2
    held_out: float = 0.1


@dataclass(frozen=True)
class LookConfig:
    """Validation rollouts. every: steps, 0 for the end of a stage alone; clips: how many, 0 for none; chunks:
    of each. steps, guidance: of the sampler. codec: what decodes, KIND:PATH; the corpus's own if empty."""

    every: int = 0
    clips: int = 2
    chunks: int = 4
    steps: int = 10
    guidance: float = 3.5
    codec: str = ""


@dataclass(frozen=True)
class GateConfig:
    """The held-out measure between stages. clips: at most; batch: of a pass; levels: noise levels of each
    expert; history: chunks, at most, where the stage has several."""

    clips: int = 16
    batch: int = 4
    levels: int = 2
    history: int = 8


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `wp2 train` can be told. save_every: steps from checkpoint to checkpoint, save_minutes:
    minutes, 0 for none; whichever comes first. Of checkpoints `keep` stay. host_ema: the average of the
    weights lies in host memory."""

    preset: str = "small"
    seed: int = 0
    stages: tuple[Stage, ...] = ()
    parallel: Parallel = field(default_factory=Parallel)
    data: DataConfig = field(default_factory=DataConfig)
    look: LookConfig = field(default_factory=LookConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    save_every: int = 100
    save_minutes: float = 15.0
    keep: int = 2
    host_ema: bool = False

    def __post_init__(self) -> None:
        if self.save_every < 1 or not self.save_minutes >= 0.0:
            raise sizes.ConfigError(
                f"save_every is {self.save_every}, save_minutes {self.save_minutes}: "
                "at least 1 step, and 0 minutes or more"
            )

    @property
    def sizes(self) -> sizes.Preset:
        return sizes.preset(self.preset)

    def selected(self, span: str, steps: int | None) -> tuple[Stage, ...]:
        """Stages of "1-3". steps: of each, where given. Raises TrainError."""
        try:
            chosen = select(self.stages, span)
        except sizes.ConfigError as error:
            raise TrainError(f"--stages: {error}") from None
        return chosen if steps is None else tuple(replace(stage, steps=steps) for stage in chosen)


def load(path: Path | None, preset: str | None) -> TrainConfig:
    """Defaults of the preset, changed by the YAML file. preset: goes before that of the file.

    Raises TrainError that names the first wrong key.
    """
    changes = {} if path is None else _read(path)
    name = str(preset or changes.get("preset") or "small")
    try:
        sizes.preset(name)
    except sizes.ConfigError as error:
        raise TrainError(str(error)) from None
    defaults = plain(TrainConfig(name, stages=curriculum(name)))
    merged = _merged(defaults, {**changes, "preset": name}, str(path))
    stages = [{"name": stage, **values} for stage, values in merged.pop("stages").items()]
    try:
        return TypeAdapter(TrainConfig).validate_python({**merged, "stages": stages})
    except ValidationError as error:
        first = error.errors()[0]
        loc = list(first["loc"])
        if loc[:1] == ["stages"] and len(loc) > 1:
            loc[1] = stages[int(loc[1])]["name"]
        where = ": ".join([str(path), *([".".join(map(str, loc))] if loc else [])])
        message = first["msg"].removeprefix("Value error, ")
        whole = isinstance(first["input"], dict)  # of a stage, whose message says what is wrong
        got = "" if whole else f" (got {str(first['input'])[:80]})"
        raise TrainError(f"{where}: {message}{got}") from None


def plain(config: TrainConfig) -> dict[str, Any]:
    """As YAML and JSON have it; `stages` by name."""
    found: dict[str, Any] = _plain(asdict(config))
    found["stages"] = {stage.pop("name"): stage for stage in found["stages"]}
    return found


def shown(config: TrainConfig) -> str:
    """As YAML that `load` reads back."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=110).rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        data = strict_yaml.load(path.read_text("utf-8"))
    except UnicodeDecodeError:
        raise TrainError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise TrainError(f"cannot read config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise TrainError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise TrainError(f"{path} must hold keys such as 'stages:', not a {type(data).__name__}")
    return data


def _merged(defaults: dict[str, Any], changes: dict[Any, Any], name: str, where: str = "") -> dict[str, Any]:
    """The defaults with what a file changes. Raises TrainError for a key that no default has."""
    out = dict(defaults)
    for key, value in changes.items():
        place = f"{where}.{key}" if where else str(key)
        if str(key) not in defaults:
            near = difflib.get_close_matches(str(key), defaults, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(defaults)}"
            raise TrainError(f"{name}: unknown key {place!r}; {hint}")
        before = defaults[str(key)]
        if not isinstance(before, dict):
            out[str(key)] = value
        elif isinstance(value, dict):
            out[str(key)] = _merged(before, value, name, place)
        elif value is not None:  # a section that is named and left empty is one of defaults
            raise TrainError(f"{name}: {place} holds keys ({', '.join(before)}), not {value!r}")
    return out

"""The one config file. Every key has a default and a meaning; an unknown key is refused by name."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.engine import EngineConfig
from pipeline import strict_yaml
from pipeline.actions import ActionsConfig
from pipeline.caption.stage import CaptionConfig, ServeConfig
from pipeline.clips.segments import ClipsConfig
from pipeline.gates import GatesConfig
from pipeline.ingest import IngestConfig
from pipeline.latents.stage import LatentsConfig
from pipeline.latents.text import TextConfig
from pipeline.observe import ObserveConfig
from pipeline.pose.stage import PoseConfig
from pipeline.shards.write import ShardConfig
from pipeline.sources import SourceConfig
from schemas.errors import UserError
from schemas.policy import Policy


class ConfigError(UserError):
    """A config file that cannot be used; the message is one line."""


class RunConfig(BaseModel):
    """How a run is carried out. Nothing here changes the bytes of a shard, except the two marked so."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cpus: int | None = Field(
        default=None, ge=1, description="CPUs of a local Ray; all of the machine if null"
    )
    in_flight: int | None = Field(default=None, ge=1, description="most clips in flight; 2 per CPU if null")
    attempts: int = Field(default=3, ge=1, description="tries of a clip before it counts as failed")
    max_failed_share: float = Field(default=0.05, ge=0, le=1, description="share of clips that may fail")
    min_failed: int = Field(default=10, ge=0, description="up to this many failures never end a run")
    partition_size: int = Field(default=1000, ge=1, description="clips of a partition (new generations only)")
    val_share: float = Field(
        default=0.02, ge=0, le=1, description="share of recordings in split val (new ones)"
    )
    dashboard: bool = Field(default=False, description="start Ray's dashboard and state API on 127.0.0.1")


class CurateConfig(BaseModel):
    """Everything that `wp2 curate` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: SourceConfig = Field(default=SourceConfig(), description="what to read of a source")
    clips: ClipsConfig = Field(
        default=ClipsConfig(), description="how new recordings are cut; clips that exist keep their frames"
    )
    ingest: IngestConfig = Field(default=IngestConfig(), description="strict decode and working copies")
    gates: GatesConfig = Field(default=GatesConfig(), description="what is rejected before any dear stage")
    observe: ObserveConfig = Field(default=ObserveConfig(), description="the pass that analyses pictures")
    pose: PoseConfig = Field(default=PoseConfig(), description="camera poses")
    actions: ActionsConfig = Field(default=ActionsConfig(), description="inputs and the action rows")
    caption: CaptionConfig = Field(default=CaptionConfig(), description="structured captions")
    serve: ServeConfig = Field(
        default=ServeConfig(), description="where a captioning model is served, and what it may cost"
    )
    engines: EngineConfig = Field(default=EngineConfig(), description="how --serve starts vLLM")
    latents: LatentsConfig = Field(
        default=LatentsConfig(), description="pictures as latents, in tars of their own"
    )
    text: TextConfig = Field(default=TextConfig(), description="prompts as embeddings, in tars of their own")
    select: Policy = Field(default=Policy(), description="which clips deserve training; rewrites no tar")
    shards: ShardConfig = Field(default=ShardConfig(), description="tars and index")
    run: RunConfig = Field(default=RunConfig(), description="how the run is carried out")
    storage: dict[str, Any] = Field(
        default={}, description="fsspec options of remote sources and corpora (endpoint, profile)"
    )


def load(path: Path | None) -> CurateConfig:
    """The config of a YAML file, or the defaults. Raises ConfigError in one line."""
    if path is None:
        return CurateConfig()
    try:
        data = strict_yaml.load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return parse(data if data is not None else {}, str(path))


def parse(data: Any, name: str) -> CurateConfig:
    """Validate parsed YAML. Raises ConfigError naming the first wrong key, and the nearest known one."""
    if where := _not_finite(data):
        raise ConfigError(f"{name}: {where} is not a finite number")
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must hold sections such as 'ingest:', not a {type(data).__name__}")
    try:
        # A section that is named and left empty is a section of defaults.
        return CurateConfig.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{name}: unknown key {where!r}{_nearest(first['loc'])}") from None
        raise ConfigError(f"{name}: {where}: {first['msg']} (got {first['input']!r})") from None


def _not_finite(data: Any, where: str = "") -> str:
    """Where a value is infinite or no number; "" where none is."""
    if isinstance(data, float) and not math.isfinite(data):
        return where or "the value"
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = (_not_finite(value, f"{where}.{key}" if where else str(key)) for key, value in items)
    return next(filter(None, found), "")


def _nearest(loc: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = CurateConfig
    for part in loc[:-1]:
        field = model.model_fields.get(str(part)) if model else None
        model = _model_of(field.annotation) if field else None
    known = list(model.model_fields) if model else []
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys are {', '.join(known)}"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def render(config: BaseModel, indent: int = 0) -> str:
    """The resolved config as YAML, each key under a comment with its meaning."""
    pad = "  " * indent
    lines: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if field.description:
            lines.append(f"{pad}# {field.description}")
        if isinstance(value, BaseModel):
            lines += [f"{pad}{name}:", render(value, indent + 1)]
        else:
            plain = config.model_dump(mode="json", include={name})[name]
            text = yaml.safe_dump(
                plain, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False
            )
            lines.append(f"{pad}{name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines)

"""What a source answers: the recordings that lie there, and what was passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.sources.keymap import KeyMap
from pipeline.sources.records import events_digest
from pipeline.sources.sidecar import sidecar_digest
from pipeline.store import Stat, Store
from schemas.clip import Perspective, Sidecar


class SourceConfig(BaseModel):
    """Settings of one source."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    licence: str = Field(default="unknown", description="licence of recordings whose entry states none")
    key_map: str = Field(
        default="", description="path or URL of the key map; empty: games.yaml in the source"
    )

    @field_validator("key_map")
    @classmethod
    def _same_everywhere(cls, value: str) -> str:
        # Workers read it too, and need not share the working folder of the command.
        if not value or "://" in value:
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError:
            raise ValueError(f"{value!r} names a home that does not exist here") from None


@dataclass(frozen=True, slots=True)
class Found:
    """A recording in a source.

    path, log, poses, events: relative to the source; "" where there is none. A sidecar that the key map names
    is named here whether or not it lies there. size, version: of the video, as `Store.list` gives them.
    entry: index of what the key map says of it; -1 when no entry matches. Entries may share a game.
    recording: name of the recording that it is a cut of, where the key map states one.
    """

    path: str
    size: int
    version: str
    game: str
    perspective: Perspective
    licence: str
    log: str = ""
    poses: str = ""
    events: str = ""
    entry: int = -1
    recording: str = ""


@dataclass(frozen=True)
class Discovery:
    """found: recordings by path. ignored: other files, counted by suffix. sidecars: size and version of the
    sidecars that lie there, by path. notes: one line each for what the owner of the source should know
    (missing sidecars, entries without recordings, names that cannot be kept). key_map: what the sidecars are
    read by."""

    found: tuple[Found, ...]
    ignored: Mapping[str, int]
    sidecars: Mapping[str, Stat] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    key_map: KeyMap = field(default_factory=KeyMap)


class Sidecars(TypedDict, total=False):
    """The fields of `Clip` that name sidecars."""

    log: Sidecar
    poses: Sidecar
    events: Sidecar


def sidecars_of(found: Found, source: Store, key_map: KeyMap) -> Sidecars:
    """Sidecars of a recording, each with the digest of what is read of it."""
    out: Sidecars = {}
    if found.entry < 0:
        return out
    entry = key_map.games[found.entry]
    if found.log:
        out["log"] = Sidecar(path=found.log, digest=sidecar_digest(source, found.log, entry.log))
    if found.poses:
        out["poses"] = Sidecar(path=found.poses, digest=sidecar_digest(source, found.poses, entry.poses))
    if found.events and entry.events:
        out["events"] = Sidecar(path=found.events, digest=events_digest(source, found.events, entry.events))
    return out

"""The cutting stage: from a recording to its signals and its segments, which become clips.

Source: DESIGN 2, rules 1, 7.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from pipeline.alignment import align
from pipeline.clips.segments import ClipsConfig, segments
from pipeline.clips.signals import SIGNALS as SIGNALS
from pipeline.clips.signals import Bools, Signals, pack, watch, with_log
from pipeline.events import recording_events
from pipeline.frames import MediaError
from pipeline.inputs import read_inputs
from pipeline.isolate import IsolationError, Limits, worker
from pipeline.sources import SourceConfig
from pipeline.sources.gameplay import entry_of
from pipeline.sources.keymap import KeyMapError, State
from pipeline.sources.sidecar import SidecarError, read_columns
from pipeline.stage import Fact, Receipt, Result, Unit
from pipeline.store import Store, sha256_file
from schemas import SCHEMA_VERSION
from schemas.clip import Clip, ClipKind, FrameTable
from schemas.event import GameEvent
from schemas.quality import Reason, Verdict, because
from schemas.segment import LeftOut, Segment

SEGMENTS = "segments.json"
WHOLE = f"0-0:{ClipKind.NAVIGATION}"


class Once(BaseModel):
    """Settings that a receipt of this stage depends on: none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Clips:
    """Stage of a recording (a unit whose clip is a whole file): signals.parquet and segments.json.

    A recording is cut once, when it is new: its clips are rows of the catalogue, which never change, so
    `config` is empty and a receipt stays fresh when a setting changes. Settings are for new recordings.
    source: where the key map is, as in `Pose`.
    """

    name: ClassVar[str] = "clips"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ("sha256",)

    def __init__(self, settings: ClipsConfig, source: SourceConfig) -> None:
        self.settings = settings
        self._source = source

    @property
    def config(self) -> BaseModel:
        return Once()

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        """A file that cannot be decoded is ok without outputs: it becomes one clip, and ingest refuses it for
        its own reason. A log that cannot be read is left aside and named in the facts: the actions stage
        refuses it."""
        c = self.settings
        with unit.source.local(unit.clip.source_path) as source:
            size = source.stat().st_size
            if size != unit.clip.bytes or sha256_file(source) != unit.clip.sha256:
                detail = f"{size} bytes now, {unit.clip.bytes} in the catalogue; discover it again"
                return Result(Verdict.failed(because(Reason.SOURCE_CHANGED, detail)))
            try:
                limits = Limits(c.timeout_s, c.memory_mb << 20, c.worker_calls)
                seen = worker(limits).call(signals_of, source)
            except IsolationError as error:  # nobody has looked: not a clip until somebody has
                return Result(Verdict.failed(because(error.reason, error.detail)))
            except MediaError as error:
                facts: dict[str, Fact] = {"clips": 1, "spans": WHOLE, "undecodable": str(error)}
                return Result(Verdict.ok(), facts=facts)
        told, unread = self._log(unit, seen)
        events, unmined = self._events(unit, seen)
        made = segments(told, events, c)
        (scratch / SIGNALS).write_bytes(pack(told))
        (scratch / SEGMENTS).write_text(_text(made))
        files = {name: scratch / name for name in (SIGNALS, SEGMENTS)}
        return Result(Verdict.ok(), files, _facts(told, events, made) | unread | unmined)

    def _log(self, unit: Unit, seen: Signals) -> tuple[Signals, dict[str, Fact]]:
        """Signals with what the log says, and why it says nothing."""
        states: dict[str, Bools] = {}
        free: Bools | None = None
        unread: dict[str, Fact] = {}
        if unit.clip.log is not None:
            try:
                states, free = read_log(unit, self._source, seen)
            except (SidecarError, KeyMapError) as error:
                unread["log_unread"] = str(error)
        return with_log(seen, states, free, self.settings.idle_s), unread

    def _events(self, unit: Unit, seen: Signals) -> tuple[tuple[GameEvent, ...], dict[str, Fact]]:
        try:
            return recording_events(unit, self._source, seen.pts, seen.time_base), {}
        except (SidecarError, KeyMapError) as error:
            return (), {"events_unread": str(error)}


def signals_of(source: Path) -> Signals:
    """What the pictures of a file show; runs in the decode worker. Raises MediaError."""
    return watch(source)


def read_log(unit: Unit, source: SourceConfig, seen: Signals) -> tuple[dict[str, Bools], Bools | None]:
    """States that the key map names, bool [F] each; where the log knows that nothing is pressed, bool [F], or
    None where it does not tell all inputs.

    Raises SidecarError when the log cannot be read as the key map says, KeyMapError without an entry.
    """
    part = entry_of(unit, source).log
    if part is None or unit.clip.log is None:
        return {}, None
    path, table = unit.clip.log.path, _table(seen)
    inputs = read_inputs(unit.source, path, part, table)
    free = np.all([v == 0 for v in inputs.values.values()], axis=0) if part.complete else None
    columns = read_columns(unit.source, path, part)
    # A state is that of the frame beside its row, also where inputs belong to the step before.
    beside = align(table, part.model_copy(update={"row": "next"}), columns, path)
    states: dict[str, Bools] = {}
    for state in State:
        held = [beside.at(columns[s.column]) > s.above for s in part.states if s.state is state]
        if held:
            states[str(state)] = np.any(held, axis=0)
    return states, free


def read_segments(corpus: Store, receipt: Receipt) -> list[Segment]:
    """Segments of a recording, in order; none where it could not be decoded."""
    if not receipt.has(SEGMENTS):
        return []
    held = json.loads(corpus.read(receipt.output(SEGMENTS).path))
    if held["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"segments.json has schema {held['schema_version']}, this is {SCHEMA_VERSION}")
    return [Segment.model_validate(s) for s in held["segments"]]


def read_spans(receipt: Receipt) -> list[tuple[int, int, ClipKind]]:
    """The clips of a recording, in order, from its receipt alone: first frame, last + 1, kind; (0, 0, kind)
    where the whole file is one clip."""
    out = []
    for text in str(receipt.facts["spans"]).split():
        span, kind = text.split(":")
        start, stop = span.split("-")
        out.append((int(start), int(stop), ClipKind(kind)))
    return out


def _spans(made: list[Segment]) -> str:
    """ "0-1050:navigation 1100-1500:event"; "0-0:<kind>" where one clip is the whole recording."""
    if len(made) == 1:
        return f"0-0:{made[0].kind}"
    return " ".join(f"{s.start}-{s.stop}:{s.kind}" for s in made if s.kind is not None)


def _table(seen: Signals) -> FrameTable:
    """The frames of the whole file, as logs lie against them."""
    return FrameTable(
        time_base=seen.time_base,
        pts=seen.pts - seen.pts[0],
        source_index=np.arange(len(seen), dtype=np.int64),
        pixels=seen.pixels,
        ok=np.ones(len(seen), np.bool_),
        repeat=np.zeros(len(seen), np.bool_),
    )


def _text(made: list[Segment]) -> str:
    held = {
        "schema_version": SCHEMA_VERSION,
        "segments": [s.model_dump(mode="json", exclude_none=True) for s in made],
    }
    return json.dumps(held, sort_keys=True, indent=1) + "\n"


def _facts(seen: Signals, events: tuple[GameEvent, ...], made: list[Segment]) -> dict[str, Fact]:
    step = int(np.median(np.diff(seen.pts))) if len(seen) > 1 else 1
    edges = np.append(seen.pts, seen.pts[-1] + step)
    seconds = dict.fromkeys(LeftOut, 0.0)
    for s in made:
        if s.left_out is not None:
            seconds[s.left_out] += float(int(edges[s.stop] - edges[s.start]) * seen.time_base)
    return {
        "frames": len(seen),
        "duration_s": float(int(edges[-1] - edges[0]) * seen.time_base),
        "cuts": int(seen.cut.sum()),
        "events": len(events),
        "clips": sum(s.kind is not None for s in made),
        "spans": _spans(made),
        **{f"left_out_{reason}_s": round(value, 6) for reason, value in seconds.items()},
    }

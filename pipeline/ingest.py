"""Ingest: from a source file to a clip's frame table, its media file and its decode report.

The media file is the source itself where that is clean. A container that is merely odd is copied packet by
packet into an mp4 and accepted when a strict decode shows the same pictures; anything else is re-encoded.
Policy, case by case: docs/ingest.md. Source: DESIGN rule 1; spec/faults.md D1, D2, D4, D6, W1.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import av.error
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline import working_copy
from pipeline.clips.signals import read_signals
from pipeline.damage import END
from pipeline.frames import Decoded, MediaError, Part, frame_pass
from pipeline.isolate import IsolationError, Limits, worker
from pipeline.media import FRAMES, MEDIA, MediaTable, Probe, pack
from pipeline.picture import FULL_RANGE
from pipeline.stage import Fact, Result, Unit
from pipeline.store import sha256_file
from pipeline.timing import Timing, plan
from schemas import SCHEMA_VERSION
from schemas.clip import Clip, FrameTable
from schemas.quality import Reason, Verdict, because
from schemas.timeline import windows

REPORT = "report.json"
# Mean change of gray@320 below which a frame holds the one before. An encoder refines a still picture: the
# 106 equal frames of a frozen clip change by at most 0.017; the slowest moving frames of the pack by 0.1.
HELD = 0.05


class IngestConfig(BaseModel):
    """Settings of ingest."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    vfr: Literal["resample", "reject"] = Field(
        default="resample",
        description="a variable-rate source: resample to the rate of its median step, or reject it",
    )
    max_fps: float = Field(
        default=40.0,
        gt=0,
        description="a source above this is halved (even frames stay) until it is not: 60 becomes 30",
    )
    crf: int = Field(
        default=12,
        ge=0,
        le=51,
        description="x264 quality of working copies; 12 keeps every frame of the test clips above 44 dB",
    )
    timeout_s: float = Field(default=1800.0, gt=0, description="wall time of one clip in the decode worker")
    memory_mb: int = Field(
        default=4096, gt=0, description="address space, in MiB, that one clip may add to the decode worker"
    )
    worker_calls: int = Field(
        default=200, gt=0, description="clips after which the decode worker is replaced"
    )


class Ingest:
    """Stage: strict decode in a disposable process, frame table, working copy, decode report."""

    name: ClassVar[str] = "ingest"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ("sha256",)

    def __init__(self, config: IngestConfig) -> None:
        self.config: IngestConfig = config

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        """Outputs frames.parquet, report.json and, where the source is not clean, media.mp4."""
        limits = Limits(self.config.timeout_s, self.config.memory_mb << 20, self.config.worker_calls)
        with unit.source.local(unit.clip.source_path) as source:
            size = source.stat().st_size
            if size != unit.clip.bytes or sha256_file(source) != unit.clip.sha256:
                detail = f"{size} bytes now, {unit.clip.bytes} in the catalogue; discover it again"
                return Result(Verdict.failed(because(Reason.SOURCE_CHANGED, detail)))
            cut = Cut.of(unit)
            try:
                made = worker(limits).call(prepare, source, scratch, self.config, cut)
            except IsolationError as error:
                return Result(Verdict.failed(because(error.reason, error.detail)))
        verdict = Verdict.rejected(made.rejected) if made.rejected else Verdict.ok()
        files = {name: scratch / name for name in (FRAMES, MEDIA, REPORT) if (scratch / name).exists()}
        return Result(verdict, files, made.facts)


@dataclass(frozen=True)
class Cut:
    """Where a part of a recording lies, as the strict pass that cut it saw the whole.

    start: frame of the file that is the clip's first. origin: its time in seconds, exact. pixels: uint64 [F],
    hashes of the clip's pictures.
    """

    start: int
    part: Part
    origin: Fraction
    pixels: npt.NDArray[np.uint64]

    @staticmethod
    def of(unit: Unit) -> Cut | None:
        """None for a clip that is its whole file. Raises StoreError when the recording's signals are gone."""
        clip = unit.clip
        if not clip.stop:
            return None
        seen = read_signals(unit.corpus, clip.model_copy(update={"start": 0, "stop": 0}))
        keys = np.flatnonzero(seen.key[: clip.start + 1])
        key = int(seen.pts[keys[-1]]) if len(keys) else None
        stop = int(seen.pts[clip.stop]) if clip.stop < len(seen.pts) else END
        part = Part(int(seen.pts[clip.start]), stop, key)
        origin = int(seen.pts[clip.start] - seen.pts[0]) * seen.time_base
        return Cut(clip.start, part, origin, seen.pixels[clip.start : clip.stop])

    def decode(self, source: Path) -> tuple[Decoded, Part]:
        """The strict decode of the part, and how it was read: from the key frame before it where that shows
        the same pictures as the pass over the whole recording, else from the first packet."""
        for part in (self.part, replace(self.part, key=None)):
            decoded = frame_pass(source, part=part)
            if np.array_equal(decoded.pixels, self.pixels):
                return decoded, part
        raise RuntimeError("two decodes of the same source gave different pictures; run the clip again")


@dataclass(frozen=True)
class Prepared:
    """Outcome of one source: its facts, and the reason that speaks against it, or ""."""

    facts: dict[str, Fact]
    rejected: str = ""


def prepare(source: Path, folder: Path, config: IngestConfig, cut: Cut | None = None) -> Prepared:
    """Everything that touches the bytes of a source; runs in the decode worker and writes into `folder`."""
    part = None
    try:
        probe = Probe()
        if cut is None:
            decoded = frame_pass(source, [probe])
        else:
            decoded, part = cut.decode(source)
    except MediaError as error:
        _write(folder, {"rejected": str(error), "source_bytes": source.stat().st_size})
        return Prepared({}, str(error))
    stream, report = decoded.report.stream, decoded.report
    timing = plan(decoded.pts, decoded.ok, report.damaged, stream.time_base, stream.rates, config.max_fps)
    container, picture = oddities(decoded, timing)
    if cut is not None:
        container, picture = [], ["part", *picture]
    if not timing.constant and config.vfr == "reject":
        rejected = because(Reason.VFR, "frame times fit no constant rate, and the setting is vfr: reject")
        _write(folder, {"rejected": rejected, "source": _source_report(decoded)})
        return Prepared(_source_facts(decoded), rejected)
    target = folder / MEDIA
    kind, why = "none", [*container, *picture]
    table: MediaTable | None = None
    if container and not picture:
        kind, table = "remux", _remuxed(source, target, decoded, timing.rate)
        if table is None:
            kind, why = "encode", [*why, "remux_differs"]
    if picture or (container and table is None):
        kind, table = "encode", _encoded(source, target, decoded, timing, config.crf, cut, part)
    if table is None:
        table = probe.table(decoded, _frames(decoded, np.arange(len(decoded)), decoded.ok))
    (folder / FRAMES).write_bytes(pack(table))
    shape = working_copy.geometry(stream)
    size = (stream.width, stream.height) if kind != "encode" else shape.size
    facts, shown = _facts(table, timing.rate)
    _write(
        folder,
        {
            "source": _source_report(decoded),
            "working_copy": kind,
            "why": why,
            "picture": asdict(shape),
            **shown,
        },
    )
    return Prepared(
        {
            **_source_facts(decoded),
            **facts,
            "width": size[0],
            "height": size[1],
            "working_copy": kind,
            "why": ",".join(why),
            "cropped_columns": shape.width - shape.cropped[0],
            "cropped_rows": shape.height - shape.cropped[1],
        }
    )


def oddities(decoded: Decoded, timing: Timing) -> tuple[list[str], list[str]]:
    """Why a source is not clean: what a stream copy can cure, and what needs another picture or time."""
    stream, report = decoded.report.stream, decoded.report
    container = {
        "container": not stream.container.startswith("mov,mp4") or stream.brand == "qt",
        "streams": stream.streams > 1,
        "start": bool(decoded.pts[0] != 0),
        "no_index": stream.header_frames == 0,
        "header_count": stream.header_frames not in (0, len(decoded)),
    }
    damage = not decoded.ok.all() or report.bad_packets or report.lost or report.unplaced or report.damaged
    picture = {
        "codec": stream.codec not in ("h264", "hevc"),
        "pixel_format": stream.pix_fmt not in ("yuv420p", "yuvj420p"),
        "full_range": stream.color_range == FULL_RANGE or stream.pix_fmt.startswith("yuvj"),
        "rotation": stream.rotation != 0,
        "anamorphic": stream.sample_aspect != 1,
        "odd_size": bool(stream.width % 2 or stream.height % 2),
        "vfr": not timing.constant,
        "fps": timing.factor > 1,
        "damage": bool(damage),
    }
    return [n for n, odd in container.items() if odd], [n for n, odd in picture.items() if odd]


def _remuxed(source: Path, target: Path, decoded: Decoded, rate: Fraction) -> MediaTable | None:
    """The table of a stream copy, or None (and no file) where it does not show the same frames."""
    probe = Probe()
    try:
        working_copy.remux(source, target, decoded, rate)
        copy = frame_pass(target, [probe])
    except (av.error.FFmpegError, MediaError):
        target.unlink(missing_ok=True)  # mp4 cannot hold these packets
        return None
    if not (np.array_equal(copy.pixels, decoded.pixels) and _is_plain(copy, rate)):
        target.unlink()
        return None
    return probe.table(copy, _frames(copy, np.arange(len(copy)), copy.ok))


def _encoded(
    source: Path,
    target: Path,
    decoded: Decoded,
    timing: Timing,
    crf: int,
    cut: Cut | None,
    part: Part | None,
) -> MediaTable:
    working_copy.encode(source, target, decoded, timing, crf, part)
    probe = Probe()
    copy = frame_pass(target, [probe])
    if len(copy) != len(timing.source_index) or not _is_plain(copy, timing.rate):
        raise RuntimeError(f"the working copy shows {len(copy)} of {len(timing.source_index)} frames")
    first, origin = (cut.start, cut.origin) if cut else (0, Fraction(0))
    return probe.table(copy, _frames(copy, timing.source_index + first, timing.ok, origin))


def _is_plain(copy: Decoded, rate: Fraction) -> bool:
    """Undamaged, counted right by its header, and at exactly k/rate."""
    step = 1 / (rate * copy.report.stream.time_base)
    exact = step.denominator == 1 and np.array_equal(copy.pts, np.arange(len(copy)) * int(step))
    return bool(exact and copy.ok.all() and copy.report.stream.header_frames == len(copy))


def _frames(
    media: Decoded,
    source_index: npt.NDArray[np.int64],
    ok: npt.NDArray[np.bool_],
    origin: Fraction = Fraction(0),
) -> FrameTable:
    return FrameTable(
        time_base=media.report.stream.time_base,
        pts=media.pts - media.pts[0],
        source_index=source_index,
        pixels=media.pixels,
        ok=ok,
        repeat=media.repeat,
        origin=origin,
    )


# --- what is told ------------------------------------------------------------------------------------------


def _facts(table: MediaTable, rate: Fraction) -> tuple[dict[str, Fact], dict[str, Any]]:
    """Facts of the media file, and the part of the report that lists what they count."""
    frames = table.frames
    planned = windows(len(frames))
    damaged = [not frames.ok[s.slice()].all() for s in planned.spans]
    held = frames.repeat | (table.change < HELD)
    held[:1] = False
    runs = held_runs(held)
    facts: dict[str, Fact] = {
        "frames": len(frames),
        "fps_num": rate.numerator,
        "fps_den": rate.denominator,
        "fps": float(rate),
        "duration_s": float(frames.duration()),
        "bad_frames": int((~frames.ok).sum()),
        "repeats": int(frames.repeat.sum()),
        "held": int(held.sum()),
        "longest_frozen": max((stop - start for start, stop in runs), default=1),
        "picture_step": picture_step(held),
        "windows": len(planned.spans),
        "windows_damaged": sum(damaged),
        "leftover": planned.leftover,
    }
    half_second = math.ceil(rate / 2)
    shown = {
        "windows": [
            {"start": s.start, "stop": s.stop, "verdict": str(Reason.DECODE_DAMAGE) if bad else "ok"}
            for s, bad in zip(planned.spans, damaged, strict=True)
        ],
        "leftover": planned.leftover,
        "frozen": [[start, stop] for start, stop in runs if stop - start >= half_second],
    }
    return facts, shown


def held_runs(held: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs [start, stop) of one picture; held: bool [F], frame k shows what frame k - 1 shows."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], held, [False])).astype(np.int8)))
    # A run begins with the frame that the first held one repeats.
    return [(int(a) - 1, int(b)) for a, b in edges.reshape(-1, 2)]


def picture_step(held: npt.NDArray[np.bool_]) -> int:
    """Median distance in frames from one new picture to the next: 1 in smooth video, 3 where every picture
    is shown three times. Stills do not move it: over the pack's 60 clips it is 1 but for the tripled one."""
    steps = np.diff(np.flatnonzero(~held))
    return int(np.median(steps)) if len(steps) else 1


def _source_facts(decoded: Decoded) -> dict[str, Fact]:
    report, stream = decoded.report, decoded.report.stream
    return {
        "source_frames": len(decoded),
        "header_frames": stream.header_frames,
        "missing_packets": report.missing_packets,
        "bad_packets": report.bad_packets + report.lost + report.unplaced,
        "first_pts_s": float(int(decoded.pts[0]) * stream.time_base),
        "rotation": stream.rotation,
        "source_width": stream.width,
        "source_height": stream.height,
        "pixel_aspect": float(stream.sample_aspect),
    }


def _source_report(decoded: Decoded) -> dict[str, Any]:
    report = asdict(decoded.report)
    inside = [
        [int(a), int(b)] for a, b in (np.searchsorted(decoded.pts, span) for span in decoded.report.damaged)
    ]
    steps = np.diff(decoded.pts)
    gaps = np.flatnonzero(steps > 1.5 * np.median(steps)) if len(steps) else np.zeros(0, np.int64)
    return {
        **report,
        "damaged": inside,
        "frames": len(decoded),
        "first_pts": int(decoded.pts[0]),
        "missing_packets": decoded.report.missing_packets,
        "pts_gaps": len(gaps),
        "pts_gaps_behind": gaps[:20].tolist(),
        "repeats": int(decoded.repeat.sum()),
    }


def _write(folder: Path, report: dict[str, Any]) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **report}, sort_keys=True, indent=1, default=str)
    (folder / REPORT).write_text(text + "\n")

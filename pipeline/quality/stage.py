"""The quality stage: visual axes and smoothness of every window of a clip, and their medians.

It judges nothing: which scores are enough is policy (`wp2 select`), so a changed threshold recomputes nothing
here. Decodes nothing: the observe pass has looked. Source: DESIGN 2, rule 4; spec/faults.md Q5.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from pipeline.clips.signals import read_signals
from pipeline.media import read_table
from pipeline.observe import TRACKS, read_tracks
from pipeline.pose.stage import read_poses
from pipeline.quality.axes import AXES, score
from pipeline.quality.looks import Looks, read_looks
from pipeline.quality.motion import motion, picture_shift
from pipeline.quality.smoothness import smoothness
from pipeline.stage import Fact, Result, Unit
from schemas import SCHEMA_VERSION
from schemas.clip import Clip, FrameTable
from schemas.quality import Verdict
from schemas.tables import TABLES
from schemas.timeline import WINDOW, Span, windows

QUALITY = "quality.parquet"
SMOOTHNESS = "smoothness"
SCORES = (*AXES, SMOOTHNESS)
SCHEMA = pa.schema([f.remove_metadata() for f in TABLES["quality"] if f.name != "clip_id"])
_REMEDY = "run `wp2 curate` again with --from quality"
_DIGITS = 6  # significant ones, of scores and measures: beyond them, processors differ


class QualityConfig(BaseModel):
    """The stage has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Quality:
    """Stage: quality.parquet, a row a window (see the table `quality`); facts q_<score>, its median over the
    windows that have it, and what the whole clip shows of overlays. Always ok."""

    name: ClassVar[str] = "quality"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("ingest", "observe", "pose")
    reads: ClassVar[tuple[str, ...]] = ("signals",)

    def __init__(self, config: QualityConfig | None = None) -> None:
        self.config: QualityConfig = config or QualityConfig()

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        pictures, looks = read_table(unit), read_looks(unit)
        shift = picture_shift(read_tracks(unit)[0]) if unit.receipts["observe"].has(TRACKS) else None
        moved = motion(pictures, read_poses(unit), hard_cuts(unit, pictures.frames), shift)
        rows: list[dict[str, Any]] = []
        for number, span in enumerate(spans(len(pictures.frames))):
            axes, steady = score(looks, span.start, span.stop), smoothness(moved, span.start, span.stop)
            rows.append(
                {
                    "window": number,
                    **{name: getattr(axes, name) for name in AXES},
                    SMOOTHNESS: steady.score,
                    "start": span.start,
                    "stop": span.stop,
                    "aesthetics_by": axes.aesthetics_by,
                    "smoothness_by": steady.by,
                    "motion_by": steady.motion_by,
                    "smoothness_unknown": "|".join(steady.unknown),
                    **axes.raws,
                    **steady.raw,
                }
            )
        table = pa.table({name: [_plain(row[name]) for row in rows] for name in SCHEMA.names}, schema=SCHEMA)
        about = {"schema_version": str(SCHEMA_VERSION)}
        pq.write_table(table.replace_schema_metadata(about), scratch / QUALITY, compression="zstd")
        return Result(Verdict.ok(), {QUALITY: scratch / QUALITY}, _facts(table, looks))


def spans(frames: int) -> tuple[Span, ...]:
    """Windows of quality: the pose windows; a clip shorter than one, where the gates let it through, is one
    short window."""
    return windows(frames).spans if frames >= WINDOW else (Span(0, frames),)


def hard_cuts(unit: Unit, frames: FrameTable) -> npt.NDArray[np.bool_] | None:
    """bool [F]: a hard cut of the recording lies before the frame, between it and the frame shown before it.
    None where the recording has no signals. Raises StoreError where they cannot be read."""
    if unit.clip.signals is None:
        return None
    seen = read_signals(unit.corpus, unit.clip).cut
    passed = np.concatenate([[0], np.cumsum(seen)])[frames.source_index - unit.clip.start + 1]
    # A working copy may leave source frames out: what was cut in them is cut here.
    return np.concatenate([[False], np.diff(passed) > 0])


def read_quality(unit: Unit) -> pa.Table:
    """quality.parquet of a clip: a row a window, in order. Raises StoreError when it is damaged."""
    return unit.corpus.table(unit.receipts[Quality.name].output(QUALITY).path, _REMEDY)


def _facts(table: pa.Table, looks: Looks) -> dict[str, Fact]:
    """Medians over windows: one bad window of many neither vetoes a clip nor hides in a mean. What is not
    known is left out."""
    facts: dict[str, Fact] = {"aesthetics_by": looks.aesthetics_by, "windows": table.num_rows}
    for name in SCORES:
        known = table[name].drop_null().to_numpy()
        if len(known):
            facts[f"q_{name}"] = _round(float(np.median(known)))
    if looks.flags.known:
        facts["hud_share"] = _round(looks.flags.hud_share)
        facts["text_share"] = _round(looks.flags.text_share)
        facts["watermark"] = looks.flags.watermark
    crop = looks.crop
    facts |= {f"crop_{side}": getattr(crop, side) for side in ("top", "bottom", "left", "right")}
    return facts


def _plain(value: Any) -> Any:
    """A cell of the table: rounded; empty where a measure is not known."""
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else _round(float(value))
    return value


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")

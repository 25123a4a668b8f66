"""What a clip is, and the table of its frames."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

ID_PATTERN = re.compile(r"[a-z0-9_-]{1,96}")


class Perspective(StrEnum):
    FIRST = "fps"
    THIRD = "tps"
    UNKNOWN = "unknown"


class ClipKind(StrEnum):
    NAVIGATION = "navigation"
    EVENT = "event"


class Sidecar(BaseModel):
    """A file that belongs to a recording: its input log, pose log or event log, or its signals."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str = Field(description="path relative to the source root; of signals, to the corpus")
    digest: str = Field(description="digest of the part that is read (mapped columns), hex")


class Clip(BaseModel):
    """One row of the catalogue: where a clip comes from. Frozen once its generation is published.

    A clip is the presented frames [start, stop) of a file, or all of it where stop is 0. `clip_id` is derived
    from content alone (sha256 of the file's bytes, and the frames of a part), so a renamed or moved file
    gives the same clips and two equal files are one. A recording that is not cut yet is a row of the same
    shape in the catalogue of recordings. Source: DESIGN 2, rule 8.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    clip_id: str
    recording_id: str = Field(description="clips of one recording share it; splits go by recording")
    source: str = Field(default="", description="kind:url of the source it was last found in")
    source_path: str = Field(description="path relative to the source root, as found")
    also_at: tuple[str, ...] = Field(default=(), description="other paths with the same bytes")
    bytes: int = Field(description="size of the source file")
    sha256: str = Field(description="of the source file")
    start: int = Field(default=0, ge=0, description="first presented frame of the file")
    stop: int = Field(default=0, ge=0, description="last presented frame + 1; 0: the file is one clip")
    kind: ClipKind = ClipKind.NAVIGATION
    game: str = Field(default="", description="name in the key map; empty when there is none")
    perspective: Perspective = Perspective.UNKNOWN
    licence: str = Field(default="", description="licence of the pictures, as the source states it")
    log: Sidecar | None = None
    poses: Sidecar | None = None
    events: Sidecar | None = None
    signals: Sidecar | None = Field(
        default=None, description="what the cutting stage saw, a row a frame of the source file"
    )

    @field_validator("clip_id", "recording_id")
    @classmethod
    def _legal_id(cls, value: str) -> str:
        if not ID_PATTERN.fullmatch(value):
            raise ValueError(f"id {value!r} must match {ID_PATTERN.pattern}")
        return value


@dataclass(frozen=True, slots=True)
class FrameTable:
    """The frames of a clip as one strict sequential decode presents them. F frames.

    time_base: seconds per tick, exact.
    pts: int64 [F], strictly increasing, pts[0] = 0.
    source_index: int64 [F], index in the strict decode of the source file (equals k where no working copy
        was made; a resampled or halved clip skips or repeats source frames).
    pixels: uint64 [F], xxh3 of the decoded picture: all visible planes in the file's own pixel format.
    ok: bool [F], False where the decoder reported damage or had to conceal.
    repeat: bool [F], the picture is bit-equal to the one before it.
    origin: time of frame 0 in the source file, in seconds from its first presented frame, exact; not 0 where
        the clip is a part of a recording. Logs and events run on the recording's clock.
    Source: DESIGN rule 1; spec/faults.md D1, D2, D4.
    """

    time_base: Fraction
    pts: npt.NDArray[np.int64]
    source_index: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.uint64]
    ok: npt.NDArray[np.bool_]
    repeat: npt.NDArray[np.bool_]
    origin: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        n = len(self.pts)
        if not all(len(c) == n for c in (self.source_index, self.pixels, self.ok, self.repeat)):
            raise ValueError("the columns of a frame table must have one length")
        if n and (self.pts[0] != 0 or np.any(np.diff(self.pts) <= 0)):
            raise ValueError("presentation times must start at 0 and increase strictly")

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """float64 [F], time of each frame from the clip's start. For display and rates, not for indexing."""
        return self.pts.astype(np.float64) * float(self.time_base)

    def duration(self) -> Fraction:
        """Exact time from the first frame to the end of the last, which lasts as long as the median step."""
        if len(self) == 0:
            return Fraction(0)
        step = int(np.median(np.diff(self.pts))) if len(self) > 1 else 1
        return (int(self.pts[-1]) + step) * self.time_base

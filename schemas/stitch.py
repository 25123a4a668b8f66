"""Pose windows, the seams between them, and the one track of a clip that they are joined to.

Source: DESIGN rules 4, 5; spec/faults.md P1, P3; docs/poses.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from schemas.pose import PoseTrack
from schemas.timeline import Span


@dataclass(frozen=True, slots=True)
class WindowTrack:
    """What an estimator says of one window of a clip.

    track: one row a frame of `span`, in the window's own world and unit.
    lengths: False when the estimator gives directions of travel only (visual odometry): each step of travel
        then counts one, and no length in the track may be compared with another.
    focal: in pixels, where the estimator knows one.
    """

    window: int
    span: Span
    track: PoseTrack
    lengths: bool = True
    focal: float | None = None

    def __post_init__(self) -> None:
        if len(self.track) != len(self.span):
            raise ValueError(f"window {self.window}: {len(self.track)} poses for {len(self.span)} frames")

    def over(self, span: Span) -> PoseTrack:
        """The rows of `span`, which must lie inside the window."""
        rows = slice(span.start - self.span.start, span.stop - self.span.start)
        t = self.track
        return PoseTrack(t.rotation[rows], t.translation[rows], t.valid[rows], t.scale, t.estimator, t.up)


class SeamVerdict(StrEnum):
    JOINED = "joined"  # rotation, scale and translation
    SCALE_KEPT = "scale_kept"  # the overlap does not show the scale; both sides are in metres
    SCALE_BREAK = "scale_break"  # rotation joined; a new segment starts, lengths do not compare across
    BREAK = "break"  # nothing joined; a new world starts, rotations do not compare across either
    DIRECTIONS = "directions"  # rotation joined; there are no lengths to compare


class SeamReason(StrEnum):
    NONE = ""
    NO_OVERLAP = "no_overlap"  # no frame is valid in both windows
    FEW_FRAMES = "few_frames"
    ROTATION_JUMP = "rotation_jump"  # the orientations of the shared frames contradict each other
    SCALE_UNOBSERVABLE = "scale_unobservable"  # the camera does not travel, or less than the noise
    POSITIONS_DISAGREE = "positions_disagree"  # most shared frames fit no one similarity
    NO_LENGTHS = "no_lengths"
    SCALE_RUNAWAY = "scale_runaway"  # the product of scales left its limits
    SCALE_DRIFT = "scale_drift"  # the product of scales is no longer known to the stated precision


@dataclass(frozen=True, slots=True)
class Seam:
    """One join of two neighbouring windows; a row of the table `seams`.

    left, right: windows. start, stop: frames that both cover; shared: of these, valid in both.
    cut: first frame whose pose comes from the right window.
    rotation_deg: median disagreement of the orientations after the join.
    scale: unit of the right window in units of the left; scale_spread: its relative standard deviation.
    votes: frames that agree on scale and position.
    translation_residual: rms disagreement of the positions that agree, in median steps of the overlap.
    focal_ratio: right by left. None stands for unknown everywhere.
    """

    seam: int
    left: int
    right: int
    start: int
    stop: int
    shared: int
    cut: int
    rotation_deg: float | None
    scale: float | None
    scale_spread: float | None
    votes: int
    translation_residual: float | None
    focal_ratio: float | None
    verdict: SeamVerdict
    reason: SeamReason


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One window in the stitched track; a row of the table `windows`.

    valid_share: of its own frames. world, segment: as in `Stitched`. scale: its unit in units of the first
    window of its segment, and the relative standard deviation of that product; None with directions only.
    scale_kept: the product holds a scale that was kept, not measured. reasons: of the seams to its left and
    right, in order; of a window that has no poses at all (world and segment -1), why.
    """

    window: int
    start: int
    stop: int
    estimator: str
    valid_share: float
    world: int
    segment: int
    scale: float | None
    scale_spread: float | None
    scale_kept: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stitched:
    """The one track of a clip of F frames. Each frame has the pose of exactly one window, or none.

    window: int64 [F], whose pose it is; -1 where the row is invalid.
    world: int64 [F]; orientations compare only inside a world. -1 where the row is invalid.
    segment: int64 [F]; lengths compare only inside a segment, and a segment lies in one world. -1 where the
        row is invalid or its window gives directions only.
    scale_kept: bool [F], the frame's scale rests on a kept one.
    """

    track: PoseTrack
    window: npt.NDArray[np.int64]
    world: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int64]
    scale_kept: npt.NDArray[np.bool_]
    windows: tuple[WindowRow, ...]
    seams: tuple[Seam, ...]

"""Verdicts: one outcome per item, and the named reasons behind it. Source: DESIGN rule 7."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    REJECTED = "rejected"  # the item is what it is: these reasons speak against it
    FAILED = "failed"  # we did not manage: worth another attempt


class Reason(StrEnum):
    """Why an item was rejected or failed. The text after the colon in a verdict is free detail."""

    # rejected at ingest
    EMPTY_FILE = "empty_file"
    NOT_A_VIDEO = "not_a_video"
    NO_VIDEO_STREAM = "no_video_stream"
    NO_FRAMES = "no_frames"
    TRUNCATED = "truncated"
    DECODE_DAMAGE = "decode_damage"
    VFR = "vfr"
    # rejected at the gates
    TOO_SHORT = "too_short"
    BELOW_GRID_RATE = "below_grid_rate"
    FROZEN = "frozen"
    # rejected at actions
    LOG_MISMATCH = "log_mismatch"
    # failed
    DECODER_CRASHED = "decoder_crashed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_DIED = "worker_died"
    SOURCE_UNREADABLE = "source_unreadable"
    SOURCE_CHANGED = "source_changed"
    BAD_SIDECAR = "bad_sidecar"
    INTERNAL = "internal"


class Unknown(StrEnum):
    """Why a value of a label is unknown. Unknown is never written as zero. Source: DESIGN rule 4."""

    UNCALIBRATED = "uncalibrated"  # an input is logged, but its rate in degrees is not known
    NO_LOG = "no_log"
    NO_POSES = "no_poses"
    NOT_MAPPED = "not_mapped"  # the key map names no input for this axis
    LOG_GAP = "log_gap"  # no log row covers these frames
    POSE_GAP = "pose_gap"
    INPUT_NOT_LOGGED = "input_not_logged"  # the camera answers to something that the log does not hold


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one item at one stage. reasons: ordered "reason" or "reason: detail"; empty when ok."""

    status: Status
    reasons: tuple[str, ...] = ()

    @staticmethod
    def ok() -> Verdict:
        return Verdict(Status.OK)

    @staticmethod
    def rejected(*reasons: str) -> Verdict:
        return Verdict(Status.REJECTED, reasons)

    @staticmethod
    def failed(reason: str) -> Verdict:
        return Verdict(Status.FAILED, (reason,))


def because(reason: Reason, detail: str = "") -> str:
    """One line of a verdict: the reason and, after a colon, the detail."""
    return f"{reason}: {detail}" if detail else str(reason)

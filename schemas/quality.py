"""Verdicts: one outcome per item, and the named reasons behind it; what the measures of a window are.

Source: DESIGN rule 7.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    STATIC = "static"
    CUT_INSIDE = "cut_inside"
    MENU = "menu"
    COVERED = "covered"
    # rejected at actions
    LOG_MISMATCH = "log_mismatch"
    # rejected at captions
    CAPTION_FRAMES = "caption_frames"  # no request can hold the clip
    CAPTION_INVALID = "caption_invalid"  # no reply had the form that was asked for
    CAPTION_DOUBTFUL = "caption_doubtful"  # the replies cannot be believed
    # failed
    NO_ANSWER = "no_answer"  # endpoints answer, but not this clip's requests
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


VISUAL_RAWS: Mapping[str, str] = {
    "edge_ratio": (
        "loss of edge gradients between two pairs of scales, in logs: 0.64 and more sharp, 0.5 blurred by "
        "2 px of 640"
    ),
    "structure": "share of the picture with structure, relative to its contrast",
    "noise_luma": "sigma of white noise in the flattest fifth of the picture, in luma levels",
    "noise_chroma": "the same of chroma",
    "block_edges": "visible block sides on the 8-pixel grid over those elsewhere; about 1 without blocks",
    "evenness": "fine residual over energy: low where a codec has emptied blocks",
    "stops": "luma from the 2nd to the 98th percentile, as a power of two",
    "white_share": "share of pixels lost in white",
    "black_share": "share of pixels lost in black",
    "aesthetic": "what the judge of aesthetics said, on its own scale",
}
"""Raw measures of the visual axes -> what they are: columns of the table `quality`, medians over samples."""

SMOOTHNESS_RAWS: Mapping[str, str] = {
    "shake": "share of the turning (of poses, or else of points) that a median of three steps takes away",
    "travel_shake": "the same of the travel; only where positions are in metres",
    "jerk_deg_s3": "95 % of the angular jerk lie below; behind a low pass of 0.08 s",
    "stutter_share": "share of the moving frames that repeat a picture for less than 0.1 s, or were lost",
    "stutters": "frames that repeat a picture for less than 0.1 s while the motion goes on",
    "skips": "steps over frames that were lost: from poses, and from the mapping of a working copy",
    "repeat_share": "share of frames bit-equal to the frame before",
    "held_share": "share of frames that show the picture before, encoder noise aside",
    "still_share": "share of the frames in pictures that stand for 0.1 s and longer: stops and freezes",
    "frozen_share": "of these, pictures that stand while the motion on both sides is in full swing",
    "frozen_s": "longest such picture, in seconds; 0 where there is none",
    "frozen_start": "first frame of it, in the clip; -1 where there is none",
    "frozen_stop": "last frame of it + 1; -1 where there is none",
    "pts_jitter": "mean deviation of the frame steps from their median, as a share of it",
    "cuts": "hard cuts inside",
}
"""Raw measures of smoothness -> what they are: columns of the table `quality`."""

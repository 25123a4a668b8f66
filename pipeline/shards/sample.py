"""One sample from a clip's receipts: index facts, annotation record, arrays, and the media file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from pipeline.actions import read_actions
from pipeline.caption.stage import read_unit_caption
from pipeline.pose.stage import read_poses
from pipeline.shards.write import Sample
from pipeline.stage import Fact, Unit
from schemas.pose import PoseTrack
from schemas.sample import ActionUnknown, Annotation


def build(unit: Unit, split: str, media: Path | None) -> Sample:
    """The sample of a clip that passed every stage; one member per suffix of `schemas.sample.FAMILIES`.

    media: the media file, or None where the published media tars are kept; the sample then has none.
    Its bytes depend on the clip and on what its stages made, never on time, attempts or place.
    """
    clip, ingest = unit.clip, unit.receipts["ingest"].facts
    pose, action = unit.receipts["pose"].facts, unit.receipts["actions"].facts
    actions, grid = read_actions(unit)
    about: dict[str, Fact] = {
        "clip_id": clip.clip_id,
        "recording_id": clip.recording_id,
        "split": split,
        "game": clip.game,
        "perspective": str(clip.perspective),
        "licence": clip.licence,
        **{name: ingest[name] for name in ("frames", "fps", "width", "height", "duration_s")},
        "latents": len(actions.rows),
    }
    annotation = Annotation.model_validate(
        {
            **about,
            "sample_id": clip.clip_id,
            "fps_num": ingest["fps_num"],
            "fps_den": ingest["fps_den"],
            "grid_jitter_max_s": action["grid_jitter_max_s"],
            "pose_scale": pose["scale"],
            "pose_estimator": pose["estimator"],
            "pose_valid_share": pose["valid_share"],
            "action_witness": actions.witness,
            "action_unknown": ActionUnknown.of(actions.reasons),
            "action_lag_frames": action["lag_frames"],
            "caption": read_unit_caption(unit),
        }
    )
    members: dict[str, bytes | Path] = {
        "json": annotation.model_dump_json().encode(),
        "actions.npy": _npy(actions.rows),
        "grid.npy": _npy(grid.astype(np.int32)),
        "poses.npy": _npy(_pose_rows(read_poses(unit))),
    }
    if media is not None:
        members["mp4"] = media
    return Sample(clip.clip_id, about, members)


def _pose_rows(track: PoseTrack) -> np.ndarray:
    """float32 [F, 3, 4], camera-to-world; NaN where there is no pose."""
    return np.concatenate([track.rotation, track.translation[:, :, None]], axis=2).astype(np.float32)


def _npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.ascontiguousarray(array), allow_pickle=False)
    return sink.getvalue()

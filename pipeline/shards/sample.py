"""One sample from a clip's receipts: index facts, annotation record, arrays, and the files of its members."""

from __future__ import annotations

import io
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.actions import read_actions
from pipeline.caption.stage import read_unit_caption
from pipeline.latents.members import members as coded_members
from pipeline.pose.stage import read_poses
from pipeline.shards.write import Sample
from pipeline.stage import Fact, Unit
from schemas.action import LatentActions
from schemas.pose import PoseTrack
from schemas.sample import OPTIONAL, ActionUnknown, Annotation


def build(
    unit: Unit, split: str, families: Collection[str], held: ExitStack, media: Path | None = None
) -> Sample:
    """The sample of a clip that passed every stage; a member per suffix of these `schemas.sample.FAMILIES`.

    families: those that are written; of a kept one no member is read. media: the media file, where that is
    one of them. The files of its members stay as long as `held` is open.
    Its bytes depend on the clip and on what its stages made, never on time, attempts or place.
    Raises StoreError when something that a stage made is missing or damaged.
    """
    members: dict[str, bytes | Path] = {}
    if media is not None:
        members["mp4"] = media
    actions, grid = read_actions(unit)
    about = _about(unit, split, actions)
    if "annotations" in families:
        members |= _annotation_members(unit, about, actions, grid)
    for family in OPTIONAL:
        if family in families:
            members |= coded_members(unit, family, held)
    return Sample(unit.clip.clip_id, about, members)


def _about(unit: Unit, split: str, actions: LatentActions) -> dict[str, Fact]:
    """The index columns that say what the clip is."""
    clip, ingest = unit.clip, unit.receipts["ingest"].facts
    return {
        "clip_id": clip.clip_id,
        "recording_id": clip.recording_id,
        "kind": str(clip.kind),
        "split": split,
        "game": clip.game,
        "perspective": str(clip.perspective),
        "licence": clip.licence,
        **{name: ingest[name] for name in ("frames", "fps", "width", "height", "duration_s")},
        "latent_frames": len(actions.rows),
        "actions_known": ActionUnknown.of(actions.reasons).known(len(actions.rows)),
    }


def _annotation_members(
    unit: Unit, about: dict[str, Fact], actions: LatentActions, grid: npt.NDArray[np.int32]
) -> dict[str, bytes]:
    ingest, pose, action = (unit.receipts[name].facts for name in ("ingest", "pose", "actions"))
    annotation = Annotation.model_validate(
        {
            **about,
            "sample_id": unit.clip.clip_id,
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
    return {
        "json": annotation.model_dump_json().encode(),
        "actions.npy": _npy(actions.rows),
        "grid.npy": _npy(grid.astype(np.int32)),
        "poses.npy": _npy(_pose_rows(read_poses(unit))),
    }


def _pose_rows(track: PoseTrack) -> np.ndarray:
    """float32 [F, 3, 4], camera-to-world; NaN where there is no pose."""
    return np.concatenate([track.rotation, track.translation[:, :, None]], axis=2).astype(np.float32)


def _npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.ascontiguousarray(array), allow_pickle=False)
    return sink.getvalue()

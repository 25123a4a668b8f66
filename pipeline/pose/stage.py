"""The pose stage: the first estimator that applies to a clip gives its track, or every row is unknown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.media import read_frames
from pipeline.pose import Estimated, Estimator
from pipeline.pose.given import Given
from pipeline.pose.odometry import Odometry
from pipeline.pose.vipe import Vipe, VipeConfig
from pipeline.pose.windows import as_json, plain_windows
from pipeline.sources import SourceConfig
from pipeline.sources.sidecar import SidecarError
from pipeline.stage import Fact, Result, Unit
from schemas import SCHEMA_VERSION
from schemas.camera import Cameras
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack, Scale, turn_between
from schemas.quality import Reason, Unknown, Verdict, because

POSES = "poses.parquet"
_REMEDY = "run `wp2 curate` again with --from pose"
WINDOWS = "windows.json"
AMBIGUOUS_DEG = 90.0
"""A turn of more than this between two frames may be half of something else (spec/faults.md P8)."""

_ROTATION = tuple(f"r{i}{j}" for i in range(3) for j in range(3))
_TRANSLATION = ("tx", "ty", "tz")


class PoseConfig(BaseModel):
    """Settings of the pose stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    estimators: tuple[Literal["given", "vipe", "vo", "none"], ...] = Field(
        default=("given", "vo", "none"), min_length=1, description="in order; the first that applies is used"
    )
    vipe: VipeConfig = Field(default=VipeConfig(), description="the estimator vipe, on a machine with a GPU")

    @model_validator(mode="after")
    def _vipe_can_run(self) -> PoseConfig:
        if "vipe" in self.estimators and not self.vipe.command:
            raise ValueError("estimators name vipe: set pose.vipe.command (docs/vipe.md)")
        return self


class Nothing:
    """The estimator of last resort: no row is valid."""

    name = "none"

    def applies(self, unit: Unit) -> bool:
        return True

    def estimate(self, unit: Unit, table: FrameTable) -> Estimated:
        f = len(table)
        nan = np.full((f, 3, 3), np.nan)
        return Estimated(PoseTrack(nan, nan[:, 0], np.zeros(f, bool), Scale.UNKNOWN, self.name))


class Pose:
    """Stage: poses.parquet, one row a frame of the media file; windows.json, the windows and the seams
    between them (for an estimator that needs none, the windows alone).

    source: where the key map is, which says how pose logs are read. It is no part of the config: the digest
    of a clip's sidecar covers what the key map says of it. cameras: frozen record, by value.
    """

    name: ClassVar[str] = "pose"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("ingest", "gates", "observe")
    reads: ClassVar[tuple[str, ...]] = ("poses",)

    def __init__(self, config: PoseConfig, source: SourceConfig, cameras: Cameras) -> None:
        self.config: BaseModel = config.model_copy(update={"vipe": config.vipe.asked()})
        odometry = Odometry(cameras)
        known: dict[str, Estimator] = {
            "given": Given(source),
            "vipe": Vipe(config.vipe),
            "vo": odometry,
            "none": Nothing(),
        }
        self._estimators = tuple(known[name] for name in config.estimators)
        self._cameras = odometry.frozen

    def frozen(self, clip: Clip) -> object:
        return self._cameras(clip) if clip.poses is None else None

    def run(self, unit: Unit, scratch: Path) -> Result:
        table = read_frames(unit)
        estimator = next((e for e in self._estimators if e.applies(unit)), Nothing())
        try:
            found = estimator.estimate(unit, table)
        except SidecarError as error:
            return Result(Verdict.failed(because(Reason.BAD_SIDECAR, str(error))))
        track = found.track
        steps = turns(track)
        pq.write_table(to_table(track, steps, found.reasons), scratch / POSES, compression="zstd")
        rows = found.windows or plain_windows(track)
        (scratch / WINDOWS).write_text(json.dumps(as_json(rows, found.seams), sort_keys=True))
        facts: dict[str, Fact] = {
            "estimator": track.estimator,
            "valid_share": round(float(track.valid.mean()), 6),
            "scale": str(track.scale),
            "ambiguous_steps": int(np.count_nonzero(np.abs(steps) > AMBIGUOUS_DEG)),
            "windows": len(rows),
            "seams": len(found.seams),
            "worlds": len(np.unique(track.world[track.valid])) if track.world is not None else 1,
        }
        return Result(Verdict.ok(), {name: scratch / name for name in (POSES, WINDOWS)}, facts)


def turns(track: PoseTrack) -> npt.NDArray[np.float64]:
    """(yaw right, pitch up) in degrees from each frame to the next, float64 [F, 2]; their sum is the total
    turn. NaN where a pose is missing, and in the last row."""
    steps = np.full((len(track), 2), np.nan)
    frames = np.arange(len(track))
    steps[:-1] = turn_between(track, frames[:-1], frames[1:])
    return steps


def to_table(track: PoseTrack, steps: npt.NDArray[np.float64], reasons: Sequence[str] = ()) -> pa.Table:
    """Rows of poses.parquet. reasons: one a frame, or none."""
    gap = Unknown.NO_POSES if track.estimator == Nothing.name else Unknown.POSE_GAP
    known = reasons or [""] * len(track)
    columns: dict[str, object] = {
        "frame": np.arange(len(track), dtype=np.int64),
        "valid": track.valid,
        "reason": ["" if v else why or str(gap) for v, why in zip(track.valid, known, strict=True)],
    }
    flat = track.rotation.reshape(-1, 9)
    columns |= {name: flat[:, i] for i, name in enumerate(_ROTATION)}
    columns |= {name: track.translation[:, i] for i, name in enumerate(_TRANSLATION)}
    columns["world"] = track.world if track.world is not None else np.where(track.valid, 0, -1)
    columns |= {"yaw_deg": steps[:, 0], "pitch_deg": steps[:, 1]}
    up = "" if track.up is None else " ".join(f"{v:.17g}" for v in track.up)
    about = {
        "schema_version": str(SCHEMA_VERSION),
        "convention": "camera-to-world, OpenCV axes",
        "scale": str(track.scale),
        "up": up,
        "estimator": track.estimator,
    }
    return pa.table(columns).replace_schema_metadata(about)


def read_poses(unit: Unit) -> PoseTrack:
    """The track of a clip, from the pose stage's output."""
    table = unit.corpus.table(unit.receipts["pose"].output(POSES).path, _REMEDY)
    about = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    up = [float(v) for v in about["up"].split()]
    return PoseTrack(
        rotation=np.stack([table[n].to_numpy() for n in _ROTATION], axis=1).reshape(-1, 3, 3),
        translation=np.stack([table[n].to_numpy() for n in _TRANSLATION], axis=1),
        valid=table["valid"].to_numpy(),
        scale=Scale(about["scale"]),
        estimator=about["estimator"],
        up=(up[0], up[1], up[2]) if up else None,
        world=table["world"].to_numpy(),
    )


def read_reasons(unit: Unit) -> list[str]:
    """Why each frame has no pose; "" where it has one."""
    path = unit.receipts["pose"].output(POSES).path
    reasons: list[str] = unit.corpus.table(path, _REMEDY, columns=["reason"])["reason"].to_pylist()
    return reasons

"""Recordings for the tests of sources, poses and actions: a source folder, a key map, and the stages run on
one clip with a frame table made from its known rate (the pack's logs have exactly one row a frame)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from pipeline.actions import Actions, ActionsConfig, read_actions
from pipeline.media import MediaTable, pack
from pipeline.pose.stage import Pose, PoseConfig, read_poses
from pipeline.sources import Found, SourceConfig, discover
from pipeline.sources.found import sidecars_of
from pipeline.stage import Artefact, Receipt, Unit, run_unit
from pipeline.store import Store
from schemas.action import LatentActions, RotationRates
from schemas.camera import Cameras
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack
from schemas.quality import Status

PACK_MAP = Path(__file__).parents[1] / "footage.yaml"

DOOM_POSES = {
    "columns": {"x": "CAMERA_POSITION_X", "y": "CAMERA_POSITION_Y", "z": "CAMERA_POSITION_Z",
                "yaw": "CAMERA_ANGLE", "pitch": "CAMERA_PITCH", "roll": "CAMERA_ROLL"},
    "world": {"up": "z", "handed": "right"},
    "yaw_positive": "left",
    "pitch_positive": "down",
    "metres_per_unit": 0.03125,
}  # fmt: skip
MINIWORLD_POSES = {
    "columns": {"x": "cam_x", "y": "cam_y", "z": "cam_z", "yaw": "yaw_left_deg", "pitch": "pitch_up_deg"},
    "world": {"up": "y", "handed": "right"},
    "yaw_positive": "left",
    "pitch_positive": "up",
}


def table(frames: int, fps: Fraction | int, source_index: np.ndarray | None = None) -> FrameTable:
    """A constant-rate frame table: 512 ticks a frame, every picture new."""
    index = np.arange(frames) if source_index is None else source_index
    return FrameTable(
        time_base=1 / (Fraction(fps) * 512),
        pts=np.arange(frames, dtype=np.int64) * 512,
        source_index=np.asarray(index, np.int64),
        pixels=np.arange(frames, dtype=np.uint64),
        ok=np.ones(frames, bool),
        repeat=np.zeros(frames, bool),
    )


def pack_map(folder: Path, poses: bool = True) -> SourceConfig:
    """The pack's key map, with its truth cameras as pose logs when poses is True."""
    data = yaml.safe_load(PACK_MAP.read_text())
    for entry in data["games"]:
        if poses and "log" in entry and entry["log"]["file"] == "{stem}.truth.csv":
            part = MINIWORLD_POSES if entry["game"].startswith("miniworld") else DOOM_POSES
            entry["poses"] = {"file": "{stem}.truth.csv", **part}
    path = folder / "pack.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return SourceConfig(key_map=str(path))


def truth(footage: Path, clip: str) -> tuple[pd.DataFrame, FrameTable]:
    """Truth rows of a pack clip, and its frame table."""
    about = json.loads((footage / f"{clip}.truth.json").read_text())
    rows = pd.read_csv(footage / f"{clip}.truth.csv")
    return rows, table(len(rows), about["fps"])


@dataclass(frozen=True)
class Labelled:
    """What the two stages made of one clip."""

    unit: Unit
    pose: Receipt
    actions: Receipt

    @property
    def track(self) -> PoseTrack:
        return read_poses(self.unit)

    @property
    def rows(self) -> LatentActions:
        return read_actions(self.unit)[0]

    @property
    def ends(self) -> np.ndarray:
        """Frame at the end of every latent."""
        return read_actions(self.unit)[1][::4]

    def file(self, stage: str, name: str) -> bytes:
        return self.unit.corpus.read(getattr(self, stage).output(name).path)


def find(source: Store, path: str, config: SourceConfig) -> tuple[Found, Clip]:
    """A recording of a gameplay source, and its catalogue row."""
    listing = discover("gameplay", source, config)
    found = next(f for f in listing.found if f.path == path)
    clip = Clip(
        clip_id="c0",
        recording_id="c0",
        source=f"gameplay:{source.url}",
        source_path=path,
        bytes=found.size,
        sha256="0" * 64,
        game=found.game,
        perspective=found.perspective,
        licence=found.licence,
        **sidecars_of(found, source, listing.key_map),
    )
    return found, clip


def label(
    source: Store,
    corpus: Store,
    path: str,
    config: SourceConfig,
    frames: FrameTable,
    pose: PoseConfig | None = None,
    actions: ActionsConfig | None = None,
) -> Labelled:
    """Run the pose and actions stages on one recording."""
    _, clip = find(source, path, config)
    pixels = MediaTable(frames, np.zeros(len(frames), np.float32), {})
    corpus.write("work/frames.parquet", pack(pixels))
    artefact = Artefact(name="frames.parquet", path="work/frames.parquet", bytes=0, sha256="")
    ingest = _receipt("ingest", (artefact,))
    # Nothing was tracked: odometry does not apply.
    before = {"ingest": ingest, "gates": _receipt("gates"), "observe": _receipt("observe")}
    unit = Unit(clip, "p0", source, corpus, before)
    posed = run_unit(Pose(pose or PoseConfig(), config, Cameras()), unit)
    unit = replace(unit, receipts={**unit.receipts, "pose": posed})
    if posed.status is not Status.OK:
        return Labelled(unit, posed, _receipt("actions"))
    acted = run_unit(Actions(actions or ActionsConfig(), config, RotationRates()), unit)
    return Labelled(replace(unit, receipts={**unit.receipts, "actions": acted}), posed, acted)


def small_source(folder: Path, log: dict[str, Any], entry: dict[str, Any]) -> Store:
    """A source with one recording run.mp4 (empty: no stage here opens it), its run.csv, and a key map."""
    (folder / "run.mp4").touch()
    pd.DataFrame(log).to_csv(folder / "run.csv", index=False)
    games = [{"game": "toy", "videos": ["*.mp4"], "perspective": "fps", **entry}]
    (folder / "games.yaml").write_text(yaml.safe_dump({"games": games}))
    return Store(str(folder))


def _receipt(stage: str, outputs: tuple[Artefact, ...] = ()) -> Receipt:
    return Receipt(
        clip_id="c0", stage=stage, config="", inputs="", status=Status.OK, outputs=outputs, content="0"
    )

"""The second decode pass, over clips that passed the gates: what dear analysis needs of their pictures.

One pass feeds every observer: point tracks for visual odometry (unless the game gave its poses), the views
that show whether a clip closes a loop, how its pictures look, and the hashes that find its copies. Nothing
here depends on a calibration, so none of it is made again when one changes. Source: DESIGN 2, rule 1.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar, Literal

import cv2
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.frames import Observer, frame_pass
from pipeline.loops import Views, find_loop
from pipeline.media import media
from pipeline.pose.focal import Turns, find_turns
from pipeline.pose.tracks import Tracker, Tracks
from pipeline.quality.aesthetics import AestheticsConfig, load_scorer
from pipeline.quality.hashes import Hashes, to_text
from pipeline.quality.looks import LOOKS, Look, write_looks
from pipeline.stage import Fact, Result, Unit
from schemas import SCHEMA_VERSION
from schemas.clip import Clip
from schemas.quality import Verdict

TRACKS = "tracks.npz"


class ObserveConfig(BaseModel):
    """Settings of the observe stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    track: Literal["without_poses", "all", "none"] = Field(
        default="without_poses",
        description="clips whose points are tracked for odometry; none where it is not wanted",
    )
    aesthetics: AestheticsConfig = Field(
        default=AestheticsConfig(), description="who judges aesthetics; a proxy, named so, without weights"
    )


class Observe:
    """Stage: looks.npz (read it with `quality.looks.read_looks`), and tracks.npz (`read_tracks`) where
    odometry is wanted; facts about the loop, black bars and overlays, and the hashes of the clip."""

    name: ClassVar[str] = "observe"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("ingest", "gates")
    reads: ClassVar[tuple[str, ...]] = ("poses",)

    def __init__(self, config: ObserveConfig) -> None:
        self.config: ObserveConfig = config

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        # Results of OpenCV do not depend on its threads, but the load of a machine full of workers does.
        cv2.setNumThreads(1)
        views = Views()
        look, hashes = Look(load_scorer(self.config.aesthetics)), Hashes()
        tracker = Tracker() if self._wanted(unit.clip) else None
        observers: list[Observer] = [views, look, hashes]
        if tracker is not None:
            observers.append(tracker)
        with media(unit) as path:
            frame_pass(path, observers)
        looks = look.looks()
        write_looks(scratch / LOOKS, looks)
        files = {LOOKS: scratch / LOOKS}
        if tracker is not None:
            tracks = tracker.tracks()
            write_tracks(scratch / TRACKS, tracks, find_turns(tracks))
            files[TRACKS] = scratch / TRACKS
        search = find_loop(views.views)
        loop = search.closure
        facts: dict[str, Fact] = {
            "tracked": tracker is not None,
            "loop_closed": loop is not None,
            "loop_start": loop.first if loop else -1,
            "loop_end": loop.later if loop else -1,
            "loop_score": round(loop.score, 4) if loop else 0.0,
            "loop_reason": str(search.reason),
            "crop_top": looks.crop.top,
            "crop_bottom": looks.crop.bottom,
            "crop_left": looks.crop.left,
            "crop_right": looks.crop.right,
            "overlay_known": looks.flags.known,
            "hud_share": looks.flags.hud_share,
            "text_share": looks.flags.text_share,
            "watermark": looks.flags.watermark,
            "hashes": to_text(hashes.hashes()),
        }
        return Result(Verdict.ok(), files, facts)

    def _wanted(self, clip: Clip) -> bool:
        return self.config.track == "all" or (self.config.track == "without_poses" and clip.poses is None)


def write_tracks(path: Path, tracks: Tracks, turns: Turns) -> None:
    """Tracks and turns on the spot in one file; the same input gives the same bytes."""
    np.savez_compressed(
        path,
        schema_version=np.array(SCHEMA_VERSION),
        at=tracks.at,
        linked=np.packbits(tracks.linked, axis=1),
        repeat=tracks.repeat,
        size=np.array([tracks.width, tracks.height]),
        turn_focal=turns.focal,
        turn_shear=turns.shear,
    )


def read_tracks(unit: Unit) -> tuple[Tracks, Turns]:
    """Tracks and turns of a clip, from the observe stage's output."""
    data = unit.corpus.read(unit.receipts["observe"].output(TRACKS).path)
    with np.load(io.BytesIO(data), allow_pickle=False) as held:
        at = held["at"]
        linked = np.unpackbits(held["linked"], axis=1, count=at.shape[1]).astype(np.bool_)
        width, height = (int(v) for v in held["size"])
        tracks = Tracks(at, linked, held["repeat"], width, height)
        return tracks, Turns(held["turn_focal"], held["turn_shear"])

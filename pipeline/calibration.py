"""Corpus-wide calibration: cameras and rotation rates of games, pooled from their clips.

Each is a frozen record of a version (pipeline/statistics.py). A game is calibrated when its first clips are
there, and keeps its values while the corpus grows; `wp2 recalibrate` measures every game anew.
Source: DESIGN rule 10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pipeline.inputs import read_inputs
from pipeline.media import read_frames
from pipeline.observe import TRACKS, read_tracks
from pipeline.pose.focal import Turns, pool
from pipeline.pose.stage import read_poses
from pipeline.rotation import Recording, calibrate, recording
from pipeline.sources import SourceConfig, SourceError
from pipeline.sources.gameplay import entry_of
from pipeline.sources.sidecar import SidecarError
from pipeline.stage import Unit
from pipeline.store import StoreError
from schemas.action import RotationRates
from schemas.camera import CameraRecord, Cameras, shape_of
from schemas.quality import Status

CAMERA, ROTATION = "camera", "rotation"
MOST_CLIPS = 200
"""Clips of a game that are pooled, the first by id: 200 minutes of play, in which the spread of a rate is far
below what one clip shows."""


def calibrate_cameras(units: Iterable[Unit], games: set[str], source: SourceConfig) -> Cameras:
    """Cameras of these games by shape of picture: as the key map states them, else from the turns on the spot
    of their clips."""
    stated: dict[tuple[str, str], CameraRecord] = {}
    turns: dict[tuple[str, str], dict[str, Turns]] = defaultdict(dict)
    for unit in _passed(units, games, "observe"):
        facts = unit.receipts["ingest"].facts
        key = unit.clip.game, shape_of(int(facts["width"]), int(facts["height"]))
        if key not in stated and (camera := _stated(unit, source)) is not None:
            stated[key] = camera
        if unit.receipts["observe"].has(TRACKS) and len(turns[key]) < MOST_CLIPS:
            turns[key][unit.clip.clip_id] = read_tracks(unit)[1]
    out: dict[str, dict[str, CameraRecord]] = {game: {} for game in games}
    for (game, shape), clips in turns.items():
        found = pool([clips[i] for i in sorted(clips)])
        out[game][shape] = CameraRecord(
            focal=found.focal,
            look=str(found.look),
            look_known=found.look_known,
            n=found.n,
            mad=0.0 if found.focal is None else found.mad,
            clips=tuple(i for i in sorted(clips) if len(clips[i].focal)),
        )
    for (game, shape), camera in stated.items():
        out[game][shape] = camera
    return Cameras(games=out)


def _stated(unit: Unit, source: SourceConfig) -> CameraRecord | None:
    try:
        part = entry_of(unit, source).camera
    except (SourceError, StoreError):  # the key map is gone: what it said is not known
        return None
    if part is None:
        return None
    return CameraRecord(**part.model_dump(), look_known=True, n=0, mad=0.0)


def calibrate_rotation(units: Iterable[Unit], games: set[str], source: SourceConfig) -> RotationRates:
    """Rotation rates of these games from the logs and poses of their clips. A log that cannot be read any
    more is passed over: its clip's own stages report it."""
    chosen: dict[str, list[Recording]] = defaultdict(list)
    for unit in _passed(units, games, "pose"):
        if unit.clip.log is None or len(chosen[unit.clip.game]) >= MOST_CLIPS:
            continue
        table, track = read_frames(unit), read_poses(unit)
        try:
            part = entry_of(unit, source).log
            inputs = read_inputs(unit.source, unit.clip.log.path, part, table) if part else None
        except (SidecarError, SourceError, StoreError):
            continue
        if inputs is not None and track.valid.any():
            chosen[unit.clip.game].append(recording(unit.clip, table, inputs, track))
    found = calibrate(one for game in sorted(chosen) for one in chosen[game])
    return RotationRates(rates={game: found.rates.get(game, {}) for game in sorted(games)})


def _passed(units: Iterable[Unit], games: set[str], stage: str) -> Iterator[Unit]:
    """Units of these games that passed a stage."""
    for unit in units:
        receipt = unit.receipts.get(stage)
        if unit.clip.game in games and receipt is not None and receipt.status is Status.OK:
            yield unit

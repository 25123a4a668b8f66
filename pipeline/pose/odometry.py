"""The `vo` estimator: a clip's point tracks and its game's camera to windows, joined to one track."""

from __future__ import annotations

from pipeline.observe import TRACKS, read_tracks
from pipeline.pose import Estimated
from pipeline.pose.focal import Camera, pool
from pipeline.pose.stitch import stitch
from pipeline.pose.vo import VO, solve, window_track
from pipeline.pose.vo_fit import Look
from pipeline.stage import Unit
from schemas.camera import CameraRecord, Cameras, shape_of
from schemas.clip import Clip, FrameTable
from schemas.stitch import WindowTrack
from schemas.timeline import WINDOW, Span, windows


class Odometry:
    """Applies to clips that were tracked and whose camera is known: the game's frozen record at this shape of
    picture, or, for a clip of no game, the turns on the spot of the clip itself."""

    name = VO

    def __init__(self, cameras: Cameras) -> None:
        self._cameras = cameras

    def applies(self, unit: Unit) -> bool:
        return unit.receipts["observe"].has(TRACKS) and self._camera(unit) is not None

    def estimate(self, unit: Unit, table: FrameTable) -> Estimated:
        tracks, _ = read_tracks(unit)
        camera = self._camera(unit)
        if camera is None:
            raise ValueError(f"clip {unit.clip.clip_id} has no camera: ask `applies` first")
        steps = solve(tracks, camera)
        # A clip shorter than one window, where the gates let it through, is one short window.
        spans = windows(len(table)).spans if len(table) >= WINDOW else (Span(0, len(table)),)
        focal = camera.focal * tracks.width
        tracked = [WindowTrack(i, s, window_track(steps, s), False, focal) for i, s in enumerate(spans)]
        joined = stitch(tracked, len(table))
        # A frame is invalid for the doubt about the step that arrives in it.
        reasons = ("", *(str(doubt) for doubt in steps.doubt))
        return Estimated(joined.track, joined.windows, joined.seams, reasons)

    def frozen(self, clip: Clip) -> dict[str, CameraRecord]:
        """What this estimator reads of the frozen records for a clip."""
        return self._cameras.games.get(clip.game, {})

    def _camera(self, unit: Unit) -> Camera | None:
        if not unit.clip.game:
            return pool([read_tracks(unit)[1]]).camera
        facts = unit.receipts["ingest"].facts
        shape = shape_of(int(facts["width"]), int(facts["height"]))
        record = self._cameras.games.get(unit.clip.game, {}).get(shape)
        if record is None or record.focal is None:
            return None
        return Camera(record.focal, Look(record.look), record.aspect)

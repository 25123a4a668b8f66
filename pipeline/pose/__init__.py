"""Camera poses: estimators behind one small protocol, and the stage that runs them."""

from __future__ import annotations

from typing import Protocol

from pipeline.stage import Unit
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack


class Estimator(Protocol):
    """Gives a clip its track. name: what and which version, e.g. "given-1"; it is stored with every track."""

    @property
    def name(self) -> str: ...

    def applies(self, clip: Clip) -> bool: ...

    def estimate(self, unit: Unit, table: FrameTable) -> PoseTrack: ...

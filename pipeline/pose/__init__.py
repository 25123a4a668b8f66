"""Camera poses: estimators behind one small protocol, and the stage that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.stage import Unit
from schemas.clip import FrameTable
from schemas.pose import PoseTrack
from schemas.stitch import Seam, WindowRow


@dataclass(frozen=True)
class Estimated:
    """The track of a clip; of an estimator that works by windows, also these and how they were joined.

    reasons: why a frame has no pose, one a frame, where the estimator knows more than that it has none.
    """

    track: PoseTrack
    windows: tuple[WindowRow, ...] = ()
    seams: tuple[Seam, ...] = ()
    reasons: tuple[str, ...] = ()


class Estimator(Protocol):
    """Gives a clip its track. name: what and which version, e.g. "given-1"; it is stored with every track."""

    @property
    def name(self) -> str: ...

    def applies(self, unit: Unit) -> bool: ...

    def estimate(self, unit: Unit, table: FrameTable) -> Estimated: ...

"""The stages of `wp2 curate`, in order, from the config and the corpus's frozen statistics."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.config import CurateConfig
from pipeline.actions import Actions
from pipeline.calibration import CAMERA, ROTATION
from pipeline.caption.stage import Caption
from pipeline.clips.stage import Clips
from pipeline.flow import Flow, select
from pipeline.gates import Gates
from pipeline.ingest import Ingest
from pipeline.observe import Observe
from pipeline.pose.stage import Pose
from pipeline.quality.stage import Quality
from pipeline.shards.stage import Shards
from pipeline.stage import Stage
from pipeline.statistics import newest
from pipeline.store import Store
from schemas.action import RotationRates
from schemas.camera import Cameras

STAGES = (
    Clips.name,
    Ingest.name,
    Gates.name,
    Observe.name,
    Pose.name,
    Actions.name,
    Quality.name,
    Caption.name,
    Shards.name,
)


@dataclass(frozen=True)
class Statistics:
    """The frozen records that stages are given by value."""

    cameras: Cameras
    rotation: RotationRates

    @staticmethod
    def newest(corpus: Store) -> Statistics:
        return Statistics(
            newest(corpus, CAMERA, Cameras) or Cameras(),
            newest(corpus, ROTATION, RotationRates) or RotationRates(),
        )


def flow(config: CurateConfig, corpus: Store, statistics: Statistics, only: str | None = None) -> Flow:
    """The per-clip stages, up to `only`. Raises StageOrderError on a name that is no stage."""
    stages: tuple[Stage, ...] = (
        Ingest(config.ingest),
        Gates(config.gates),
        Observe(config.observe),
        Pose(config.pose, config.source, statistics.cameras),
        Actions(config.actions, config.source, statistics.rotation),
        Quality(),
        Caption(config.caption, config.source, config.serve),
    )
    return Flow(select(stages, None if only == Shards.name else only), corpus, config.storage)

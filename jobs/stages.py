"""The stages of `wp2 curate`, in order, from the config."""

from __future__ import annotations

from jobs.config import CurateConfig
from pipeline.actions import Actions
from pipeline.flow import Flow, select
from pipeline.gates import Gates
from pipeline.ingest import Ingest
from pipeline.pose.stage import Pose
from pipeline.shards.stage import Shards
from pipeline.stage import Stage
from pipeline.store import Store

STAGES = (Ingest.name, Gates.name, Pose.name, Actions.name, Shards.name)


def flow(config: CurateConfig, corpus: Store, only: str | None = None) -> Flow:
    """The per-clip stages, up to `only`. Raises StageOrderError on a name that is no stage."""
    stages: tuple[Stage, ...] = (
        Ingest(config.ingest),
        Gates(config.gates),
        Pose(config.pose, config.source),
        Actions(config.actions, config.source),
    )
    return Flow(select(stages, None if only == Shards.name else only), corpus, config.storage)

"""The stages of `wp2 curate`, in order, from the config."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.config import CurateConfig
from pipeline.actions import Actions
from pipeline.flow import Flow, select
from pipeline.gates import Gates
from pipeline.ingest import Ingest
from pipeline.pose.stage import Pose
from pipeline.shards.stage import Shards
from pipeline.sources.keymap import KeyMap
from pipeline.stage import Stage
from pipeline.store import Store

STAGES = (Ingest.name, Gates.name, Pose.name, Actions.name, Shards.name)


def flow(
    config: CurateConfig, corpus: Store, key_maps: Mapping[str, KeyMap], only: str | None = None
) -> Flow:
    """The per-clip stages, up to `only`. key_maps: by `Clip.source`. Raises StageOrderError on a wrong name."""
    stages: tuple[Stage, ...] = (
        Ingest(config.ingest),
        Gates(config.gates),
        Pose(config.pose, key_maps),
        Actions(config.actions, key_maps),
    )
    return Flow(select(stages, None if only == Shards.name else only), corpus, config.storage)

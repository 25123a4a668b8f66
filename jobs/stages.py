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
from pipeline.latents.stage import CODEC, Latents
from pipeline.latents.text import Text
from pipeline.observe import Observe
from pipeline.pose.stage import Pose
from pipeline.quality.stage import Quality
from pipeline.shards.stage import Shards
from pipeline.shards.write import ALWAYS
from pipeline.stage import Stage
from pipeline.statistics import newest
from pipeline.store import Store
from schemas.action import RotationRates
from schemas.camera import Cameras
from schemas.latents import FittedCodec
from schemas.sample import OPTIONAL

SHOWN = (
    Clips.name,
    Ingest.name,
    Gates.name,
    Observe.name,
    Pose.name,
    Actions.name,
    Quality.name,
    Latents.name,
    Caption.name,
    Text.name,
    Shards.name,
)
"""Every stage, in order. Latents come before captions: what is captioned again keeps them."""

STAGES = tuple(name for name in SHOWN if name not in OPTIONAL)
"""Those that every corpus has."""


@dataclass(frozen=True)
class Statistics:
    """The frozen records that stages are given by value."""

    cameras: Cameras
    rotation: RotationRates
    codec: FittedCodec | None

    @staticmethod
    def newest(corpus: Store) -> Statistics:
        return Statistics(
            newest(corpus, CAMERA, Cameras) or Cameras(),
            newest(corpus, ROTATION, RotationRates) or RotationRates(),
            newest(corpus, CODEC, FittedCodec),
        )


def flow(config: CurateConfig, corpus: Store, statistics: Statistics, only: str | None = None) -> Flow:
    """The per-clip stages, up to `only`. Raises StageOrderError on a name that is no stage, CodecError where
    there are no weights at a path."""
    stages: list[Stage] = [
        Ingest(config.ingest),
        Gates(config.gates),
        Observe(config.observe),
        Pose(config.pose, config.source, statistics.cameras),
        Actions(config.actions, config.source, statistics.rotation),
        Quality(),
    ]
    if config.latents.codec.kind != "none":
        stages.append(Latents(config.latents, statistics.codec))
    stages.append(Caption(config.caption, config.source, config.serve))
    if config.text.kind != "none":
        stages.append(Text(config.text))
    return Flow(select(tuple(stages), None if only == Shards.name else only), corpus, config.storage)


def shards(config: CurateConfig, corpus: Store) -> Shards:
    """The last stage, with the families that the config asks for."""
    kinds = {Latents.name: config.latents.codec.kind, Text.name: config.text.kind}
    asked = tuple(family for family, kind in kinds.items() if kind != "none")
    return Shards(config.shards, corpus, ALWAYS + asked)

"""What a run of stage 5 is given, and what it tells: records alone.

Source: spec/worldplay2.md g.2, n.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.distributed.mesh import Parallel
from trainer.model.wan import WanModel
from trainer.objectives.passes import Network
from trainer.schedule import PddSchedule
from trainer.stable.watch import Late, Pictures, WatchConfig


@dataclass(frozen=True)
class StableTask:
    """What a run of stage 5 is. folder: of its metrics. teacher: what its samples look like. critics:
    parameters that are trained of each fake score: the network itself, or its low-rank additions."""

    stage: Stage
    preset: Preset
    seed: int
    parallel: Parallel
    schedule: PddSchedule
    codec: Codec
    folder: Path
    teacher: Late
    watch: WatchConfig = field(default_factory=WatchConfig)
    save_every: int = 20
    host_ema: bool = False
    save_minutes: float = 15.0


@dataclass(frozen=True)
class Readers:
    """Frozen copies by expert."""

    student: Mapping[str, WanModel]
    fake: Mapping[str, WanModel]


@dataclass(frozen=True)
class Roles:
    """The networks by expert, sharded. real: frozen; where the fake score is low-rank additions, that network
    without them (`lora.Plain`). additions: what is trained of a fake score, None for all of it. readers: of
    `turns`, frozen copies of the student and the fake score, read in the place of those that wait on the
    host; none of a fake score that is additions."""

    student: Mapping[str, WanModel]
    fake: Mapping[str, WanModel]
    real: Mapping[str, Network]
    additions: Mapping[str, nn.Module] | None = None
    readers: Readers | None = None


@dataclass(frozen=True)
class StableRecord:
    """One step. sizes: mean |g| by noise level. critic: mean loss of the fake score's updates. before, after,
    real, updates: by expert, as in `watch.Critic`. motion .. drift: by chunk, as in `watch.Pictures`.
    seconds: of each part."""

    stage: str
    step: int
    chunks: int
    left_out: int
    waited: bool
    sizes: dict[str, float]
    critic: float
    before: dict[str, float]
    after: dict[str, float]
    real: dict[str, float]
    updates: dict[str, int]
    grad_norm: dict[str, float]
    lr: float
    motion: tuple[float, ...]
    saturation: tuple[float, ...]
    sharpness: tuple[float, ...]
    drift: tuple[float, ...]
    memory_gb: float
    seconds: dict[str, float]

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def line(self) -> str:
        """For a terminal."""
        norms = ", ".join(f"{name} {norm:.3g}" for name, norm in self.grad_norm.items())
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        scores = ", ".join(
            f"{name} {self.before[name]:.4f} to {self.after[name]:.4f} (real {self.real[name]:.4f})"
            for name in self.before
        )
        return (
            f"fake score {scores}, "
            f"{'student waits' if self.waited else f'gradient {norms}'}, {self.memory_gb:.1f} GB, s: {spent}"
        )

    def scalars(self) -> Sequence[tuple[str, float]]:
        """For TensorBoard."""
        plain = ("left_out", "critic", "lr", "memory_gb")
        found = [(name, float(getattr(self, name))) for name in plain]
        for name in ("sizes", "before", "after", "real", "grad_norm", "seconds"):
            found += [(f"{name}/{key}", value) for key, value in getattr(self, name).items()]
        late = Pictures(self.motion, self.saturation, self.sharpness, self.drift).late()
        return [*found, *((f"late_{name}", value) for name, value in vars(late).items())]


@dataclass(frozen=True)
class StableHooks:
    """What a caller is told: `trainer.loop.Hooks` without looks."""

    seen: Callable[[StableRecord], None] = lambda record: None
    stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = print

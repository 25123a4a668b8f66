"""The two corpora of the learning benchmark: how each is recorded, curated, trained on, and judged.

Steps are those of 120 minutes on two quiet cores for both together; other budgets scale them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learn import footage

Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Bars:
    """What must hold. None: reported without a bar. dB are of pictures, against the codec-decoded truth.

    sides: least share of starts turned to both sides whose flow has the right sign. flow: least size of it,
    as a share of the truth's. yaw_db, yaw_share: true yaw beats flipped yaw by so much, in so many episodes.
    next_db: the next chunk beats the last frame held. recall_db: frame queries, own memory against another's.
    loops_t, loops_share: of return chunks, own memory against none and against another's.
    """

    sides: float | None
    flow: float | None
    yaw_db: float
    yaw_share: float
    next_db: float
    recall_db: float
    loops_t: float | None
    loops_share: float | None


@dataclass(frozen=True)
class Made:
    """One corpus. steps: of each expert, by stage. histories: chunks of memory, by stage.

    start: the corpus whose weights of stage 3 it begins from; "" for fresh ones.
    latents: of the probe's episodes; counts: of recordings by kind, for `wp2 record`.
    held_out: share of recordings. codec: a fitted one, of the corpus that weights were trained on.
    little: gates and videos too are of a run that only shows that it runs.
    """

    name: str
    bars: Bars
    steps: dict[str, int]
    histories: dict[str, list[int]]
    episodes: int = 0
    latents: int = 0
    start: str = ""
    counts: dict[str, int] | None = None
    seconds: float = 0.0
    events: float = 0.0
    batch: int = 8
    held_out: float = 0.1
    codec: str | None = None
    little: bool = False

    def curate(self, cpus: int) -> dict[str, Any]:
        """The config of `wp2 curate`."""
        found: dict[str, Any] = {
            "caption": {"source": "log"},
            "latents": {"codec": {"kind": "linear", "path": self.codec}, "height": 64, "width": 128},
            "text": {"kind": "minilm"},
            "run": {"cpus": cpus, "val_share": self.held_out},
        }
        if self.counts is None:
            # Painted panels are neither sharp nor detailed, and one world's panels are much like another's.
            axes = (
                "sharpness",
                "detail",
                "noise",
                "compression",
                "dynamic_range",
                "aesthetics",
                "smoothness",
            )
            found["select"] = {
                "tiers": {"high": {}},
                "floor": dict.fromkeys(axes, 0.0),
                "enough": dict.fromkeys(axes, 0.0),
                "duplicates": {"drop": False},
            }
        return found

    def train(self, share: float, seed: int) -> dict[str, Any]:
        """The config of `wp2 train`. share: of the steps."""
        stages: dict[str, Any] = {}
        for name, steps in self.steps.items():
            stages[name] = {
                "steps": max(1, round(share * steps)),
                "batch": self.batch,
                "micro": self.batch,
                "optim": dict(OPTIM),
                "histories": self.histories[name],
                "events": 0.0 if name == "1" else self.events,
            }
        stages["3"]["memory_drop"] = MEMORY_DROP
        return {
            "preset": "small",
            "seed": seed,
            "stages": stages,
            "parallel": {"precision": "bfloat16"},
            # Prompts are of logs and say little: guidance away from the negative one only adds noise.
            "look": {"clips": 2, "chunks": 6, "steps": 10, "guidance": 1.0}
            if not self.little
            else {"clips": 1, "chunks": 2, "steps": 2, "guidance": 1.0},
            "gate": {"clips": 16, "levels": 2} if not self.little else {"clips": 2, "batch": 2, "levels": 1},
            "save_every": 200,
        }


OPTIM = {"lr": 2e-3, "betas": [0.9, 0.99], "warmup": 50, "decay": 0.3, "ema": 0.98}
"""Of every stage and expert. Measured on the probe world: docs/learning.md."""

MEMORY_DROP = 0.15
"""Of stage 3: "no memory" is a control of its own only where it was trained."""

PROBE = Made(
    "probe",
    Bars(0.95, 0.2, 1.5, 0.9, 1.5, 3.0, 4.0, 0.85),
    steps={"1": 250, "2a": 1400, "2b": 200, "3": 1500},
    histories={"1": [0], "2a": [4, 8, 12], "2b": [2, 4], "3": [0, 2, 4, 6, 8]},
    episodes=800,  # of 360, 18 epochs of stage 3 began to be known by heart
    latents=48,
)
VIZDOOM = Made(
    "vizdoom",
    Bars(None, None, 0.2, 0.7, 0.5, 3.0, None, None),
    steps={"2a": 400, "2b": 60, "3": 850},
    histories={"2a": [4, 6, 8], "2b": [2, 4], "3": [0, 2, 3, 4]},
    start="probe",  # as the full model begins from a video model: keys and memory are known
    counts={"navigation": 130, "loops": 8, "events": 5},
    seconds=12.5,
    held_out=0.2,
    events=0.75,  # of four clips three open a door
)
CORPORA = (PROBE, VIZDOOM)


def record_probe(folder: Path, episodes: int, latents: int, tick: Tick) -> None:
    footage.write(folder, episodes, seed=0, latents=latents, tick=tick)

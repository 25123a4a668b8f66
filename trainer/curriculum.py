"""The curriculum: what each stage minimises, on what data, from where, and what must hold before the next.

Stages: 1 actions on independent clips; 2a frame queries through memory and 2b the next clip (TinyHistory);
3 teacher-forced chunks; 4 few steps (PDD); 5 Stable Forcing. Lengths are in latents, histories in chunks.
Source: spec/worldplay2.md c.4, d, e, f.3, g, k.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum

from schemas.timeline import LATENTS_PER_CHUNK
from trainer.config import ConfigError

CLIP = 32
"""Latents of a target of stages 1 and 2, and of the clips that are scored in stage 5."""
ADDITIONS_LR = 1e-4
"""Rate of low-rank additions, the usual one. They begin at zero: at that of whole weights, 4e-7, it takes
thousands of updates to change the weights that they are added to by a hundredth."""


class Objective(StrEnum):
    CLIP = "clip"  # flow matching of a whole clip at one noise level, with or without memory
    QUERIES = "queries"  # latents of the history, answered through compressed memory alone
    CHUNKS = "chunks"  # teacher-forced chunks, a noise level each
    PDD = "pdd"
    STABLE = "stable"


class Draw(StrEnum):
    LOGIT_NORMAL = "logit_normal"
    UNIFORM = "uniform"


@dataclass(frozen=True)
class SigmaLaw:
    """Noise levels of training: u is drawn, sigma = s u / (1 + (s - 1) u), restricted to the range of the
    expert by drawing u inside its pre-image. mean, std: of the normal variable whose logistic is u.
    per_chunk: a level for each chunk, else one for the whole target. Source: spec/worldplay2.md e."""

    draw: Draw = Draw.LOGIT_NORMAL
    mean: float = 0.0
    std: float = 1.0
    shift: float = 5.0
    per_chunk: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. betas[0] = 0 keeps no first moment. eight_bit: moments of 8 bits (torchao). clip: largest global
    gradient norm. warmup: steps of linear rise; then constant, unless decay: share of the steps, at the end,
    over which the rate falls to zero. ema_from: first step that the average takes in."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    eight_bit: bool = False
    clip: float = 1.0
    warmup: int = 0
    decay: float = 0.0
    ema: float = 0.999
    ema_from: int = 0


class Law(StrEnum):
    """How recorded action rows become those of a longer rollout. OUT_AND_BACK: the recorded way, then the
    same way back, and so on. JOINED: behind it the rows of other clips of the same game."""

    OUT_AND_BACK = "out_and_back"
    JOINED = "joined"


class Solver(StrEnum):
    EULER = "euler"
    MIDPOINT = "midpoint"


@dataclass(frozen=True)
class PddConfig:
    """Stage 4. solver: of the teacher's mean velocity over an interval. guidance: w of u + w (c - u), folded
    into it. Source: spec/worldplay2.md f.3."""

    solver: Solver = Solver.MIDPOINT
    guidance: float = 3.5


@dataclass(frozen=True)
class StableConfig:
    """Stage 5. latents: of a rollout. law: how recorded controls are extended to it. clip: latents that are
    scored at once; with all of a rollout scores see it whole, and need no memory (the full-context baseline).
    replayed: clips at the end of a rollout whose chunks are replayed; 0 for all, as published.

    guidance: of the real score, w of u + w (c - u); the fake one has none.
    shift, lowest, highest: of the noise levels at which clips are scored.
    floor: least mean |x - x0_real|, as a share of the clip's root mean square. limit: largest |g| kept.
    critic_steps, critic_lr: updates of the fake score for one of the student, and their rate.
    critic_rank: train low-rank additions to the real score in place of a network of its own; 0 for none. They
    need a rate of their own, about ADDITIONS_LR.
    turns: train one expert a step, in turn, while masters and moments of the others wait on the host and
    copies of them are read; else all at once.
    score: the stage whose averages are the real score, with which the fake score begins too. teacher: the
    stage whose samples rollouts must look like. Either may be a path of exported weights.
    Source: spec/worldplay2.md g.2, g.3, n.4.
    """

    latents: int = 320
    law: Law = Law.OUT_AND_BACK
    clip: int = CLIP
    replayed: int = 0
    guidance: float = 3.5
    shift: float = 5.0
    lowest: float = 0.02
    highest: float = 0.98
    floor: float = 0.01
    limit: float = 100.0
    critic_steps: int = 5
    critic_lr: float = 4e-7
    critic_rank: int = 0
    turns: bool = False
    score: str = "2b"
    teacher: str = "3"

    def check(self, stage: str) -> None:
        """Raises ConfigError."""
        if self.clip < 1 or self.latents < 1 or self.latents % self.clip:
            raise ConfigError(
                f"stage {stage}: a rollout of {self.latents} latents does not split into clips of {self.clip}"
            )
        if not 0 <= self.replayed <= self.latents // self.clip:
            raise ConfigError(
                f"stage {stage}: {self.replayed} clips replayed, of {self.latents // self.clip} in a rollout"
            )
        if self.critic_rank and self.critic_lr < ADDITIONS_LR / 10:
            raise ConfigError(
                f"stage {stage}: critic_rank {self.critic_rank} with critic_lr {self.critic_lr:g} would not "
                f"move: additions begin at zero, give critic_lr {ADDITIONS_LR:g}"
            )


@dataclass(frozen=True)
class Stage:
    """One stage. start: the stage whose weights it begins with, None for the first. steps: of each expert.

    batch: samples of a step, over all ranks. micro: samples of one forward pass. target: latents predicted
    (for queries: how many at most; else whole chunks). histories: chunks of memory that a sample may have;
    the longest that its clip allows are left out for it. segments: independent encodes instead of the
    continuous one. events: share of samples from event clips. trainable: prefixes of parameter names, "" for
    all.
    text_drop: share of samples with the negative prompt alone; field_drop: whose prompt lacks fields.
    memory_drop: share of the steps of an objective of chunks without compressed frames, so that a network
    without them is one that was trained; else "no memory" is no fair control of memory.
    gate: name of the held-out measure that must pass before the next stage starts; empty for none.
    pdd, stable: settings of those objectives.
    """

    name: str
    objective: Objective
    start: str | None
    steps: int
    target: int
    histories: tuple[int, ...]
    segments: bool = False
    batch: int = 64
    micro: int = 1
    events: float = 0.0
    sigma: SigmaLaw = field(default_factory=SigmaLaw)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainable: tuple[str, ...] = ("",)
    text_drop: float = 0.1
    field_drop: float = 0.2
    memory_drop: float = 0.0
    gate: str = ""
    pdd: PddConfig = field(default_factory=PddConfig)
    stable: StableConfig = field(default_factory=StableConfig)

    def __post_init__(self) -> None:
        for what in ("steps", "batch", "micro", "target"):
            if getattr(self, what) < 1:
                raise ConfigError(f"stage {self.name}: {what} is {getattr(self, what)}, at least 1 needed")
        if self.batch % self.micro:
            raise ConfigError(
                f"stage {self.name}: a batch of {self.batch} does not split into passes of micro {self.micro}"
            )
        for what in ("events", "text_drop", "field_drop", "memory_drop"):
            if not 0.0 <= (share := getattr(self, what)) <= 1.0:
                raise ConfigError(
                    f"stage {self.name}: {what} is {share}: a share lies in 0 to 1 (10 % is 0.1)"
                )
        if self.objective is Objective.QUERIES:
            if self.sigma.per_chunk:
                raise ConfigError(
                    f"stage {self.name}: frame queries are no chunks: sigma.per_chunk is not theirs"
                )
        elif self.target % LATENTS_PER_CHUNK:
            raise ConfigError(
                f"stage {self.name}: a target of {self.target} latents: whole chunks of "
                f"{LATENTS_PER_CHUNK} needed"
            )
        if self.segments and (self.histories != (0,) or self.target != CLIP):
            raise ConfigError(f"stage {self.name}: an independent encode is {CLIP} latents without history")
        if self.memory_drop and self.objective is not Objective.CHUNKS:
            raise ConfigError(f"stage {self.name}: memory_drop is of chunks, not of {self.objective.value}")
        if self.objective is Objective.STABLE:
            self.stable.check(self.name)

    def seed(self, run: int) -> int:
        """Of this stage's draws, in a run of seed `run`: the sample at a position has other noise, another
        noise level and other text in every stage. Source: DESIGN rule 9."""
        return int.from_bytes(hashlib.sha256(f"{run}|stage|{self.name}".encode()).digest()[:8], "big") >> 1


STAGES: tuple[Stage, ...] = (
    Stage("1", Objective.CLIP, None, 20_000, CLIP, (0,), segments=True, gate="actions"),
    Stage("2a", Objective.QUERIES, "1", 10_000, 4, (4, 8, 12, 16, 24), events=0.1, gate="recall"),
    Stage("2b", Objective.CLIP, "2a", 20_000, CLIP, (0, 2, 4, 8, 16), events=0.1, gate="memory"),
    Stage(
        "3",
        Objective.CHUNKS,
        "2b",
        20_000,
        16,
        (0, 1, 2, 4, 8, 16, 24, 32),
        events=0.1,
        sigma=SigmaLaw(per_chunk=True),
        gate="next_chunk",
    ),
    Stage(
        "4",
        Objective.PDD,
        "3",
        2_000,
        16,
        (0, 1, 2, 4, 8, 16, 24, 32),
        events=0.1,
        optim=OptimConfig(weight_decay=0.0),
        text_drop=0.0,
        gate="few_steps",
    ),
    Stage(
        "5",
        Objective.STABLE,
        "4",
        1_000,
        CLIP,
        (0,),
        batch=32,
        events=0.1,
        optim=OptimConfig(lr=2e-6, betas=(0.0, 0.999), weight_decay=0.01, clip=10.0, ema=0.99, ema_from=200),
        text_drop=0.0,
        field_drop=0.0,
    ),
)
"""Full size. Steps and batch are this project's start values: the authors published none."""

_SMALL = {"1": 250, "2a": 2400, "2b": 200, "3": 1400, "4": 300, "5": 40}
"""Steps of the presets `tiny` and `small`, for two cores."""


def curriculum(preset: str) -> tuple[Stage, ...]:
    """The stages of a preset, in order."""
    if preset not in ("tiny", "small"):
        return STAGES
    optim = OptimConfig(lr=2e-3, betas=(0.9, 0.99), warmup=50, decay=0.2, ema=0.98)
    histories = {"1": (0,), "2a": (4, 6, 8), "2b": (0, 2, 4, 6)}
    small = dict.fromkeys(("1", "2a", "2b", "3"), optim) | {"4": replace(optim, lr=1e-3)}
    small["5"] = replace(optim, lr=1e-4, betas=(0.0, 0.999), warmup=0, decay=0.0, clip=10.0, ema=0.9)
    return tuple(
        replace(
            s,
            steps=_SMALL[s.name],
            batch=8,
            micro=8,
            histories=histories.get(s.name, (0,) if s.name == "5" else (0, 2, 3, 4)),
            optim=small[s.name],
            stable=replace(s.stable, latents=96, critic_lr=3e-4),
        )
        for s in STAGES
    )


def select(stages: tuple[Stage, ...], span: str) -> tuple[Stage, ...]:
    """Stages of "3", "1-3" or "2a-2b"; a number stands for all of its phases. Raises ConfigError."""
    first, dash, last = span.partition("-")
    if dash and not last:
        raise ConfigError(f"stages {span!r} have no end: as 1-3, 2a-2b or 3")

    def places(name: str) -> list[int]:
        found = [k for k, s in enumerate(stages) if s.name == name or s.name.rstrip("ab") == name]
        if not found:
            raise ConfigError(f"no stage {name!r}: one of {', '.join(s.name for s in stages)}")
        return found

    start, stop = places(first)[0], places(last or first)[-1]
    if stop < start:
        raise ConfigError(f"stages {span!r} go backwards")
    return stages[start : stop + 1]

"""What a step of each stage runs: passes of one sample, how often each, with or without gradient.

Source: spec/worldplay2.md c.4, d, e, f.3, g.2, n.5. As trainer/loop.py and trainer/stable/loop.py run it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from schemas.timeline import chunk_latents, interval_of_latents, latents_time
from trainer.config import LATENTS_PER_PAIR, ModelConfig, Preset
from trainer.curriculum import Objective, Solver, Stage, curriculum, select
from trainer.flops import Flops, count
from trainer.model.layout import (
    NOTHING,
    Layout,
    Rule,
    anchor,
    clip,
    compressed,
    frame_queries,
    memory,
    prefill,
    sink,
    target,
)
from trainer.objectives.flow import bucketed
from trainer.schedule import schedule_of
from trainer.stable.loop import PROBES


@dataclass(frozen=True)
class Pass:
    """One forward pass of one sample. prompts: of the sample. context: cached memory, whose text is cached
    too. bank: (R, K), rows of coefficients over K few-step heads."""

    layout: Layout
    rule: Rule
    prompts: int = 1
    context: Layout = NOTHING
    bank: tuple[int, int] | None = None
    cached_text: bool = False

    @cached_property
    def tokens(self) -> int:
        return self.layout.tokens

    def flops(self, config: ModelConfig) -> Flops:
        return count(
            config,
            self.layout,
            self.rule,
            prompts=self.prompts,
            context=self.context,
            cached_text=self.cached_text,
            bank=self.bank,
        )


@dataclass(frozen=True)
class Run:
    """A pass and how often a sample of a step needs it. trained: with gradient."""

    what: str
    run: Pass
    times: float = 1.0
    trained: bool = False

    def flops(self, config: ModelConfig, *, checkpointing: bool) -> float:
        flops = self.run.flops(config)
        return self.times * (flops.training(checkpointing=checkpointing) if self.trained else flops.total)


@dataclass(frozen=True)
class Work:
    """One sample of a step of one stage.

    frozen: networks beside the trained one that are only read. loaded: networks that a rank has whole at once
    before the first step. cache: tokens whose keys and values are kept while a rollout is played, scored and
    replayed, all experts together. played: bytes beside them. kept: bytes of a rollout from then on, until
    the fake score has been trained on all of a step. experts: of the model.
    """

    stage: Stage
    runs: tuple[Run, ...]
    experts: int
    frozen: int = 0
    loaded: int = 1
    cache: int = 0
    played: int = 0
    kept: int = 0

    @property
    def is_stable(self) -> bool:
        return self.stage.objective is Objective.STABLE

    @property
    def rounds(self) -> int:
        """How often the steps of the stage are made: by each expert, or once where a step trains both."""
        return 1 if self.is_stable else self.experts

    def longest(self, *, trained: bool) -> tuple[Pass, ...]:
        """Of the passes with or without gradient, that with most tokens, and that over most memory."""
        found = [r.run for r in self.runs if r.trained is trained]
        if not found:
            return ()
        return (
            max(found, key=lambda run: (run.tokens, run.context.tokens)),
            max(found, key=lambda run: (run.context.tokens, run.tokens)),
        )

    def tokens(self) -> float:
        """Tokens of a sample that run with gradient."""
        return sum(r.times * r.run.tokens for r in self.runs if r.trained)


def stages_of(preset: Preset, span: str) -> tuple[Stage, ...]:
    """Stages of "3", "1-5" or "2a". Raises ConfigError with the names there are."""
    return select(curriculum(preset.name), span)


def work_of(preset: Preset, stage: Stage) -> Work:
    """What one sample of a step runs, on average over the histories that it may have."""
    experts = len(preset.experts)
    if stage.objective is Objective.STABLE:
        return _stable(preset, stage)
    runs: list[Run] = []
    for layout, rule, prompts, share in _sequences(preset, stage):
        if stage.objective is not Objective.PDD:
            runs.append(Run("trained", Pass(layout, rule, prompts), share, trained=True))
            continue
        asked = stage.pdd
        heads = max(len(span) for _, span in schedule_of(preset).experts)
        runs.append(Run("student", Pass(layout, rule, prompts, bank=(2, heads)), share, trained=True))
        calls = 2 if asked.solver is Solver.MIDPOINT else 1
        runs.append(Run("teacher", Pass(layout, rule, prompts), calls * share))
        if asked.guidance != 1.0:
            runs.append(Run("teacher, guidance", Pass(layout, rule), calls * share))
    taught = stage.objective is Objective.PDD
    return Work(stage, tuple(runs), experts, frozen=1 if taught else 0, loaded=2 if taught else 1)


def prompts_of(chunks: int) -> int:
    """Prompts that chunks [0, chunks) read: those of the 5 s intervals that hold their middles."""
    last = chunk_latents(chunks - 1)
    return interval_of_latents(latents_time(last)[1], last) + 1


def _sequences(preset: Preset, stage: Stage) -> Iterable[tuple[Layout, Rule, int, float]]:
    """(sequence, rule, prompts, share of the samples) of stages 1 to 4; histories come equally often."""
    chunks, share = stage.target // preset.chunk, 1 / len(stage.histories)
    for history in stage.histories:
        if stage.objective is Objective.CLIP:
            yield clip(preset, history, chunks), Rule.FULL, 1, share
        elif stage.objective is Objective.QUERIES:
            for asked in range(1, stage.target + 1):
                layout = frame_queries(preset, history, tuple(range(asked)))
                yield layout, Rule.FULL, 1, share / stage.target
        else:
            yield bucketed(preset, history, chunks), Rule.CAUSAL, prompts_of(history + chunks), share


def _stable(preset: Preset, stage: Stage) -> Work:
    """Stage 5, one expert trained a step (`turns`): a rollout, its scores, the replay of chunks whose
    recorded step is the expert's, the fake score's updates on one clip each, its probes on the last one."""
    config, schedule = stage.stable, schedule_of(preset)
    chunks, experts = config.latents // preset.chunk, len(preset.experts)
    clips, per_clip = config.latents // config.clip, config.clip // preset.chunk
    runs: list[Run] = []
    for index in range(chunks):
        past, own = memory(preset, index), target(preset, index, index + 1)
        heads = max(schedule.heads(name) for name in preset.experts)
        step = Pass(own, Rule.CAUSAL, context=past, bank=(2, heads), cached_text=True)
        runs.append(Run("rollout", step, len(schedule.blocks)))
        if index + 1 < chunks:
            before = NOTHING if index == 0 else sink(preset) + compressed(preset, 0, index)
            fill = Pass(prefill(preset, index + 1, index), Rule.CAUSAL, context=before, cached_text=True)
            runs.append(Run("prefill", fill, experts))
        if config.replayed and index < chunks - config.replayed * per_clip:
            continue
        if index:
            again = sink(preset) + compressed(preset, 0, index)
            filled = Pass(anchor(preset, index), Rule.CAUSAL, context=again)
            runs.append(Run("replay: anchor", filled, 1 / experts))
        replayed = Pass(own, Rule.CAUSAL, context=past, bank=(2, heads))
        runs.append(Run("replay", replayed, 1 / experts, trained=True))
    for index in range(clips):
        scored = Pass(clip(preset, index * per_clip, per_clip), Rule.FULL)
        calls = 2 if config.guidance == 1.0 else 3
        runs.append(Run("scores", scored, calls))
        runs.append(Run("critic", scored, config.critic_steps / clips, trained=True))
        if index + 1 == clips:
            runs.append(Run("probes", scored, 3 * len(PROBES)))
    last = memory(preset, chunks - 1).tokens
    latent, low = (prod(size) for size in (preset.geometry.latent, preset.geometry.low_latent))
    states = gradients = 4 * preset.model.out_dim * config.latents * latent
    # Both streams with their image condition, fp32; the last chunk has no low one (`Played`).
    pairs = (config.latents - preset.chunk) // LATENTS_PER_PAIR
    kept = 4 * preset.model.in_dim * (config.latents * latent + pairs * low)
    return Work(stage, tuple(runs), experts, cache=experts * last, played=states + gradients, kept=kept)

"""Ways to lay a stage out on GPUs, made of options that `wp2 train` has: what fits, and how long it takes.

Bytes a parameter: master 4, gradient 4 (both sharded, fp32), moments 8, 4 or 2, average 4; what is only read
2; being loaded 4, whole on every rank. Everything is counted for the rank that has most.
Source: spec/worldplay2.md g.4, n.4 to n.6.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from jobs.estimate.footprint import Parameters, activations, kv_bytes, parameters
from jobs.estimate.work import Work
from trainer.config import ConfigError, Preset
from trainer.curriculum import ADDITIONS_LR, OptimConfig
from trainer.distributed.ulysses import cut
from trainer.model.layout import Layout, LayoutError

GB = 1e9
PROCESS_BYTES = 4 * GB
"""Host memory of a rank: interpreter, CUDA's and the loader's buffers."""
LORA_RANK = 128
DAY = 86_400.0


class Adam(StrEnum):
    """Moments of the trained parameters. The first is the stage's own beta1, or 0.9 where it keeps none."""

    FULL = "Adam"
    EIGHT_BIT = "8-bit Adam"
    NO_FIRST = "no first moment"

    @property
    def bytes(self) -> float:
        """A parameter. Eight bits: two codes, and two fp32 scales of 256 of them."""
        return {Adam.FULL: 8.0, Adam.EIGHT_BIT: 2.0 + 2 * 4 / 256, Adam.NO_FIRST: 4.0}[self]

    @staticmethod
    def of(optim: OptimConfig) -> Adam:
        if optim.eight_bit:
            return Adam.EIGHT_BIT
        return Adam.FULL if optim.betas[0] else Adam.NO_FIRST

    def settings(self, own: OptimConfig) -> dict[str, Any]:
        """Of `optim`, where a stage has `own`. Both keys always: one alone may contradict the stage's."""
        first = 0.0 if self is Adam.NO_FIRST else own.betas[0] or OptimConfig().betas[0]
        return {"betas": [first, own.betas[1]], "eight_bit": self is Adam.EIGHT_BIT}


@dataclass(frozen=True)
class Machine:
    """nodes of `gpus` each. gpu_bytes: of one GPU that tensors may take. host_bytes: of one node.
    flops: dense bf16 FLOP/s of a GPU; mfu: share of them that training reaches."""

    gpus: int
    gpu_bytes: float
    host_bytes: float
    nodes: int = 1
    flops: float = 148e12
    mfu: float = 0.5

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Recipe:
    """Options of `wp2 train`. replicate: copies of the sharded network. sequence: ranks a sample. lora: the
    fake score is the frozen real one with adapters (stage 5)."""

    replicate: int = 1
    sequence: int = 1
    checkpointing: bool = True
    adam: Adam = Adam.FULL
    host_ema: bool = False
    offload: bool = False
    lora: bool = False

    def words(self) -> str:
        parts = [f"HSDP x{self.replicate}"] if self.replicate > 1 else []
        parts += [f"sequence {self.sequence}"] if self.sequence > 1 else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [str(self.adam)]
        parts += ["LoRA critic"] if self.lora else []
        parts += ["average on host"] if self.host_ema and not self.offload else []
        parts += ["CPU offload"] if self.offload else []
        return ", ".join(parts)

    def settings(self, preset: Preset, work: Work, machine: Machine) -> dict[str, Any]:
        """The YAML of `wp2 train --config`, of all that was planned."""
        own = work.stage
        stage: dict[str, Any] = {"steps": own.steps, "batch": own.batch, "micro": own.micro}
        stage["optim"] = self.adam.settings(own.optim)
        if work.is_stable:
            stage["stable"] = {"turns": True}
            if self.lora:
                stage["stable"] |= {"critic_rank": LORA_RANK, "critic_lr": ADDITIONS_LR}
        return {
            "preset": preset.name,
            "parallel": {
                "replicate": self.replicate,
                "shard": machine.world // (self.replicate * self.sequence),
                "sequence": self.sequence,
                "precision": "bfloat16",
                "checkpointing": self.checkpointing,
                "offload": self.offload,
            },
            "host_ema": self.host_ema,
            "stages": {own.name: stage},
        }

    def simplicity(self, own: OptimConfig) -> tuple[int, ...]:
        """Of two recipes as fast as each other the one that changes less: training itself, then speed.
        own: the stage's."""
        order = (Adam.of(own), *Adam).index(self.adam)
        return (int(self.lora), order, int(self.offload), int(self.host_ema), self.sequence, -self.replicate)


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes: bytes of the fullest GPU and of a node by part, seconds of a step.

    host: of a node in training. loading: of a node before the first step, while weights are loaded, which is
    never at the same time.
    """

    recipe: Recipe
    gpu: Mapping[str, float]
    host: Mapping[str, float]
    loading: float
    step_s: float
    days: float

    @cached_property
    def gpu_bytes(self) -> float:
        return sum(self.gpu.values())

    @cached_property
    def host_bytes(self) -> float:
        """At the worst moment."""
        return max(sum(self.host.values()), self.loading)

    def over(self, machine: Machine) -> tuple[float, float]:
        """Bytes too many on a GPU and on a host, zero where it fits."""
        return (
            max(0.0, self.gpu_bytes - machine.gpu_bytes),
            max(0.0, self.host_bytes - machine.host_bytes),
        )

    def fits(self, machine: Machine) -> bool:
        return not any(self.over(machine))


def recipes(preset: Preset, work: Work, machine: Machine, sequence: int | None = None) -> Iterator[Recipe]:
    """All that the options allow on this machine. sequence: only these ranks a sample."""
    for copies, ranks, again, adam, host_ema, offload, lora in itertools.product(
        sorted({1, machine.nodes}),
        (8, 4, 2, 1),
        (True, False),
        Adam,
        (False, True),
        (False, True),
        (False, True) if work.is_stable else (False,),
    ):
        group = machine.world // copies
        if preset.model.heads % ranks or group % ranks or (sequence or ranks) != ranks:
            continue
        if work.stage.batch * ranks % machine.world:
            continue  # ranks would have different numbers of samples
        if offload and (adam is Adam.EIGHT_BIT or not host_ema):
            continue  # the first fails (pytorch/ao issue 1931); the average of host weights is on the host
        yield Recipe(copies, ranks, again, adam, host_ema, offload, lora)


class Planner:
    """One stage on one machine."""

    def __init__(self, preset: Preset, work: Work, machine: Machine) -> None:
        self.preset, self.work, self.machine = preset, work, machine
        self.size = parameters(preset.model)
        self._flops: dict[tuple[bool, int], float] = {}

    def estimate(self, recipe: Recipe) -> Estimate:
        """Bytes by part, and time. Raises LayoutError when a sequence has fewer frames than ranks."""
        work, machine, ranks = self.work, self.machine, self.machine.world // recipe.replicate
        state = state_bytes(self.size, work, recipe)
        on_host = {OTHERS, COPIES} | ({"average"} if recipe.host_ema else set())
        on_host |= {"masters", "gradients", "moments", READ} if recipe.offload else set()
        gpu = {part: value / ranks for part, value in state.items() if part not in on_host}
        own = work.stage.batch * recipe.sequence // machine.world
        at_once = min(work.stage.micro, own)
        gpu["gathered"] = gathered_bytes(self.size)
        gpu["activations"] = float(at_once * sample_bytes(self.preset, work, recipe))
        gpu["caches"] = at_once * kv_bytes(self.preset.model, work.cache) / recipe.sequence
        gpu["rollouts"] = float(own * work.kept + at_once * work.played)
        # Between steps all that waited is back, and what a step alone needs is gone.
        back = 0.0 if recipe.offload else (state[OTHERS] + state[COPIES]) / ranks
        gone = sum(
            gpu.get(part, 0.0) for part in ("gradients", "gathered", "activations", "caches", "rollouts")
        )
        gpu["more, between steps"] = max(0.0, back - gone)
        node = machine.gpus / ranks
        host = {part: value * node for part, value in state.items() if part in on_host}
        host["checkpoint being saved"] = node * sum(state[part] for part in SAVED)
        host["processes"] = machine.gpus * PROCESS_BYTES
        step = self.step_seconds(recipe)
        days = step * work.stage.steps * work.rounds / DAY
        return Estimate(recipe, _some(gpu), _some(host), self._loading(recipe, node), step, days)

    def _loading(self, recipe: Recipe, node: float) -> float:
        """Host memory of a node when most is being loaded: every rank makes a network whole, in fp32, before
        it keeps its shard. Those of stage 5 come one by one; what came before is on the GPUs, or with offload
        on the host."""
        whole = self.machine.gpus * 4.0 * self.size.total * self.work.loaded
        stays = recipe.offload and self.work.is_stable
        held = node * loaded_bytes(self.size, self.work, recipe) if stays else 0.0
        return whole + held + self.machine.gpus * PROCESS_BYTES

    def step_seconds(self, recipe: Recipe) -> float:
        """Of one step of one expert, its whole batch."""
        key = recipe.checkpointing, recipe.sequence
        if key not in self._flops:
            self._flops[key] = sample_flops(self.preset, self.work, *key)
        total = self.work.stage.batch * self._flops[key]
        return total / (self.machine.world * self.machine.flops * self.machine.mfu)


def _some(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: value for part, value in parts.items() if value}


def sample_flops(preset: Preset, work: Work, checkpointing: bool, sequence: int) -> float:
    """FLOPs of one sample of a step. A pass that its ranks cannot share evenly takes as long as its longest
    stretch: an anchor is one frame, which one rank has while the others wait."""
    return math.fsum(
        run.flops(preset.model, checkpointing=checkpointing) * unevenness(run.run.layout, sequence)
        for run in work.runs
    )


def unevenness(layout: Layout, ranks: int) -> float:
    """Tokens of the longest stretch by those of an even one."""
    tokens = tuple(frame.grid.tokens for frame in layout.frames)
    longest = max(sum(tokens[a:b]) for a, b in itertools.pairwise(cut(tokens, ranks)))
    return longest * ranks / layout.tokens


READ = "read in bf16"
OTHERS = "other expert's masters and moments"
COPIES = "copies of the trained expert"
SAVED = ("masters", "moments", "average", OTHERS)
"""What a checkpoint has."""


def state_bytes(size: Parameters, work: Work, recipe: Recipe) -> dict[str, float]:
    """Bytes of all ranks that share one copy. Source: spec/worldplay2.md n.4.

    Stages 1 to 4 know one expert at a time, the other is in its checkpoint. In stage 5 (`turns`) one expert
    of student and fake score is trained a step, the other is read in bf16 and its masters and moments wait on
    the host, as do the copies that are read of the first when it is the other's turn; both experts of the
    real score are read.
    """
    trained, read, averaged = size.total, work.frozen * size.total, size.total
    parked = copies = 0
    if work.is_stable:
        others, copies = work.experts - 1, size.total * (1 if recipe.lora else 2)
        critic = LORA_RANK * size.adapters * work.experts if recipe.lora else size.total
        trained = size.total + critic
        read = size.total * work.experts + others * copies
        parked = others * copies
        averaged = size.total * work.experts
    return {
        "masters": 4.0 * trained,
        "gradients": 4.0 * trained,
        "moments": recipe.adam.bytes * trained,
        "average": 4.0 * averaged,
        READ: 2.0 * read,
        OTHERS: (4.0 + recipe.adam.bytes) * parked,
        COPIES: 2.0 * copies,
    }


def loaded_bytes(size: Parameters, work: Work, recipe: Recipe) -> float:
    """Of all ranks that share one copy, before there are gradients, moments and averages."""
    state = state_bytes(size, work, recipe)
    others = state[OTHERS] * 4.0 / (4.0 + recipe.adam.bytes)
    return state["masters"] + others + state[READ] + state[COPIES]


def gathered_bytes(size: Parameters) -> float:
    """Whole weights and gradients that sharding holds for a moment: bf16 weights of two blocks (one is
    fetched ahead), the bf16 gradient of one and fp32 copies of two that are being reduced; the root once."""
    return size.block * (2 * 2 + 2 + 2 * 4) + size.root * (2 + 2 + 4)


def sample_bytes(preset: Preset, work: Work, recipe: Recipe) -> int:
    """Peak of activations of one sample, over the passes of a step."""
    return max(
        activations(
            preset.model,
            run,
            checkpointing=recipe.checkpointing and trained,
            gradient=trained,
            sequence=recipe.sequence,
        ).peak
        for trained in (True, False)
        for run in work.longest(trained=trained)
    )


@dataclass(frozen=True)
class Verdict:
    """All recipes of a stage. fitting: the fastest first. others: the nearest to fitting first."""

    work: Work
    machine: Machine
    fitting: tuple[Estimate, ...]
    others: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate | None:
        return self.fitting[0] if self.fitting else None


def judge(preset: Preset, work: Work, machine: Machine, sequence: int | None = None) -> Verdict:
    """Every recipe on this machine. Raises ConfigError when none can even be tried."""
    planner, found = Planner(preset, work, machine), []
    hopeless: set[bool] = set()
    for recipe in recipes(preset, work, machine, sequence):
        if recipe.checkpointing in hopeless:
            continue  # fewer ranks a sequence need more memory still
        try:
            found.append(planner.estimate(recipe))
            if found[-1].gpu["activations"] > machine.gpu_bytes:
                hopeless.add(recipe.checkpointing)
        except LayoutError:  # fewer frames than ranks: training refuses it too
            continue
    if not found:
        raise ConfigError(
            f"stage {work.stage.name}: a batch of {work.stage.batch} cannot be shared by {machine.world} GPUs"
            f"{f' with sequence {sequence}' if sequence else ''}; use a multiple, or another --sequence"
        )
    fitting = [e for e in found if e.fits(machine)]
    others = [e for e in found if not e.fits(machine)]
    optim = work.stage.optim
    fitting.sort(key=lambda e: (float(f"{e.step_s:.4g}"), e.recipe.simplicity(optim)))
    others.sort(key=lambda e: (max(e.over(machine)), e.recipe.simplicity(optim)))
    return Verdict(work, machine, tuple(fitting), tuple(others))

"""The loop: one expert of one stage, from its newest checkpoint to its last step.

A step is a pure function of (state, step): the rate comes from the step, draws from the positions of samples,
data from the plan; a run that was killed goes on as if it had not been. What a step finds that is no number
ends the run, with a line that names it, and the newest checkpoint stays as it is.
Source: DESIGN rule 9; spec/faults.md S5, F1, F12.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.errors import UserError
from trainer.checkpoint import Checkpoints
from trainer.config import ModelConfig, Preset
from trainer.curriculum import Stage
from trainer.data.batch import Batch
from trainer.data.stream import Loader
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.parallelize import accumulate
from trainer.ema import Ema
from trainer.export import SCHEDULE, same_schedule
from trainer.flops import stage_flops
from trainer.metrics import MetricsLog, StepRecord, by_sigma, forget_peak, memory_gb, peak_flops
from trainer.model.layout import Layout, Rule
from trainer.model.wan import WanModel
from trainer.objectives.flow import Minimised, objective, sequence
from trainer.objectives.loss import Loss
from trainer.optim import OptimError, clip_gradients, learning_rate, make_optimizer, set_rate
from trainer.parameters import named_parameters
from trainer.schedule import schedule_of
from trainer.state import TrainState

_SHOWN = 4
"""Samples that an error names."""


class NotFiniteError(UserError):
    """A loss or a gradient that is no number; one line that names step, samples and noise levels."""


class Stopped(UserError):
    """Asked to stop: the step was finished and saved."""


@dataclass(frozen=True)
class Task:
    """One expert of one stage. seed: of the run. folder: of its metrics. save_every: steps from checkpoint to
    checkpoint, at most; look_every: from look to look, 0 for none but that at the end. host_ema: the average
    in host memory. minimise: what the stage minimises, where it needs more than the network in training.
    note: kept in every checkpoint. save_minutes: from checkpoint to checkpoint, at most, and the step that is
    then under way; 0 for steps alone."""

    stage: Stage
    preset: Preset
    expert: str
    seed: int
    parallel: Parallel
    folder: Path
    save_every: int = 500
    look_every: int = 0
    host_ema: bool = False
    minimise: Minimised | None = None
    note: Mapping[str, Any] = field(default_factory=dict)
    save_minutes: float = 15.0


class SaveClock:
    """Says that a checkpoint is due by time. A rank asks its own, ranks tell each other, and all save."""

    def __init__(self, minutes: float) -> None:
        self._seconds, self._last = 60.0 * minutes, time.monotonic()

    def due(self) -> bool:
        return self._seconds > 0.0 and time.monotonic() - self._last >= self._seconds

    def saved(self) -> None:
        self._last = time.monotonic()


@dataclass(frozen=True)
class Hooks:
    """What a caller is told. seen: every step, on the first rank. look: called on every rank with the number
    of steps done, while the network holds its average. stop: should this process end after the step.
    say: a line for the log, on the first rank."""

    seen: Callable[[StepRecord], None] = lambda record: None
    look: Callable[[int, WanModel], None] | None = None
    stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = print


def train_expert(
    task: Task, model: WanModel, mesh: Mesh, loader: Loader, checkpoints: Checkpoints, hooks: Hooks
) -> None:
    """Train to the stage's last step. model: sharded (`parallelize`), with the weights to start from.

    Every rank calls it. Raises NotFiniteError; Stopped where one rank was asked to stop; CheckpointError.
    """
    stage, named = task.stage, named_parameters(model)
    optimizer = make_optimizer(named.items(), stage.optim, offload=task.parallel.offload)
    ema = Ema(model, stage.optim.ema, stage.optim.ema_from, host=task.host_ema)
    state = TrainState(model, optimizer, ema)
    saved, first = checkpoints.newest(), 0
    if saved is not None:
        if SCHEDULE in task.note:
            same_schedule(saved, schedule_of(task.preset))
        resumed = state.load(saved)
        first = resumed.step
        for line in resumed.lines():
            hooks.say(f"stage {stage.name}, expert {task.expert}: {line}")
    if task.parallel.compile:
        hooks.say(f"stage {stage.name}, expert {task.expert}: {_compiled()}")
    task = replace(task, seed=stage.seed(task.seed))
    forget_peak(mesh.device)
    clock = SaveClock(task.save_minutes)
    with ExitStack() as held:
        log = held.enter_context(MetricsLog(task.folder, first)) if mesh.rank == 0 else None
        batches = loader.steps(first)
        held.callback(_close, batches)
        for step in range(first, stage.steps):
            began, waited = time.perf_counter(), loader.waited_s
            micros = next(batches)
            data_s = loader.waited_s - waited
            others_s = _met(mesh, f"step {step}")
            ran = _forward_backward(task, model, mesh, step, micros)
            others_s += _met(mesh, f"the end of step {step}")
            heard = _gather(mesh, ran, hooks.stop(), clock.due(), data_s, others_s)
            norm = _update(task, model, mesh, optimizer, ran, heard, step)
            ema.update(model, step)
            if log is not None:
                record = _record(task, mesh, heard, norm, step, time.perf_counter() - began)
                log.write(record)
                hooks.seen(record)
            done = step + 1
            if done % task.save_every == 0 or done == stage.steps or heard.asked or heard.due:
                note = {**task.note, "stage": stage.name, "expert": task.expert, "state": state.note()}
                checkpoints.save(done, state.tensors(), note)
                clock.saved()
            if heard.asked:
                checkpoints.wait()
                raise Stopped(
                    f"stopped at step {done} of {stage.steps} of stage {stage.name}, expert {task.expert}; "
                    "the same command goes on from here"
                )
            if hooks.look is not None and task.look_every and done % task.look_every == 0:
                with ema.swapped(model):
                    hooks.look(done, model)
        checkpoints.wait()


def _compiled() -> str:
    return (
        "with parallel.compile a block is compiled anew where the stretches of frames and prompts of a "
        f"sequence change, {torch._dynamo.config.recompile_limit} times at most; past that it runs "
        "uncompiled, and torch's warning of `recompile_limit` is all that says so"
    )


def _close(batches: Iterator[list[Batch]]) -> None:
    """Ends the threads of the loader."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()


# --- a step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    """What this rank's micro-batches gave. prompts: of a sample."""

    samples: tuple[str, ...]
    sigma: Tensor
    value: Tensor
    history: int
    prompts: int


@dataclass(frozen=True)
class _Heard:
    """What all ranks told: whether one was asked to stop, or finds a checkpoint due; their levels and losses;
    by rank, seconds of waiting for data and for the others, and memory."""

    asked: bool
    due: bool
    sigma: Tensor
    value: Tensor
    history: int
    prompts: int
    data_s: Tensor
    others_s: Tensor
    memory_gb: Tensor


def _met(mesh: Mesh, where: str) -> float:
    """Seconds until every rank had come; a rank that does not is named."""
    began = time.perf_counter()
    mesh.meet(where)
    return time.perf_counter() - began


def _forward_backward(task: Task, model: WanModel, mesh: Mesh, step: int, micros: list[Batch]) -> _Ran:
    """Gradients of the mean over the step's samples; micro-batches are of one size."""
    minimise = task.minimise or objective(task.stage)
    mesh.agree(f"chunks of history at step {step}", micros[0].history)
    losses: list[Loss] = []
    for place, batch in enumerate(micros):
        accumulate(model, task.parallel, last=place == len(micros) - 1)
        loss = minimise(model, task.preset, batch.to(mesh.device), task.expert, task.seed, step)
        torch.autograd.backward(loss.total / len(micros))
        losses.append(loss)
    return _Ran(
        tuple(name for batch in micros for name in batch.samples),
        torch.cat([loss.sigma for loss in losses]).double(),
        torch.cat([loss.value for loss in losses]).double(),
        losses[0].history,
        micros[0].text.shape[1],
    )


def _gather(mesh: Mesh, ran: _Ran, asked: bool, due: bool, data_s: float, others_s: float) -> _Heard:
    """One small exchange a step."""
    told = [float(asked), float(due), data_s, others_s, memory_gb(mesh.device)]
    numbers = torch.tensor(told, dtype=torch.float64)
    own = torch.cat([numbers.to(mesh.device), ran.sigma.flatten(), ran.value.flatten()])
    heard = mesh.gather(own).cpu()
    levels, count = heard[:, len(told) :], ran.sigma.numel()
    return _Heard(
        bool(heard[:, 0].any()),
        bool(heard[:, 1].any()),
        levels[:, :count].flatten(),
        levels[:, count:].flatten(),
        ran.history,
        ran.prompts,
        *heard[:, 2 : len(told)].unbind(1),
    )


def _update(
    task: Task,
    model: WanModel,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    ran: _Ran,
    heard: _Heard,
    step: int,
) -> float:
    """Clip, and one step of the optimizer; returns the global norm before. Gradients are gone after it."""
    if not bool(heard.value.isfinite().all()):
        raise NotFiniteError(_named(task, mesh, ran, step, "the loss is not finite", only_bad=True))
    try:
        norm = clip_gradients(model, task.stage.optim.clip)
    except OptimError as error:
        raise NotFiniteError(_named(task, mesh, ran, step, str(error), only_bad=False)) from None
    set_rate(optimizer, learning_rate(task.stage.optim, step, task.stage.steps))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _named(task: Task, mesh: Mesh, ran: _Ran, step: int, what: str, *, only_bad: bool) -> str:
    """Step, samples and noise levels of all ranks, in one line."""
    own = [
        f"{name} (sigma {', '.join(f'{s:.4f}' for s in sigma.tolist())})"
        for name, sigma, value in zip(ran.samples, ran.sigma, ran.value)
        if not (only_bad and bool(value.isfinite().all()))
    ]
    return (
        f"stage {task.stage.name}, expert {task.expert}, step {step}: {what}; samples "
        f"{of_all_ranks(mesh, own)}. {way_past(task.stage.name, task.expert, step)}"
    )


def of_all_ranks(mesh: Mesh, own: list[str]) -> str:
    """Samples of all ranks for an error, each once, the first few. Every rank calls it."""
    parts: list[list[str]] = [[] for _ in range(mesh.world)]
    dist.all_gather_object(parts, own)
    names = list(dict.fromkeys(name for part in parts for name in part))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'; '.join(names[:_SHOWN])}{more}"


def way_past(stage: str, expert: str, step: int) -> str:
    """What to do about a step that gave no number, which the same command would meet again."""
    return (
        f"The newest checkpoint is untouched: give --redraw {stage}/{expert}/{step} for other samples at "
        "that step, or a lower rate or float32 with --accept-changes (--step N goes further back)"
    )


# --- what is told of it -----------------------------------------------------------------------------------


def _record(task: Task, mesh: Mesh, heard: _Heard, norm: float, step: int, seconds: float) -> StepRecord:
    stage = task.stage
    layout, rule = sequence(stage, task.preset, heard.history, task.seed, step)
    peak = peak_flops(mesh.device)
    mfu = None
    if peak is not None:
        heads = schedule_of(task.preset).heads(task.expert)
        flops = _flops(task.preset.model, stage, layout, rule, heard.prompts, heads)
        mfu = stage.batch * flops / (seconds * peak * mesh.world)
    return StepRecord(
        stage=stage.name,
        expert=task.expert,
        step=step,
        loss=math.fsum(heard.value.tolist()) / heard.value.numel(),
        history=heard.history,
        by_sigma=by_sigma(heard.sigma, heard.value),
        grad_norm=norm,
        lr=learning_rate(stage.optim, step, stage.steps),
        samples_per_s=stage.batch / seconds,
        tokens_per_s=stage.batch * layout.tokens / seconds,
        mfu=mfu,
        memory_gb=float(heard.memory_gb.max()),
        data_wait_s=float(heard.data_s.max()),
        step_s=seconds,
        others_s_most=float(heard.others_s.max()),
        others_s_least=float(heard.others_s.min()),
        slow_rank=int(heard.others_s.argmin()),
    )


@functools.lru_cache(maxsize=64)
def _flops(config: ModelConfig, stage: Stage, layout: Layout, rule: Rule, prompts: int, heads: int) -> float:
    """Of a sample, without what checkpointing computes twice."""
    return stage_flops(config, stage, layout, rule, prompts=prompts, heads=heads)

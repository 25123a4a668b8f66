"""Stable Forcing, step by step: roll out, score, replay, teach the fake score, and watch.

One step of one cached rollout: the student is updated once (unless it must wait), the fake score several
times. Everything that is drawn is keyed by (seed, step, ...), so a step is a pure function of (state, step).
Source: spec/worldplay2.md g.2; DESIGN rule 9; spec/faults.md M1, M3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UserError
from trainer.checkpoint import Checkpoints, Saved
from trainer.checkpoint_files import Entry
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.batch import Batch
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.parallelize import accumulate
from trainer.ema import Ema
from trainer.export import SCHEDULE
from trainer.loop import Stopped
from trainer.metrics import MetricsLog, memory_gb
from trainer.model.wan import WanModel
from trainer.noise import keyed
from trainer.objectives.passes import Network
from trainer.optim import Parked, clip_gradients, learning_rate, make_optimizer, park, set_rate
from trainer.parameters import local, named_parameters
from trainer.rollout import Scene
from trainer.schedule import PddSchedule, Sigma
from trainer.stable.played import Played, Snapshot, play
from trainer.stable.scores import Scored, clip_batch, clips_of, critic_loss, draw_level
from trainer.stable.step import recorded, replay_all, score
from trainer.stable.watch import Pictures, Reading, Rule, Watch, WatchConfig
from trainer.state import TrainState

FAKE, WATCH = "fake/", "watch"
PROBES = (Sigma(0.95), Sigma(0.5))
"""Noise levels at which the fake score is watched: one of each expert, in the middle of what it is asked."""


class WatchError(UserError):
    """A watchdog ended the run; one line with its name and figures."""


@dataclass(frozen=True)
class StableTask:
    """What a run of stage 5 is. folder: of its metrics. teacher: pictures of the teacher's samples. critics:
    parameters that are trained of each fake score: the network itself, or its low-rank additions."""

    stage: Stage
    preset: Preset
    seed: int
    parallel: Parallel
    schedule: PddSchedule
    codec: Codec
    folder: Path
    teacher: Pictures
    watch: WatchConfig = field(default_factory=WatchConfig)
    save_every: int = 20
    host_ema: bool = False


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
    real: as in `Reading`. motion, saturation, sharpness: by chunk. seconds: of each part."""

    stage: str
    step: int
    chunks: int
    left_out: int
    waited: bool
    sizes: dict[str, float]
    critic: float
    before: float
    after: float
    real: float
    grad_norm: dict[str, float]
    lr: float
    motion: tuple[float, ...]
    saturation: tuple[float, ...]
    sharpness: tuple[float, ...]
    memory_gb: float
    seconds: dict[str, float]

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def line(self) -> str:
        """For a terminal."""
        norms = ", ".join(f"{name} {norm:.3g}" for name, norm in self.grad_norm.items())
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return (
            f"fake score {self.before:.4f} to {self.after:.4f} (real {self.real:.4f}), "
            f"{'student waits' if self.waited else f'gradient {norms}'}, {self.memory_gb:.1f} GB, s: {spent}"
        )

    def scalars(self) -> Sequence[tuple[str, float]]:
        """For TensorBoard."""
        plain = ("left_out", "critic", "before", "after", "real", "lr", "memory_gb")
        found = [(name, float(getattr(self, name))) for name in plain]
        for name in ("sizes", "grad_norm", "seconds"):
            found += [(f"{name}/{key}", value) for key, value in getattr(self, name).items()]
        late = Pictures(self.motion, self.saturation, self.sharpness).late()
        return [*found, *zip(("late_motion", "late_saturation", "late_sharpness"), late)]


@dataclass(frozen=True)
class StableHooks:
    """What a caller is told: `trainer.loop.Hooks` without looks."""

    seen: Callable[[StableRecord], None] = lambda record: None
    stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = print


def train_stable(
    task: StableTask,
    roles: Roles,
    mesh: Mesh,
    scenes: Callable[[int], Sequence[Scene]],
    checkpoints: Mapping[str, Checkpoints],
    hooks: StableHooks,
) -> None:
    """Train to the stage's last step. scenes: what this data rank rolls out at a step, one
    scene after another.

    Every rank calls it. Raises WatchError where a watchdog ends the run, after saving; Stopped when asked;
    OptimError on a gradient that is no number, CheckpointError.
    """
    run = _Run(task, roles, mesh, hooks)
    first = run.resume(checkpoints)
    log = MetricsLog(task.folder, first) if mesh.rank == 0 else None
    try:
        for step in range(first, task.stage.steps):
            record, stopped = run.step(step, scenes(step))
            if log is not None:
                log.write(record)
                hooks.seen(record)
            asked = bool(mesh.gather(torch.tensor([float(hooks.stop())], device=mesh.device)).any())
            done = step + 1
            if done % task.save_every == 0 or done == task.stage.steps or asked or stopped:
                run.save(done, checkpoints)
            if stopped or asked:
                for kept in checkpoints.values():
                    kept.wait()
                if stopped:
                    raise WatchError(
                        f"stage {task.stage.name}, step {step}: "
                        + "; ".join(f"{rule}: {why}" for rule, why in stopped.items())
                        + f". Saved; look at {task.folder / 'metrics.jsonl'} and docs/curriculum.md"
                    )
                raise Stopped(
                    f"stopped at step {done} of {task.stage.steps} of stage {task.stage.name}; "
                    "the same command goes on from here"
                )
        for kept in checkpoints.values():
            kept.wait()
    finally:
        if log is not None:
            log.__exit__(None, None, None)


@dataclass(frozen=True)
class _View:
    """The entries of a checkpoint that begin with a prefix, without it."""

    saved: Saved
    prefix: str

    @property
    def path(self) -> Path:
        return self.saved.path

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def note(self) -> Mapping[str, Any]:
        return {**self.saved.note, "state": self.saved.note[self.prefix]}

    @property
    def entries(self) -> dict[str, Entry]:
        found = self.saved.entries.items()
        return {k.removeprefix(self.prefix): v for k, v in found if k.startswith(self.prefix)}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        self.saved.read({self.prefix + name: value for name, value in tensors.items()})


class _Clock:
    """Seconds of the parts of a step, each from the last part's end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def add(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class _Run:
    def __init__(self, task: StableTask, roles: Roles, mesh: Mesh, hooks: StableHooks) -> None:
        self.task, self.roles, self.mesh, self.hooks = task, roles, mesh, hooks
        self.config = task.stage.stable
        self.watch = Watch(task.watch, task.teacher)
        self.student: dict[str, TrainState] = {}
        self.fake: dict[str, TrainState] = {}
        for name, model in roles.student.items():
            optim, offload = task.stage.optim, task.parallel.offload
            optimizer = make_optimizer(named_parameters(model).items(), optim, offload=offload)
            ema = Ema(model, optim.ema, optim.ema_from, host=task.host_ema)
            self.student[name] = TrainState(model, optimizer, ema)
            trained = roles.fake[name] if roles.additions is None else roles.additions[name]
            optimizer = make_optimizer(named_parameters(trained).items(), optim, offload=offload)
            set_rate(optimizer, self.config.critic_lr)
            self.fake[name] = TrainState(trained, optimizer, Ema(nn.Module(), 0.0))
        self.waits = False
        self.student_read: Mapping[str, WanModel] = roles.student
        self.fake_read: Mapping[str, WanModel] = roles.fake

    # --- state --------------------------------------------------------------------------------------------

    def resume(self, checkpoints: Mapping[str, Checkpoints]) -> int:
        """Load the newest step that all experts have. Returns the step to go on with."""
        newest = {name: kept.newest() for name, kept in checkpoints.items()}
        if any(saved is None for saved in newest.values()):
            for name in (n for n, saved in newest.items() if saved is not None):
                checkpoints[name].rewind(0)  # a kill between the first saves of two experts
            return 0
        step = min(saved.step for saved in newest.values() if saved is not None)
        for name, saved in newest.items():
            assert saved is not None
            if saved.step != step:
                saved = checkpoints[name].at(step)
                checkpoints[name].rewind(step)
            self.student[name].load(saved)
            self.fake[name].load(_View(saved, FAKE))  # type: ignore[arg-type]
            state = torch.zeros_like(self.watch.state())
            saved.read({WATCH: state})
            self.watch.load(state)
            self.waits = bool(saved.note["waits"])
        self.hooks.say(f"stage {self.task.stage.name}: goes on from step {step}")
        return step

    def save(self, done: int, checkpoints: Mapping[str, Checkpoints]) -> None:
        for name, kept in checkpoints.items():
            student, fake = self.student[name], self.fake[name]
            tensors = student.tensors() | {FAKE + k: v for k, v in fake.tensors().items()}
            note = {
                "stage": self.task.stage.name,
                "expert": name,
                "state": student.note(),
                FAKE: fake.note(),
                SCHEDULE: asdict(self.task.schedule),
                "waits": self.waits,
            }
            kept.save(done, tensors | {WATCH: self.watch.state()}, note)

    def active(self, step: int) -> tuple[str, ...]:
        """The experts that a step trains."""
        names = tuple(self.student)
        return (names[step % len(names)],) if self.config.turns else names

    @contextmanager
    def waiting(self, active: tuple[str, ...]) -> Iterator[None]:
        """Inside, experts whose turn it is not wait on the host with their moments, and copies are read in
        their place. Source: spec/worldplay2.md n.4."""
        if self.roles.readers is None:
            yield
            return
        parked: list[Parked] = []
        readers, models = self.roles.readers, (dict(self.roles.student), dict(self.roles.fake))
        for states, copies, read in (
            (self.student, readers.student, models[0]),
            (self.fake, readers.fake, models[1]),
        ):
            for name, state in states.items():
                if name in active:
                    parked += [park(copies[name])] if name in copies else []
                    continue
                if name in copies:
                    _copy(state.model, copies[name])
                    read[name] = copies[name]
                parked.append(park(state.model, state.optimizer))
        self.student_read, self.fake_read = models
        try:
            yield
        finally:
            self.student_read, self.fake_read = self.roles.student, self.roles.fake
            for held in parked:
                held.unpark()

    # --- a step -------------------------------------------------------------------------------------------

    def step(self, step: int, scenes: Sequence[Scene]) -> tuple[StableRecord, Mapping[Rule, str]]:
        with self.waiting(self.active(step)):
            return self._step(step, scenes)

    def _step(self, step: int, scenes: Sequence[Scene]) -> tuple[StableRecord, Mapping[Rule, str]]:
        """One rollout at a time is played, scored and replayed; then the fake score sees all of them, and the
        student moves, unless it must wait. So nothing depends on how ranks and passes cut the step."""
        task, roles, seed = self.task, self.roles, self.task.seed
        self.mesh.meet(f"step {step}")
        waited, spent, looked = self.waits, _Clock(), list[Pictures]()
        scored: list[Scored] = []
        seen: list[Played] = []
        for place, scene in enumerate(scenes):
            played = play(
                task.preset, self.student_read, task.codec, scene, task.schedule, seed, step, looked.append
            )
            spent.add("rollout")
            found = score(task.preset, roles.real, self.fake_read, played, self.config, seed, step)
            scored += found
            spent.add("score")
            if not waited:
                self._replay(step, played, found, len(scenes), last=place == len(scenes) - 1)
            seen.append(replace(played, caches={}))  # what is left is small
            spent.add("replay")
        before, real = self._probe(self.fake_read, seen, step), self._probe(roles.real, seen, step)
        critic = self._critic(step, seen)
        after = self._probe(self.fake_read, seen, step)
        spent.add("critic")
        norms = {} if waited else self._move(step)
        spent.add("replay")
        pictures = self._mean_pictures(looked)
        clips, left_out = self._counts(scored)
        verdict = self.watch.read(Reading(before, after, real, clips, left_out, pictures))
        self.waits = bool(verdict.paused)
        record = StableRecord(
            task.stage.name,
            step,
            seen[0].chunks,
            left_out,
            waited,
            self._by_level(scored),
            critic,
            before,
            after,
            real,
            norms,
            learning_rate(task.stage.optim, step, task.stage.steps),
            pictures.motion,
            pictures.saturation,
            pictures.sharpness,
            memory_gb(self.mesh.device),
            dict(spent.seconds),
        )
        return record, verdict.stopped

    def _replay(
        self, step: int, played: Played, scored: tuple[Scored, ...], rollouts: int, *, last: bool
    ) -> None:
        """Gradients of each student whose turn it is; of the step's last replay on, ranks share them."""
        task, newest = self.task, self.config.replayed
        shown = recorded(played, newest * self.config.clip // task.preset.chunk)
        left = {n: sum(s.block.expert == n for s in shown) for n in self.active(step)}

        def backward(loss: Tensor, snapshot: Snapshot) -> None:
            name = snapshot.block.expert
            left[name] -= 1
            # The recorded steps are the same in all rollouts of a step.
            accumulate(self.roles.student[name], task.parallel, last=last and left[name] == 0)
            (loss / rollouts).backward()  # type: ignore[no-untyped-call]

        replay_all(task.preset, {n: self.roles.student[n] for n in left}, played, scored, backward, newest)

    def _move(self, step: int) -> dict[str, float]:
        """One step of each student that has gradients. Returns their norms."""
        optim, norms = self.task.stage.optim, {}
        for name in self.active(step):
            state = self.student[name]
            if all(p.grad is None for p in state.model.parameters()):
                continue  # no chunk recorded a step of this expert: on every rank
            norms[name] = clip_gradients(state.model, optim.clip)
            set_rate(state.optimizer, learning_rate(optim, step, self.task.stage.steps))
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.ema.update(state.model, step)
        return norms

    def _critic(self, step: int, rollouts: Sequence[Played]) -> float:
        """Several updates of the fake score, each on one clip of every rollout. Returns their mean loss."""
        config, preset, seed, losses = self.config, self.task.preset, self.task.seed, []
        active = self.active(step)
        only = active[0] if len(active) == 1 else None
        for k in range(config.critic_steps):
            draw = torch.randint(
                clips_of(rollouts[0], preset, config.clip), (), generator=keyed(seed, step, k, "critic-clip")
            )
            sigma = draw_level(preset, config, only, seed, step, k, "critic-level")
            state, model = self.fake[preset.expert(sigma)], self.roles.fake[preset.expert(sigma)]
            total = torch.zeros((), device=self.mesh.device)
            for place, played in enumerate(rollouts):
                accumulate(model, self.task.parallel, last=place == len(rollouts) - 1)
                batch = clip_batch(played, preset, int(draw), config.clip)
                loss = critic_loss(model, preset, batch, sigma, seed, step, k, "critic").mean()
                (loss / len(rollouts)).backward()  # type: ignore[no-untyped-call]
                total += loss.detach() / len(rollouts)
            clip_gradients(state.model, self.task.stage.optim.clip)
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            losses.append(float(self.mesh.mean(total)))
        return math.fsum(losses) / max(1, len(losses))

    @torch.no_grad()
    def _probe(self, models: Mapping[str, Network], rollouts: Sequence[Played], step: int) -> float:
        """Loss of a score on the last clip of every rollout, at fixed levels and the noise of the step."""
        preset, total = self.task.preset, torch.zeros((), device=self.mesh.device)
        for played in rollouts:
            clips = clips_of(played, preset, self.config.clip)
            batch: Batch = clip_batch(played, preset, clips - 1, self.config.clip)
            for sigma in PROBES:
                model = models[preset.expert(sigma)]
                total += critic_loss(model, preset, batch, sigma, self.task.seed, step, "probe").mean()
        return float(self.mesh.mean(total / len(PROBES) / len(rollouts)))

    def _by_level(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Mean |g| by noise level, in quarters of [0, 1], over all ranks, which share levels."""
        sizes = self.mesh.mean(torch.stack([one.size.mean() for one in scored])).tolist()
        found: dict[str, list[float]] = {}
        for one, size in zip(scored, sizes):
            low = min(3, int(4 * one.sigma)) / 4
            found.setdefault(f"{low:g}-{low + 0.25:g}", []).append(size)
        return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())}

    def _mean_pictures(self, pictures: list[Pictures]) -> Pictures:
        """Over the rollouts of a step on all ranks, so that all judge alike."""
        values = torch.tensor([[p.motion, p.saturation, p.sharpness] for p in pictures]).mean(0)
        mean = self.mesh.mean(values.to(self.mesh.device)).tolist()
        return Pictures(*(tuple(row) for row in mean))

    def _counts(self, scored: list[Scored]) -> tuple[int, int]:
        """(clips, those without weight) over all ranks."""
        counts = torch.stack([s.counts for s in scored])
        numbers = torch.tensor([counts.numel(), int((~counts).sum())], dtype=torch.float64)
        clips, left = self.mesh.gather(numbers.to(self.mesh.device)).sum(0).tolist()
        return int(clips), int(left)


@torch.no_grad()
def _copy(trained: nn.Module, reader: nn.Module) -> None:
    """This rank's pieces of the masters, in the precision of what is only read."""
    wanted = named_parameters(reader)
    for name, parameter in named_parameters(trained).items():
        local(wanted[name]).copy_(local(parameter))

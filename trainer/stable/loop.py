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
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from schemas.errors import UserError
from trainer.checkpoint import Checkpoints, Saved, folder_name, list_steps, read_saved
from trainer.checkpoint_files import CheckpointError, Entry
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.batch import Batch
from trainer.distributed.mesh import Mesh, Parallel
from trainer.distributed.parallelize import accumulate
from trainer.ema import Ema
from trainer.export import SCHEDULE, same_schedule
from trainer.loop import NotFiniteError, SaveClock, Stopped
from trainer.metrics import MetricsLog, forget_peak, memory_gb
from trainer.model.wan import WanModel
from trainer.noise import keyed
from trainer.objectives.passes import Network
from trainer.optim import OptimError, Parked, clip_gradients, learning_rate, make_optimizer, park, set_rate
from trainer.parameters import local, named_parameters
from trainer.rollout import Scene
from trainer.schedule import PddSchedule, Sigma
from trainer.stable.played import Played, Snapshot, play
from trainer.stable.scores import Scored, clip_batch, clips_of, critic_loss, draw_level
from trainer.stable.step import recorded, replay_all, score
from trainer.stable.watch import Critic, Late, Pictures, Reading, Rule, Watch, WatchConfig
from trainer.state import TrainState

FAKE, WATCH, STOPPED = "fake/", "watch", "stopped"
_SHOWN = 4  # samples that an error names
PROBES = (Sigma(0.95), Sigma(0.5))
"""Noise levels at which the fake score is watched: one of each expert, in the middle of what it is asked."""


class WatchError(UserError):
    """A watchdog ended the run; one line with its name and figures."""


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


def train_stable(
    task: StableTask,
    roles: Roles,
    mesh: Mesh,
    scenes: Callable[[int], Sequence[Scene]],
    checkpoints: Mapping[str, Checkpoints],
    hooks: StableHooks,
    from_step: int | None = None,
) -> None:
    """Train to the stage's last step. scenes: what this data rank rolls out at a step, one scene after
    another. checkpoints: by expert, each beside the others. from_step: go on from this one, not the newest.

    Every rank calls it. Raises WatchError where a watchdog ends the run, after saving; Stopped when asked;
    NotFiniteError on a gradient that is no number, CheckpointError.
    """
    run = _Run(task, roles, mesh, hooks)
    first = run.resume(checkpoints, from_step)
    forget_peak(mesh.device)
    clock = SaveClock(task.save_minutes)
    log = MetricsLog(task.folder, first) if mesh.rank == 0 else None
    try:
        for step in range(first, task.stage.steps):
            record, stopped = run.step(step, scenes(step))
            if log is not None:
                log.write(record)
                hooks.seen(record)
            told = torch.tensor([float(hooks.stop()), float(clock.due())], device=mesh.device)
            asked, due = mesh.gather(told).bool().any(0).tolist()
            done = step + 1
            if done % task.save_every == 0 or done == task.stage.steps or asked or stopped or due:
                run.save(done, checkpoints, _figures(stopped))
                clock.saved()
            if stopped or asked:
                _wait(checkpoints)
                if stopped:
                    raise WatchError(
                        f"stage {task.stage.name}, step {step}: {_figures(stopped)}. Saved; look at "
                        f"{task.folder / 'metrics.jsonl'} and docs/curriculum.md"
                    )
                raise Stopped(
                    f"stopped at step {done} of {task.stage.steps} of stage {task.stage.name}; "
                    "the same command goes on from here"
                )
        _wait(checkpoints)
    finally:
        if log is not None:
            log.__exit__(None, None, None)


def ended_by(stage: str, folders: Sequence[Path]) -> str | None:
    """Where a watchdog ended a run: a line of what it saw and what to do. None where none did. folders: the
    checkpoints of all experts."""
    common = sorted(set.intersection(*(set(list_steps(folder)[0]) for folder in folders)))
    saved = read_saved(folders[0] / folder_name(common[-1])) if common else None
    if saved is None or not saved.note.get(STOPPED):
        return None
    advice = f"give --step {common[-2]} to go on from there" if common[1:] else "begin anew in another folder"
    return (
        f"stage {stage} was ended behind step {saved.step - 1}: {saved.note[STOPPED]}. Change what "
        f"docs/curriculum.md says, and {advice}"
    )


def _figures(stopped: Mapping[Rule, str]) -> str:
    return "; ".join(f"{rule}: {why}" for rule, why in stopped.items())


def _wait(checkpoints: Mapping[str, Checkpoints]) -> None:
    for kept in checkpoints.values():
        kept.wait()


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
        self.watch = Watch(task.watch, task.teacher, tuple(roles.student))
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

    def resume(self, checkpoints: Mapping[str, Checkpoints], asked: int | None) -> int:
        """Load the newest step that all experts have, or the one that is asked for, and set later ones aside.
        Returns the step to go on with. Raises CheckpointError, and then no file was changed."""
        if asked is None:
            newest = {name: kept.newest() for name, kept in checkpoints.items()}
            there = {name: saved for name, saved in newest.items() if saved is not None}
            if len(there) < len(newest):  # a kill between the first saves of two experts
                for name in there:
                    checkpoints[name].rewind(0)
                return 0
            step = min(saved.step for saved in there.values())
            found = {n: s if s.step == step else checkpoints[n].at(step) for n, s in there.items()}
        else:
            step, found = asked, {name: kept.at(asked) for name, kept in checkpoints.items()}
        state = torch.zeros_like(self.watch.state())
        for saved in found.values():
            same_schedule(saved, self.task.schedule)
            if saved.entries[WATCH].shape != tuple(state.shape):
                raise CheckpointError(
                    f"{saved.path} has a watch of another `watch.window` than {self.task.watch.window}: give "
                    "the one that the run began with"
                )
        for name, saved in found.items():
            self.student[name].load(saved)
            self.fake[name].load(_View(saved, FAKE))  # type: ignore[arg-type]
            saved.read({WATCH: state})
            self.waits = bool(saved.note["waits"])
        self.watch.load(state)
        for kept in checkpoints.values():
            kept.rewind(step)
        self.hooks.say(f"stage {self.task.stage.name}: goes on from step {step}")
        return step

    def save(self, done: int, checkpoints: Mapping[str, Checkpoints], stopped: str) -> None:
        """stopped: what ended the run, empty where nothing did."""
        _wait(checkpoints)  # all have the last step before any begins the next
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
                STOPPED: stopped,
            }
            kept.save(done, tensors | {WATCH: self.watch.state()}, note)

    def active(self, step: int) -> tuple[str, ...]:
        """The experts that a step trains."""
        names = tuple(self.student)
        return (names[step % len(names)],) if self.config.turns else names

    @contextmanager
    def waiting(self, active: tuple[str, ...]) -> Iterator[None]:
        """Inside, experts whose turn it is not wait on the host with their moments, and copies are read in
        their place. What has no copy, additions, is small and stays. Source: spec/worldplay2.md n.4."""
        if self.roles.readers is None:
            yield
            return
        parked: list[Parked] = []
        readers, models = self.roles.readers, (dict(self.roles.student), dict(self.roles.fake))
        for states, copies, read in (
            (self.student, readers.student, models[0]),
            (self.fake, readers.fake, models[1]),
        ):
            for name, copy in copies.items():
                state = states[name]
                if name in active:
                    parked.append(park(copy))
                    continue
                _copy(state.model, copy)
                read[name] = copy
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
        task, roles = self.task, self.roles
        self.mesh.meet(f"step {step}")
        waited, spent, looked = self.waits, _Clock(), list[Pictures]()
        scored: list[Scored] = []
        seen: list[Played] = []
        for place, scene in enumerate(scenes):
            last = place == len(scenes) - 1
            video, found = self._rollout(step, scene, len(scenes), looked.append, spent, last=last)
            seen.append(video)
            scored += found
        before, real = self._probe(self.fake_read, seen, step), self._probe(roles.real, seen, step)
        critic, updates = self._critic(step, seen)
        after = self._probe(self.fake_read, seen, step)
        spent.add("critic")
        norms = {} if waited else self._move(step, seen, scored)
        spent.add("replay")
        pictures = self._mean_pictures(looked)
        clips, left_out = self._counts(scored)
        critics = {n: Critic(before[n], after[n], real[n], updates[n]) for n in before}
        verdict = self.watch.read(Reading(critics, clips, left_out, pictures.late()))
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
            updates,
            norms,
            learning_rate(task.stage.optim, step, task.stage.steps),
            pictures.motion,
            pictures.saturation,
            pictures.sharpness,
            pictures.drift,
            memory_gb(self.mesh.device),
            dict(spent.seconds),
        )
        return record, verdict.stopped

    def _rollout(
        self,
        step: int,
        scene: Scene,
        rollouts: int,
        looked: Callable[[Pictures], None],
        spent: _Clock,
        *,
        last: bool,
    ) -> tuple[Played, list[Scored]]:
        """One rollout, played, scored and replayed. Its caches, of which only one may be alive, end here, and
        so do the gradients of its clips: returned is what is small."""
        task, seed = self.task, self.task.seed
        played = play(
            task.preset,
            self.student_read,
            task.codec,
            scene,
            task.schedule,
            seed,
            step,
            looked,
            self.mesh.device,
        )
        spent.add("rollout")
        scored = score(task.preset, self.roles.real, self.fake_read, played, self.config, seed, step)
        spent.add("score")
        if not self.waits:
            self._replay(step, played, scored, rollouts, last=last)
        spent.add("replay")
        return played.video(), [replace(one, gradient=one.gradient.new_empty(0)) for one in scored]

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

    def _move(self, step: int, seen: Sequence[Played], scored: Sequence[Scored]) -> dict[str, float]:
        """One step of each student that has gradients. Returns their norms."""
        optim, norms = self.task.stage.optim, {}
        for name in self.active(step):
            state = self.student[name]
            if all(p.grad is None for p in state.model.parameters()):
                continue  # no chunk recorded a step of this expert: on every rank
            levels = [one.sigma for one in scored]
            norms[name] = self._clipped(state.model, f"student {name}", step, seen, levels)
            set_rate(state.optimizer, learning_rate(optim, step, self.task.stage.steps))
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.ema.update(state.model, step)
        return norms

    def _critic(self, step: int, rollouts: Sequence[Played]) -> tuple[float, dict[str, int]]:
        """Several updates of the fake score, each on one clip of every rollout. Returns their mean loss, and
        how many each expert had."""
        config, preset, seed, losses = self.config, self.task.preset, self.task.seed, []
        updates = dict.fromkeys(self.fake, 0)
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
            self._clipped(state.model, f"fake score {preset.expert(sigma)}", step, rollouts, [sigma])
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            losses.append(float(self.mesh.mean(total)))
            updates[preset.expert(sigma)] += 1
        return math.fsum(losses) / max(1, len(losses)), updates

    def _clipped(
        self, model: nn.Module, what: str, step: int, seen: Sequence[Played], levels: Sequence[Sigma]
    ) -> float:
        """The norm of all gradients before clipping. Raises NotFiniteError, on every rank, with step,
        samples and noise levels."""
        try:
            return clip_gradients(model, self.task.stage.optim.clip)
        except OptimError as error:
            parts: list[list[str]] = [[] for _ in range(self.mesh.world)]
            dist.all_gather_object(parts, [_title(video.scene) for video in seen])
            names = list(dict.fromkeys(name for part in parts for name in part))
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise NotFiniteError(
                f"stage {self.task.stage.name}, {what}, step {step}: {error}; samples "
                f"{'; '.join(names[:_SHOWN])}{more}, scored at sigma "
                f"{', '.join(f'{level:.4f}' for level in sorted(set(levels)))}. The newest checkpoint is "
                f"untouched: give --redraw {self.task.stage.name}/all/{step} for other samples, or a "
                "lower rate or float32 with --accept-changes (--step N goes further back)"
            ) from None

    @torch.no_grad()
    def _probe(
        self, models: Mapping[str, Network], rollouts: Sequence[Played], step: int
    ) -> dict[str, float]:
        """Loss of every expert of a score on the last clip of each rollout, at its levels of `PROBES` and the
        noise of the step."""
        preset = self.task.preset
        total = {name: torch.zeros((), device=self.mesh.device) for name in models}
        levels = [preset.expert(sigma) for sigma in PROBES]
        for played in rollouts:
            clips = clips_of(played, preset, self.config.clip)
            batch: Batch = clip_batch(played, preset, clips - 1, self.config.clip)
            for sigma in PROBES:
                name = preset.expert(sigma)
                loss = critic_loss(models[name], preset, batch, sigma, self.task.seed, step, "probe").mean()
                total[name] += loss / levels.count(name) / len(rollouts)
        return {name: float(self.mesh.mean(value)) for name, value in total.items()}

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
        values = torch.tensor([astuple(p) for p in pictures]).mean(0)
        mean = self.mesh.mean(values.to(self.mesh.device)).tolist()
        return Pictures(*(tuple(row) for row in mean))

    def _counts(self, scored: list[Scored]) -> tuple[int, int]:
        """(clips, those without weight) over all ranks."""
        counts = torch.stack([s.counts for s in scored])
        numbers = torch.tensor([counts.numel(), int((~counts).sum())], dtype=torch.float64)
        clips, left = self.mesh.gather(numbers.to(self.mesh.device)).sum(0).tolist()
        return int(clips), int(left)


def _title(scene: Scene) -> str:
    return scene.name or f"at position {', '.join(map(str, scene.positions))}"


@torch.no_grad()
def _copy(trained: nn.Module, reader: nn.Module) -> None:
    """This rank's pieces of the masters, in the precision of what is only read."""
    wanted = named_parameters(reader)
    for name, parameter in named_parameters(trained).items():
        local(wanted[name]).copy_(local(parameter))

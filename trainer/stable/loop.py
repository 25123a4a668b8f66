"""Stable Forcing, step by step: roll out, score, replay, teach the fake score, and watch.

One step of one cached rollout: the student is updated once (unless it must wait), the fake score several
times. Everything that is drawn is keyed by (seed, step, ...), so a step is a pure function of (state, step).
Source: spec/worldplay2.md g.2; DESIGN rule 9; spec/faults.md M1, M3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace

import torch
from torch import Tensor, nn

from schemas.errors import UserError
from trainer.checkpoint import Checkpoints
from trainer.data.batch import Batch
from trainer.distributed.mesh import Mesh
from trainer.distributed.parallelize import accumulate
from trainer.loop import NotFiniteError, SaveClock, Stopped, of_all_ranks, way_past
from trainer.metrics import MetricsLog, forget_peak, memory_gb
from trainer.noise import keyed
from trainer.objectives.passes import Network
from trainer.optim import OptimError, clip_gradients, learning_rate, set_rate
from trainer.rollout import Scene
from trainer.schedule import Sigma
from trainer.stable.played import Played, Snapshot, play
from trainer.stable.scores import Scored, clip_batch, clips_of, critic_loss, draw_level
from trainer.stable.state import StableState, wait
from trainer.stable.step import recorded, replay_all, score
from trainer.stable.task import Roles, StableHooks, StableRecord, StableTask
from trainer.stable.watch import Critic, Pictures, Reading, Rule

PROBES = (Sigma(0.95), Sigma(0.5))
"""Noise levels at which the fake score is watched: one of each expert, in the middle of what it is asked."""


class WatchError(UserError):
    """A watchdog ended the run; one line with its name and figures."""


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
    state = StableState(task, roles)
    steps, first = _Steps(state, mesh), state.resume(checkpoints, from_step)
    if first:
        what = f", where a watchdog ended the run: {state.ended}" if state.ended else ""
        hooks.say(f"stage {task.stage.name}: goes on from step {first}{what}")
    forget_peak(mesh.device)
    clock = SaveClock(task.save_minutes)
    log = MetricsLog(task.folder, first) if mesh.rank == 0 else None
    try:
        for step in range(first, task.stage.steps):
            record, stopped = steps.step(step, scenes(step))
            if log is not None:
                log.write(record)
                hooks.seen(record)
            told = torch.tensor([float(hooks.stop()), float(clock.due())], device=mesh.device)
            asked, due = mesh.gather(told).bool().any(0).tolist()
            done = step + 1
            if done % task.save_every == 0 or done == task.stage.steps or asked or stopped or due:
                state.save(done, checkpoints, _figures(stopped))
                clock.saved()
            if stopped or asked:
                wait(checkpoints)
                if stopped:
                    raise WatchError(
                        f"stage {task.stage.name}, step {step}: {_figures(stopped)}. Saved; look at "
                        f"{task.folder / 'metrics.jsonl'} and docs/curriculum.md"
                    )
                raise Stopped(
                    f"stopped at step {done} of {task.stage.steps} of stage {task.stage.name}; "
                    "the same command goes on from here"
                )
        wait(checkpoints)
    finally:
        if log is not None:
            log.__exit__(None, None, None)


def _figures(stopped: Mapping[Rule, str]) -> str:
    return "; ".join(f"{rule}: {why}" for rule, why in stopped.items())


class _Clock:
    """Seconds of the parts of a step, each from the last part's end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def add(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class _Steps:
    """The steps of a run."""

    def __init__(self, state: StableState, mesh: Mesh) -> None:
        self.state, self.mesh = state, mesh
        self.task, self.roles = state.task, state.roles
        self.config = state.task.stage.stable

    def step(self, step: int, scenes: Sequence[Scene]) -> tuple[StableRecord, Mapping[Rule, str]]:
        with self.state.waiting(self.state.active(step)):
            return self._step(step, scenes)

    def _step(self, step: int, scenes: Sequence[Scene]) -> tuple[StableRecord, Mapping[Rule, str]]:
        """One rollout at a time is played, scored and replayed; then the fake score sees all of them, and the
        student moves, unless it must wait. So nothing depends on how ranks and passes cut the step."""
        task, roles = self.task, self.roles
        self.mesh.meet(f"step {step}")
        waited, spent, looked = self.state.waits, _Clock(), list[Pictures]()
        scored: list[Scored] = []
        seen: list[Played] = []
        for place, scene in enumerate(scenes):
            last = place == len(scenes) - 1
            video, found = self._rollout(step, scene, len(scenes), looked.append, spent, last=last)
            seen.append(video)
            scored += found
        before, real = self._probe(self.state.fake_read, seen, step), self._probe(roles.real, seen, step)
        critic, updates = self._critic(step, seen)
        after = self._probe(self.state.fake_read, seen, step)
        spent.add("critic")
        norms = {} if waited else self._move(step, seen, scored)
        spent.add("replay")
        pictures = self._mean_pictures(looked)
        clips, left_out = self._counts(scored)
        critics = {n: Critic(before[n], after[n], real[n], updates[n]) for n in before}
        verdict = self.state.watch.read(Reading(critics, clips, left_out, pictures.late()))
        self.state.waits = bool(verdict.paused)
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
            self.state.student_read,
            task.codec,
            scene,
            task.schedule,
            seed,
            step,
            looked,
            self.mesh.device,
        )
        spent.add("rollout")
        scored = score(task.preset, self.roles.real, self.state.fake_read, played, self.config, seed, step)
        spent.add("score")
        if not self.state.waits:
            self._replay(step, played, scored, rollouts, last=last)
        spent.add("replay")
        return played.video(), [replace(one, gradient=one.gradient.new_empty(0)) for one in scored]

    def _replay(
        self, step: int, played: Played, scored: tuple[Scored, ...], rollouts: int, *, last: bool
    ) -> None:
        """Gradients of each student whose turn it is; of the step's last replay on, ranks share them."""
        task, newest = self.task, self.config.replayed
        shown = recorded(played, newest * self.config.clip // task.preset.chunk)
        left = {n: sum(s.block.expert == n for s in shown) for n in self.state.active(step)}

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
        for name in self.state.active(step):
            state = self.state.student[name]
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
        updates = dict.fromkeys(self.state.fake, 0)
        active = self.state.active(step)
        only = active[0] if len(active) == 1 else None
        for k in range(config.critic_steps):
            draw = torch.randint(
                clips_of(rollouts[0], preset, config.clip), (), generator=keyed(seed, step, k, "critic-clip")
            )
            sigma = draw_level(preset, config, only, seed, step, k, "critic-level")
            state, model = self.state.fake[preset.expert(sigma)], self.roles.fake[preset.expert(sigma)]
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
            names = of_all_ranks(self.mesh, [_title(video.scene) for video in seen])
            sigmas = ", ".join(f"{level:.4f}" for level in sorted(set(levels)))
            raise NotFiniteError(
                f"stage {self.task.stage.name}, {what}, step {step}: {error}; samples {names}, scored at "
                f"sigma {sigmas}. {way_past(self.task.stage.name, 'all', step)}"
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

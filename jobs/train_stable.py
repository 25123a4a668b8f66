"""Stage 5 of `wp2 train`: both experts of the student, their scores, and what is rolled out.

Source: spec/worldplay2.md g.2, n.4, n.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from jobs.corpus_reader import Corpus
from jobs.train_config import TrainConfig, TrainError
from jobs.train_data import TrainingData
from trainer.checkpoint import Checkpoints, list_steps
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import STAGES, Law, Objective, Stage
from trainer.data.plan import Draw, Plan, SampleTable, latents_read, word
from trainer.data.scenes import make_scene
from trainer.data.stream import share
from trainer.distributed.mesh import Mesh
from trainer.distributed.parallelize import freeze, parallelize, train_only
from trainer.lora import Plain, add_low_rank, additions
from trainer.model.pdd_head import IntervalHead, VelocityHead, bank_from_velocity
from trainer.model.wan import WanModel
from trainer.objectives.passes import Network
from trainer.rollout import Rollout, Scene, Settings
from trainer.run_folder import RunFolder, read_json, write_json
from trainer.sampler import ManySteps
from trainer.schedule import PddSchedule
from trainer.stable.controls import ControlsError
from trainer.stable.loop import train_stable
from trainer.stable.task import Readers, Roles, StableHooks, StableTask
from trainer.stable.watch import Late, Pictures

if TYPE_CHECKING:
    from jobs.train import Told

Loaded = Callable[[str, str], WanModel]
"""(stage or path, expert) -> averaged or exported weights, on the host."""


@dataclass(frozen=True)
class Scenes:
    """What this data rank rolls out: the first pictures, controls and prompts of the plan's clips."""

    plan: Plan
    corpus: Corpus
    table: SampleTable
    stage: Stage
    preset: Preset
    seed: int
    own: slice

    @staticmethod
    def of(data: TrainingData, stage: Stage, preset: Preset, seed: int, mesh: Mesh) -> Scenes:
        own = share(stage, mesh.data_rank, mesh.data_world)
        plan = data.plan(stage, preset, seed, mesh.data_world)
        return Scenes(plan, data.corpus, data.train, stage, preset, seed, own)

    def at(self, step: int) -> Sequence[Scene]:
        """Of a step: `micro` videos side by side, one scene after another."""
        draws = self.plan.batch(step)[self.own]
        size = min(self.stage.micro, len(draws))
        return [self.make(draws[k : k + size]) for k in range(0, len(draws), size)]

    def first(self, videos: int) -> Iterator[Scene]:
        """Those of the first steps, until there are so many videos."""
        step = 0
        while videos > 0:
            for scene in self.at(step):
                if videos > 0:
                    yield scene
                videos -= len(scene.actions)
            step += 1

    def make(self, draws: Sequence[Draw]) -> Scene:
        config = self.stage.stable
        name = ", ".join(str(self.table.sample_id[self.place(draw)]) for draw in draws)
        try:
            scene = make_scene(
                draws,
                self.corpus.reader(self.stage),
                self.corpus.read,
                self.preset,
                config.latents,
                config.law,
                self.same_game,
            )
        except ControlsError as error:
            raise TrainError(f"stage {self.stage.name}, samples {name}: {error}") from None
        return replace(scene, name=name)

    def place(self, draw: Draw) -> int:
        """Of a draw in the table."""
        return int(np.flatnonzero(self.table.row == draw.row)[0])

    def same_game(self, draw: Draw) -> Iterator[int]:
        """Rows of other clips of the game of a draw, in an order keyed by its position."""
        place = self.place(draw)
        others = np.flatnonzero(self.table.game == self.table.game[place])
        rows = [int(self.table.row[k]) for k in others if k != place]
        yield from sorted(rows, key=lambda row: word(self.seed, draw.position, "joined", row))


def check_stage(stage: Stage, preset: Preset, table: SampleTable) -> None:
    """Refuse what a rollout would meet hours later. table: of what is trained on. Raises TrainError."""
    config = stage.stable
    few = [s.name for s in STAGES if s.objective in (Objective.PDD, Objective.STABLE)]
    for what in ("score", "teacher"):
        if getattr(config, what) in few:
            raise TrainError(
                f"stage {stage.name}: `stable: {{{what}: {getattr(config, what)}}}` has few-step heads, and "
                "one velocity is needed: give a stage before 4"
            )
    known = table.actions_known
    _, game = np.unique(table.game, return_inverse=True)
    rows = 1 + np.bincount(game, weights=np.maximum(known - 1, 0))[game]  # idle rows are left out
    drawn = np.minimum(table.latents, known) >= latents_read(stage, preset, min(stage.histories))
    short = drawn & (known < config.latents)
    short &= (known < 2) | (rows < config.latents if config.law is Law.JOINED else False)
    if short.any():
        first = int(np.flatnonzero(short)[0])
        raise TrainError(
            f"stage {stage.name}: clip {table.sample_id[first]} has {known[first]} known action rows, with "
            f"those of its game {int(rows[first])}, and a rollout asks for {config.latents} "
            f"({int(short.sum())} such clips): give `stable: {{law: {Law.OUT_AND_BACK}}}`, fewer latents or "
            "more clips"
        )


def cast(
    stage: Stage, config: TrainConfig, mesh: Mesh, load: Loaded, student: Callable[[str], WanModel]
) -> Roles:
    """The networks of stage 5, sharded: the student, the frozen real score, and the fake score that begins
    as it. student: of an expert, on the host, with its bank."""
    parallel, stable = config.parallel, stage.stable
    frozen = parallel.precision.dtype
    students, real, fake, added = {}, dict[str, Network](), {}, {}
    for expert in config.sizes.experts:
        model = student(expert)
        train_only(model, stage.trainable)
        students[expert] = parallelize(model, mesh, parallel)
        if stable.critic_rank:
            shared = add_low_rank(freeze(load(stable.score, expert), frozen), stable.critic_rank, config.seed)
            fake[expert] = parallelize(shared, mesh, parallel)
            real[expert], added[expert] = Plain(fake[expert]), additions(fake[expert])
            continue
        real[expert] = parallelize(freeze(load(stable.score, expert), frozen), mesh, parallel)
        critic = load(stable.score, expert)
        train_only(critic, ("",))
        fake[expert] = parallelize(critic, mesh, parallel)
    readers = None
    if stable.turns:

        def reader(model: WanModel) -> WanModel:
            return parallelize(freeze(model, frozen), mesh, parallel)

        names = config.sizes.experts
        scores = {} if stable.critic_rank else {e: reader(load(stable.score, e)) for e in names}
        readers = Readers({e: reader(student(e)) for e in names}, scores)
    return Roles(students, fake, real, added or None, readers)


def teacher_looks(
    file: Path,
    preset: Preset,
    scenes: Iterable[Scene],
    teacher: Callable[[str], WanModel],
    codec: Codec,
    many: ManySteps,
    mesh: Mesh,
) -> Late:
    """What the teacher's samples of this rank's scenes look like, the mean over ranks: measured once, kept in
    a file."""
    there = mesh.first(file.is_file)
    if not there:
        experts = {name: teacher(name) for name in preset.experts}
        found = [
            Pictures.of(chunk.pixels for chunk in rollout.chunks())
            for rollout in (
                Rollout(preset, experts, codec, scene, Settings(many=many), device=mesh.device)
                for scene in scenes
            )
        ]
        own = torch.tensor(astuple(Late.mean([f.late() for f in found])), device=mesh.device)
        mean = Late(*mesh.mean(own).tolist())
        if mesh.rank == 0:
            write_json(file, asdict(mean))
        mesh.meet("the teacher's samples")
    read = read_json(file)
    try:
        return Late(**read)
    except TypeError:
        raise TrainError(f"{file} is of other measures: remove it, and it is measured again") from None


def with_bank(model: WanModel, schedule: PddSchedule, expert: str) -> WanModel:
    """The start of stage 4: the head of one velocity, copied for every interval. Source: f.1."""
    assert isinstance(model.head, VelocityHead)
    model.head = bank_from_velocity(model.head, schedule.heads(expert))
    return model


class Run(Protocol):
    """What stage 5 needs of the run that it is part of."""

    @property
    def told(self) -> Told: ...

    @property
    def schedule(self) -> PddSchedule: ...

    @property
    def stop(self) -> Callable[[], bool]: ...

    def start(self, stage: Stage, expert: str) -> WanModel:
        """What a stage starts from, on the host."""

    def weights(self, source: str, expert: str) -> WanModel:
        """The average of a finished stage, or exported weights, on the host."""

    def frozen(self, source: str, expert: str) -> WanModel:
        """The same, sharded, in the precision of what is only read."""


def _told(say: Callable[[str], None], expert: str) -> Callable[[str], None]:
    return lambda line: say(f"expert {expert}: {line}")


def run_stable(
    stage: Stage,
    config: TrainConfig,
    mesh: Mesh,
    data: TrainingData,
    folder: RunFolder,
    codec: Codec,
    run: Run,
    step: int | None = None,
) -> None:
    """Train the experts of stage 5 together, from the newest step that all of them have, or from `step`."""
    preset = config.sizes

    def student(expert: str) -> WanModel:
        """Without stage 4 behind it, every interval begins with the one velocity."""
        model = run.start(stage, expert)
        return model if isinstance(model.head, IntervalHead) else with_bank(model, run.schedule, expert)

    scenes = Scenes.of(data, stage, preset, config.seed, mesh)
    teacher = teacher_looks(
        folder.stage(stage.name) / "teacher.json",
        preset,
        scenes.first(-(-config.watch.teacher // mesh.data_world)),
        lambda expert: run.frozen(stage.stable.teacher, expert),
        codec,
        ManySteps(steps=config.look.steps, guidance=config.look.guidance),
        mesh,
    )
    roles = cast(stage, config, mesh, run.weights, student)
    task = StableTask(
        stage,
        preset,
        config.seed,
        config.parallel,
        run.schedule,
        codec,
        folder.stage(stage.name),
        teacher,
        config.watch,
        config.save_every,
        config.host_ema,
        config.save_minutes,
    )
    say = run.told.say
    places = {expert: folder.checkpoints(stage.name, expert) for expert in preset.experts}
    kept = {
        expert: Checkpoints(
            place,
            config.keep,
            say=_told(say, expert) if list_steps(place) != ([], []) else lambda line: None,
            beside=tuple(places.values()),
        )
        for expert, place in places.items()
    }
    try:
        hooks = StableHooks(run.told.seen, run.stop, say)
        train_stable(task, roles, mesh, scenes.at, kept, hooks, step)
    finally:
        for checkpoints in kept.values():
            checkpoints.close()

"""Stage 5 of `wp2 train`: both experts of the student, their scores, and what is rolled out.

Source: spec/worldplay2.md g.2, n.4, n.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jobs.corpus_reader import Corpus
from jobs.train_config import TrainConfig, TrainError
from jobs.train_data import TrainingData
from trainer.checkpoint import Checkpoints
from trainer.codec.base import Codec
from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.plan import Draw, Plan, SampleTable, word
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
from trainer.stable.loop import Readers, Roles, StableHooks, StableTask, train_stable
from trainer.stable.watch import Pictures

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

    def make(self, draws: Sequence[Draw]) -> Scene:
        config = self.stage.stable
        return make_scene(
            draws,
            self.corpus.reader(self.stage),
            self.corpus.read,
            self.preset,
            config.latents,
            config.law,
            self.same_game,
        )

    def same_game(self, draw: Draw) -> Iterator[int]:
        """Rows of other clips of the game of a draw, in an order keyed by its position."""
        place = int(np.flatnonzero(self.table.row == draw.row)[0])
        others = np.flatnonzero(self.table.game == self.table.game[place])
        rows = [int(self.table.row[k]) for k in others if k != place]
        yield from sorted(rows, key=lambda row: word(self.seed, draw.position, "joined", row))


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


def teacher_pictures(
    file: Path,
    preset: Preset,
    scene: Callable[[], Scene],
    teacher: Callable[[str], WanModel],
    codec: Codec,
    many: ManySteps,
    mesh: Mesh,
) -> Pictures:
    """What the teacher's samples look like, by chunk: measured once, kept in a file."""
    there = file.is_file()
    mesh.meet("the teacher's samples")
    if not there:
        experts = {name: teacher(name) for name in preset.experts}
        rollout = Rollout(preset, experts, codec, scene(), Settings(many=many))
        found = Pictures.joined([Pictures.of([chunk.pixels]) for chunk in rollout.chunks()])
        if mesh.rank == 0:
            write_json(file, vars(found))
        mesh.meet("the teacher's samples")
    read = read_json(file)
    try:
        return Pictures(*(tuple(read[name]) for name in ("motion", "saturation", "sharpness")))
    except KeyError as error:
        raise TrainError(f"{file} lacks {error}: remove it, and it is measured again") from None


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
) -> None:
    """Train the experts of stage 5 together, from the newest step that all of them have."""
    preset = config.sizes

    def student(expert: str) -> WanModel:
        """Without stage 4 behind it, every interval begins with the one velocity."""
        model = run.start(stage, expert)
        return model if isinstance(model.head, IntervalHead) else with_bank(model, run.schedule, expert)

    scenes = Scenes.of(data, stage, preset, config.seed, mesh)
    teacher = teacher_pictures(
        folder.stage(stage.name) / "teacher.json",
        preset,
        lambda: scenes.at(0)[0],
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
    )
    say = run.told.say
    kept = {
        expert: Checkpoints(folder.checkpoints(stage.name, expert), config.keep, say=_told(say, expert))
        for expert in preset.experts
    }
    try:
        hooks = StableHooks(run.told.seen, run.stop, say)
        train_stable(task, roles, mesh, scenes.at, kept, hooks)
    finally:
        for checkpoints in kept.values():
            checkpoints.close()

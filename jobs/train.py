"""`wp2 train`: a corpus through the stages of the curriculum, one expert at a time.

Stage by stage: each expert from the averaged weights of the stage that it starts from, then the stage's gate
on both, then the next. The same code runs as one process and as a rank of torchrun; what is finished is
skipped, what was cut off goes on from its newest complete checkpoint.
"""

from __future__ import annotations

import fcntl
import gc
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from jobs.model import checked_device
from jobs.train_config import TrainConfig, TrainError, plain
from jobs.train_data import TrainingData
from jobs.train_disk import OnDisk
from jobs.train_look import Looker, codec_of
from jobs.train_stable import check_stage, run_stable, with_bank
from jobs.train_weights import from_files, from_run, unfilled
from trainer.checkpoint import Checkpoints, list_steps
from trainer.codec.base import Codec
from trainer.config import ConfigError, Preset
from trainer.curriculum import STAGES, Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import word
from trainer.data.stream import Loader
from trainer.distributed.mesh import Mesh, make_mesh
from trainer.distributed.parallelize import freeze, parallelize, train_only
from trainer.export import SCHEDULE
from trainer.loop import Hooks, Stopped, Task, train_expert
from trainer.metrics import Record
from trainer.model.wan import WanModel, build
from trainer.objectives.flow import Minimised
from trainer.objectives.loss import Loss
from trainer.objectives.passes import Network
from trainer.objectives.pdd import pdd_loss
from trainer.run_folder import CHANGES, REDRAWN, RunFolder, write_json
from trainer.schedule import PddSchedule, schedule_of
from trainer.stable.loop import WatchError
from trainer.stable.state import ended_by


@dataclass(frozen=True)
class Options:
    """Of a run. span: stages, as "1-3". experts: none for all. steps: of each stage instead of its own.
    init: weights that the first stage starts from. overrides: gates that need not pass. step: go
    on from this checkpoint of the first expert that is not finished. accept_changes: go on with another
    optimizer or precision. redraw: STAGE/EXPERT/STEP of steps that draw other samples."""

    corpus: str
    out: Path
    span: str = "1-3"
    experts: tuple[str, ...] = ()
    steps: int | None = None
    init: Path | None = None
    overrides: tuple[str, ...] = ()
    device: str | None = None
    step: int | None = None
    accept_changes: bool = False
    redraw: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateResult:
    """A held-out measure after a stage. passed: value is above the bar. held_out: whether its clips were kept
    from training. numbers: all that was measured."""

    name: str
    value: float
    bar: float
    passed: bool
    held_out: bool
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


Gate = Callable[[Stage, Mapping[str, WanModel]], GateResult]
"""Measures the experts after a stage; the same answer on every rank."""


@dataclass(frozen=True)
class Told:
    """Whom a run tells of it, on its first rank."""

    say: Callable[[str], None] = print
    begin: Callable[[Stage, str], None] = lambda stage, expert: None
    seen: Callable[[Record], None] = lambda record: None


def train(config: TrainConfig, options: Options, told: Told | None = None) -> None:
    """Run to the end of the last stage.

    Raises UserError in one line: what does not fit, before the first step; Stopped after SIGTERM or Ctrl-C;
    NotFiniteError; TrainError where a gate did not pass.
    """
    if options.device not in (None, "cpu", "cuda"):
        raise TrainError(f"--device {options.device!r}: give cpu or cuda; ranks choose their own GPU")
    checked_device(options.device or "cpu")
    # The prediction is a view, and nobody writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    try:
        mesh = make_mesh(config.parallel, options.device)
    except ConfigError as error:
        raise TrainError(f"parallel: {error}") from None
    try:
        with _stopping() as stop:
            run = _Run(config, options, mesh, told or Told(), stop)
            if mesh.rank:
                run.told = Told(say=lambda line: None)
            run.all_stages()
            mesh.meet("the end of the run")
    except ConfigError as error:
        raise TrainError(str(error)) from None
    finally:
        mesh.close()


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM and the first Ctrl-C ask to stop after the step; a second Ctrl-C ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    def __init__(
        self, config: TrainConfig, options: Options, mesh: Mesh, told: Told, stop: Callable[[], bool]
    ) -> None:
        self.config, self.options, self.mesh, self.told, self.stop = config, options, mesh, told, stop
        self.preset: Preset = config.sizes
        self.stages = config.selected(options.span, options.steps)
        self.experts = _experts(self.preset, options.experts)
        self.folder = RunFolder(options.out)
        self.sources: Mapping[str, str | Path] = {}
        self._step = options.step
        self.data = TrainingData.open(options.corpus, config.data, self.preset)
        self.disk = OnDisk(self.folder, self.preset, self.stages, self.experts, options)

    def all_stages(self) -> None:
        self._check()
        self.mesh.meet("the start of the run")
        for stage in self.stages:
            self.mesh.first(partial(self.disk.needs_gate, stage, self.sources[stage.name]))
            if stage.objective is Objective.STABLE:
                self._heard(f"stage {stage.name}")
                self._stable(stage)
            else:
                for expert in self.experts:
                    self._expert(stage, expert)
            self._looks(stage)
            self._gate(stage)

    # --- before the first step ----------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse what cannot work, say what will be drawn, remember what this run is."""
        self.sources = self.mesh.first(lambda: {s.name: self.disk.source(s) for s in self.stages})
        for stage in self.stages:
            plan = self.data.plan(stage, self.preset, self.config.seed, self.mesh.data_world)
            self.told.say(f"{plan.describe(stage.steps)}; starts from {self.sources[stage.name]}")
        for stage in (s for s in self.stages if s.objective is Objective.STABLE):
            if set(self.experts) != set(self.preset.experts):
                raise TrainError(f"stage {stage.name} rolls out with all experts: leave --experts out")
            if self._codec() is None:
                raise TrainError(
                    f"stage {stage.name} decodes what it rolls out, and {self.options.corpus} holds no codec "
                    f"of its latents ({self.data.codec}): give `look: {{codec: KIND:PATH}}`"
                )
            for what in ("score", "teacher"):
                self.mesh.first(partial(self.disk.known, stage, what, getattr(stage.stable, what)))
            check_stage(stage, self.preset, self.data.train)
        if not self.data.is_held_out:
            self.told.say(
                "fewer than two clips are held out (split val, or a share of the recordings where there is "
                "none): gates and videos are of clips that were trained on"
            )
        self.mesh.first(self.disk.check_step)
        known = self.mesh.first(lambda: self.disk.remember(self._identity()))
        for change in known[CHANGES]:
            since = ", ".join(f"{s}/{e}/{k}" for s, steps in change["from"].items() for e, k in steps.items())
            self.told.say(f"accepted before: {'; '.join(change['settings'])}, from {since}")
        for place, times in known[REDRAWN].items():
            self.told.say(f"{place} draws other samples at step {', '.join(times)}")
        self.data = replace(self.data, redrawn=known[REDRAWN])

    def _identity(self) -> dict[str, Any]:
        stages = plain(self.config)["stages"]
        found = {}
        for stage in self.stages:
            found[stage.name] = {
                **stages[stage.name],
                "steps": stage.steps,
                "corpus": self.data.root,
                "start_weights": str(self.sources[stage.name]),
                "precision": str(self.config.parallel.precision),
            }
        return {
            "preset": self.preset.name,
            "model": asdict(self.preset),
            "seed": self.config.seed,
            "codec": self.data.codec,
            "text": self.data.text,
            "samples": {"tiers": self.config.data.tiers, "held_out": self.config.data.held_out},
            "stages": found,
        }

    # --- one expert ---------------------------------------------------------------------------------------

    def _finished(self, stage: str, expert: str) -> bool:
        """Has an expert come to the last step that the run remembers for a stage; the same on every rank."""
        return self.mesh.first(lambda: self.disk.finished(stage, expert))

    def _heard(self, where: str) -> None:
        """Raises Stopped where a rank was asked to while nothing was trained: in a load, a gate, a video."""
        asked = self.mesh.gather(torch.tensor([float(self.stop())]))
        if bool(asked.any()):
            raise Stopped(f"stopped before {where} went on; the same command goes on from here")

    def _expert(self, stage: Stage, expert: str) -> None:
        if self._finished(stage.name, expert):
            self.told.say(f"stage {stage.name}, expert {expert}: finished before, skipped")
            return
        self._heard(f"stage {stage.name}, expert {expert},")
        with self._alone(self.folder.expert(stage.name, expert)):
            self._train(stage, expert)

    def _train(self, stage: Stage, expert: str) -> None:
        self.told.begin(stage, expert)
        config, mesh = self.config, self.mesh
        # What goes on needs no weights to start from, and an earlier stage may be gone by then.
        begun = self.mesh.first(lambda: self.disk.begun(stage.name, expert))
        model = unfilled(self.preset) if begun else self.start(stage, expert)
        minimise, note = None, {}
        if stage.objective is Objective.PDD:
            minimise, note = self._few_steps(stage, expert), {SCHEDULE: asdict(self.schedule)}
            model = with_bank(model, self.schedule, expert)
        train_only(model, stage.trainable)
        model = parallelize(model, mesh, config.parallel)
        plan = self.data.plan(stage, self.preset, config.seed, mesh.data_world, expert)
        loader = Loader(
            plan,
            self.data.corpus.reader(stage),
            stage,
            self.preset,
            config.seed,
            mesh.data_rank,
            mesh.data_world,
            config.data.threads,
            config.data.ahead,
        )
        task = Task(
            stage,
            self.preset,
            expert,
            config.seed,
            config.parallel,
            self.folder.expert(stage.name, expert),
            config.save_every,
            config.look.every,
            config.host_ema,
            minimise,
            note,
            config.save_minutes,
        )
        look = self._look_during(stage, expert) if config.look.every else None
        hooks = Hooks(self.told.seen, look, self.stop, self.told.say)
        place = self.folder.checkpoints(stage.name, expert)
        say = self.told.say if list_steps(place) != ([], []) else lambda line: None
        checkpoints = Checkpoints(place, config.keep, say=say)
        try:
            self._rewound(checkpoints)
            self._heard(f"stage {stage.name}, expert {expert},")
            train_expert(task, model, mesh, loader, checkpoints, hooks)
        finally:
            checkpoints.close()
        del model
        _emptied()

    def _rewound(self, checkpoints: Checkpoints) -> None:
        """Set the checkpoints behind the asked step aside, once."""
        if self._step is not None:
            checkpoints.at(self._step)
            checkpoints.rewind(self._step)
            self._step = None

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Inside, no other run writes this folder. Raises TrainError where one does."""
        with ExitStack() as held:
            self.mesh.first(lambda: _lock(folder, held))
            yield

    def _codec(self) -> Codec | None:
        """What decodes the corpus's latents; None where nothing is known to."""
        return codec_of(self.data, self.config.look, str(self.mesh.device.type))

    @property
    def schedule(self) -> PddSchedule:
        """Of stages 4 and 5, and of whatever samples with their weights."""
        return schedule_of(self.preset)

    def _few_steps(self, stage: Stage, expert: str) -> Minimised:
        """What stage 4 minimises: the distance to a frozen teacher, the weights that it starts from."""
        teacher = self._reader(self.start(stage, expert))
        schedule, pdd = self.schedule, stage.pdd

        def minimise(model: Network, preset: Preset, batch: Batch, name: str, seed: int, step: int) -> Loss:
            return pdd_loss(model, teacher, preset, schedule, batch, name, pdd, seed)

        return minimise

    def _stable(self, stage: Stage) -> None:
        """Stage 5 trains all experts at once. What a watchdog ended goes on from an earlier step alone."""
        if self._step is None:
            places = [self.folder.checkpoints(stage.name, expert) for expert in self.experts]
            ended = self.mesh.first(lambda: ended_by(stage.name, places))
            if ended is not None:
                raise WatchError(ended)
            if all(self._finished(stage.name, expert) for expert in self.experts):
                self.told.say(f"stage {stage.name}: finished before, skipped")
                return
        with self._alone(self.folder.stage(stage.name)):
            self._train_stable(stage)

    def _train_stable(self, stage: Stage) -> None:
        self.told.begin(stage, "all")
        codec = self._codec()
        assert codec is not None
        step, self._step = self._step, None
        run_stable(stage, self.config, self.mesh, self.data, self.folder, codec, self, step)
        _emptied()

    def start(self, stage: Stage, expert: str) -> WanModel:
        """The network of an expert with the weights that a stage starts from, fp32, on the host."""
        source = self.sources[stage.name]
        if isinstance(source, Path):
            return from_files(source, expert, self.preset)
        if source == "fresh weights":
            return build(self.preset.model, word(self.config.seed, "weights", expert) >> 1)
        assert stage.start is not None
        return self.weights(stage.start, expert)

    def weights(self, source: str, expert: str) -> WanModel:
        """source: a finished stage of this run, for its average, or a path of exported weights."""
        if source in {s.name for s in STAGES}:
            return from_run(self.folder, source, expert, self.preset, self.schedule)
        return from_files(Path(source), expert, self.preset)

    # --- after a stage ------------------------------------------------------------------------------------

    def frozen(self, source: str, expert: str) -> WanModel:
        """An expert to look at: `weights`, sharded as the trained one is."""
        return self._reader(self.weights(source, expert))

    def _reader(self, model: WanModel) -> WanModel:
        model = freeze(model, self.config.parallel.precision.dtype)
        return parallelize(model, self.mesh, self.config.parallel)

    def _look_during(self, stage: Stage, expert: str) -> Callable[[int, WanModel], None] | None:
        """Videos of the expert in training with the others, of this stage or of the one before."""
        others: dict[str, WanModel] = {}
        for other in (e for e in self.preset.experts if e != expert):
            known = [n for n in (stage.name, stage.start) if n is not None and self._finished(n, other)]
            if not known:
                return None
            others[other] = self.frozen(known[0], other)
        looker = self._looker()
        if looker is None:
            return None

        def look(done: int, model: WanModel) -> None:
            made = looker.show(self.folder.rollouts(stage.name, expert, done), {**others, expert: model})
            self.told.say(f"stage {stage.name}, expert {expert}, step {done}: {made} videos")

        return look

    def _looks(self, stage: Stage) -> None:
        """Videos at the end of a stage."""
        folder = self.folder.rollouts(stage.name, "end", stage.steps)
        self.mesh.meet(f"the videos of stage {stage.name}")
        if self.mesh.first(folder.is_dir):
            return
        if not all(self._finished(stage.name, e) for e in self.preset.experts):
            return
        looker = self._looker()
        if looker is not None:
            experts = {e: self.frozen(stage.name, e) for e in self.preset.experts}
            made = looker.show(folder, experts)
            self.told.say(f"stage {stage.name}: {made} videos in {folder}")

    def _looker(self) -> Looker | None:
        if not self.config.look.clips:
            return None
        return Looker.of(self.data, self.preset, self.config.look, self.config.seed, self.mesh, self.told.say)

    def _gate(self, stage: Stage) -> None:
        """Measure the experts after a stage, once."""
        file = self.disk.gate(stage.name)
        self.mesh.meet(f"the gate of stage {stage.name}")
        if not stage.gate or self.mesh.first(file.is_file):
            return
        from jobs.train_gate import few_steps_gate, make_gate

        experts = {e: self.frozen(stage.name, e) for e in self.experts}
        if stage.objective is Objective.PDD:
            assert stage.start is not None
            teacher = {e: self._reader(self.start(stage, e)) for e in self.experts}
            codec = self._codec()
            result = few_steps_gate(
                self.data, self.preset, self.config, stage, experts, teacher, codec, self.mesh.device
            )
        else:
            result = make_gate(self.data, self.preset, self.config, self.mesh.device)(stage, experts)
        self.mesh.meet(f"the gate of stage {stage.name}")
        overridden = not result.passed and result.name in self.options.overrides
        self.mesh.first(lambda: write_json(file, {**asdict(result), "overridden": overridden}))
        verdict = "passed" if result.passed else "NOT passed"
        self.told.say(f"stage {stage.name}: gate {result.name} {verdict}: {result.detail}")
        _emptied()


def _lock(folder: Path, held: ExitStack) -> None:
    """As long as `held` is. Raises TrainError where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = held.enter_context((folder / ".lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise TrainError(f"{folder} is being trained by another run: wait, or end it") from None


def _experts(preset: Preset, asked: tuple[str, ...]) -> tuple[str, ...]:
    """In the order of use. Raises TrainError."""
    unknown = [name for name in asked if name not in preset.experts]
    if unknown:
        raise TrainError(f"--experts {unknown[0]}: preset {preset.name} has {', '.join(preset.experts)}")
    return tuple(name for name in preset.experts if not asked or name in asked)


def _emptied() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""The state of stage 5: students and fake scores of all experts with their moments, and the watch; saved
together, loaded together, and put on the host in turns.

Source: spec/worldplay2.md n.4; spec/faults.md F3, F12, M2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import Checkpoints, Saved, folder_name, list_steps, read_saved
from trainer.checkpoint_files import CheckpointError, Entry
from trainer.ema import Ema
from trainer.export import SCHEDULE, same_schedule
from trainer.model.wan import WanModel
from trainer.optim import Parked, make_optimizer, park, set_rate
from trainer.parameters import local, named_parameters
from trainer.stable.task import Roles, StableTask
from trainer.stable.watch import Watch
from trainer.state import TrainState

FAKE, WATCH, STOPPED = "fake/", "watch", "stopped"


class StableState:
    """student, fake: by expert. waits: must the student wait at the next step. ended: what a watchdog saw,
    where it ended the run at the checkpoint that this one goes on from. student_read, fake_read: the networks
    that are read, copies of those that wait on the host."""

    def __init__(self, task: StableTask, roles: Roles) -> None:
        self.task, self.roles = task, roles
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
            set_rate(optimizer, task.stage.stable.critic_lr)
            self.fake[name] = TrainState(trained, optimizer, Ema(nn.Module(), 0.0))
        self.waits = False
        self.ended = ""
        self.student_read: Mapping[str, WanModel] = roles.student
        self.fake_read: Mapping[str, WanModel] = roles.fake

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
            self.waits, self.ended = bool(saved.note["waits"]), str(saved.note.get(STOPPED, ""))
        self.watch.load(state)
        for kept in checkpoints.values():
            kept.rewind(step)
        return step

    def save(self, done: int, checkpoints: Mapping[str, Checkpoints], stopped: str) -> None:
        """stopped: what ended the run, empty where nothing did."""
        wait(checkpoints)  # all have the last step before any begins the next
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
        return (names[step % len(names)],) if self.task.stage.stable.turns else names

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


def ended_by(stage: str, folders: Sequence[Path]) -> str | None:
    """Where a watchdog ended a run: a line of what it saw and what to do. None where none did. folders: the
    checkpoints of all experts."""
    common = sorted(set.intersection(*(set(list_steps(folder)[0]) for folder in folders)))
    saved = read_saved(folders[0] / folder_name(common[-1])) if common else None
    if saved is None or not saved.note.get(STOPPED):
        return None
    advice = (
        f"give --step {common[-2]} to go on from there"
        if common[1:]
        else "begin anew in another folder: there is no earlier checkpoint"
    )
    return (
        f"stage {stage} was ended behind step {saved.step - 1}: {saved.note[STOPPED]}. Change what "
        f"docs/curriculum.md says, and {advice}"
    )


def wait(checkpoints: Mapping[str, Checkpoints]) -> None:
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


@torch.no_grad()
def _copy(trained: nn.Module, reader: nn.Module) -> None:
    """This rank's pieces of the masters, in the precision of what is only read."""
    wanted = named_parameters(reader)
    for name, parameter in named_parameters(trained).items():
        local(wanted[name]).copy_(local(parameter))

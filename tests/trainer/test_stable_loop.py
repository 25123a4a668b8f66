"""The loop of Stable Forcing on short rollouts: stopped anywhere it goes on as if it had not been."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.model_support import PRESET, noisy_expert
from tests.trainer.stable_support import SCHEDULE, scene, students
from tests.trainer.tiny_codecs import fitted
from trainer.checkpoint import Checkpoints, Saved, list_steps
from trainer.checkpoint_files import CheckpointError
from trainer.codec.linear import Linear
from trainer.curriculum import STAGES, StableConfig
from trainer.distributed.mesh import Mesh, Parallel, make_mesh
from trainer.distributed.parallelize import freeze, parallelize
from trainer.loop import NotFiniteError
from trainer.lora import Plain, add_low_rank, additions
from trainer.model.wan import WanModel
from trainer.rollout import Scene
from trainer.schedule import PddSchedule
from trainer.stable import loop
from trainer.stable.loop import train_stable
from trainer.stable.played import Played
from trainer.stable.state import StableState
from trainer.stable.task import Readers, Roles, StableHooks, StableTask
from trainer.stable.watch import Late, WatchConfig

CHUNKS = 4
PARALLEL = Parallel(checkpointing=False)
STABLE = StableConfig(latents=CHUNKS * PRESET.chunk, clip=8, critic_steps=1, critic_lr=1e-3)
NEVER = WatchConfig(behind=1e9, worse=1e9, window=100)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    torch.set_num_threads(1)
    made = make_mesh(PARALLEL, "cpu")
    yield made
    made.close()


def cast(mesh: Mesh, config: StableConfig) -> Roles:
    """As `jobs.train_stable.cast` does, of weights that are noise."""

    def sharded(model: WanModel) -> WanModel:
        return parallelize(model, mesh, PARALLEL)

    def frozen(model: WanModel) -> WanModel:
        return sharded(freeze(model, torch.float32))

    student = {name: sharded(model) for name, model in students().items()}
    readers = None
    if config.critic_rank:
        fake = {n: sharded(add_low_rank(noisy_expert(n), config.critic_rank, 0)) for n in PRESET.experts}
        added = {name: additions(model) for name, model in fake.items()}
        if config.turns:
            readers = Readers({n: frozen(m) for n, m in students().items()}, {})
        return Roles(student, fake, {n: Plain(model) for n, model in fake.items()}, added, readers)
    fake = {name: sharded(noisy_expert(name)) for name in PRESET.experts}
    return Roles(student, fake, {name: frozen(noisy_expert(name)) for name in PRESET.experts})


def scenes(step: int) -> Sequence[Scene]:
    """Two rollouts of one video."""
    return [replace(scene(CHUNKS, 1), positions=(2 * step + k,), name=f"clip{2 * step + k}") for k in (0, 1)]


def go(
    mesh: Mesh,
    folder: Path,
    steps: int,
    config: StableConfig = STABLE,
    watch: WatchConfig = NEVER,
    schedule: PddSchedule = SCHEDULE,
    from_step: int | None = None,
) -> None:
    """Train to a step, with a checkpoint after each."""
    task = task_of(folder, steps, config, watch, schedule)
    with checkpoints(folder, 2) as kept:
        hooks = StableHooks(say=lambda line: None)
        train_stable(task, cast(mesh, config), mesh, scenes, kept, hooks, from_step)


def task_of(
    folder: Path,
    steps: int,
    config: StableConfig = STABLE,
    watch: WatchConfig = NEVER,
    schedule: PddSchedule = SCHEDULE,
) -> StableTask:
    optim = replace(STAGES[-1].optim, lr=1e-3, warmup=0, ema_from=0)
    stage = replace(STAGES[-1], steps=steps, batch=2, stable=config, optim=optim)
    codec, late = Linear(fitted()), Late(1.0, 1.0, 1.0, 0.0)
    return StableTask(stage, PRESET, 0, PARALLEL, schedule, codec, folder, late, watch, save_every=1)


@contextmanager
def checkpoints(folder: Path, keep: int) -> Iterator[dict[str, Checkpoints]]:
    places = {name: folder / name for name in PRESET.experts}
    kept = {
        name: Checkpoints(place, keep, say=lambda line: None, beside=tuple(places.values()))
        for name, place in places.items()
    }
    try:
        yield kept
    finally:
        for each in kept.values():
            each.close()


def tensors(folder: Path) -> dict[str, Tensor]:
    """Of the newest checkpoints of both experts."""
    found = {}
    for name in PRESET.experts:
        saved = Checkpoints(folder / name, say=lambda line: None).newest()
        assert saved is not None
        own = {key: torch.empty(e.shape, dtype=e.dtype) for key, e in saved.entries.items()}
        saved.read(own)
        found |= {f"{name}/{key}": value for key, value in own.items()}
    return found


def steps(folder: Path) -> dict[str, list[int]]:
    return {name: list_steps(folder / name)[0] for name in PRESET.experts}


@pytest.fixture(scope="module")
def whole(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, in which no two caches were alive at once."""
    folder = tmp_path_factory.mktemp("loop") / "whole"
    caches: list[weakref.ref[object]] = []

    def alone(work: Callable[..., object], fresh: bool) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            assert not [ref for ref in caches if ref() is not None]
            out = work(*given, **named)
            if fresh:
                assert isinstance(out, Played)
                caches.extend(weakref.ref(cache) for cache in out.caches.values())
            return out

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "play", alone(loop.play, True))
        patch.setattr(loop, "critic_loss", alone(loop.critic_loss, False))
        go(mesh, folder, 2)
    assert len(caches) == 2 * 2 * len(PRESET.experts)
    assert steps(folder) == {"high": [1, 2], "low": [1, 2]}
    return folder


@pytest.fixture
def run(mesh: Mesh, tmp_path: Path) -> StableState:
    return StableState(task_of(tmp_path, 9), cast(mesh, STABLE))


def test_a_kill_between_the_first_saves_begins_anew(run: StableState, tmp_path: Path) -> None:
    with checkpoints(tmp_path, 2) as kept:
        run.save(1, {"high": kept["high"]}, "")
    (tmp_path / "low" / "step-00000001").mkdir(parents=True)  # a save that was cut off
    with checkpoints(tmp_path, 2) as kept:
        assert run.resume(kept, None) == 0
        assert sorted(p.name for p in (tmp_path / "high").iterdir()) == ["set-aside-step-00000001"]
        run.save(1, kept, "")
    assert steps(tmp_path) == {"high": [1], "low": [1]}


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_one_expert_lacks_removes_no_step_that_both_have(
    run: StableState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    publish = Checkpoints._publish

    def cut(self: Checkpoints, saved: Saved) -> None:
        if saved.step == keep + 1 and self.folder.name == "low":
            raise CheckpointError("no space left")
        publish(self, saved)

    monkeypatch.setattr(Checkpoints, "_publish", cut)
    with pytest.raises(CheckpointError, match="no space left"), checkpoints(tmp_path, keep) as kept:
        for step in range(1, keep + 3):
            run.save(step, kept, "")
    before = list(range(1, keep + 1))
    assert steps(tmp_path) == {"high": [*before, keep + 1], "low": before}
    monkeypatch.undo()
    with checkpoints(tmp_path, keep) as kept:
        assert run.resume(kept, None) == keep
        run.save(keep + 1, kept, "")
    assert steps(tmp_path) == {name: [*before[1:], keep + 1] for name in PRESET.experts}


def test_in_turns_a_low_rank_fake_score_is_read_while_it_waits(mesh: Mesh, tmp_path: Path) -> None:
    config = replace(STABLE, turns=True, critic_rank=4)
    go(mesh, tmp_path, 2, config)
    moved = tensors(tmp_path)
    go(mesh, tmp_path, 2, config, from_step=1)
    again = tensors(tmp_path)
    assert moved.keys() == again.keys() and all(torch.equal(moved[n], again[n]) for n in moved)
    for name in PRESET.experts:
        ups = [moved[n] for n in moved if n.startswith(f"{name}/fake/model/") and n.endswith("-up")]
        assert any(up.any() for up in ups)


def test_another_schedule_or_window_is_refused_before_a_step(
    mesh: Mesh, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "play", lambda *given: pytest.fail("a step was begun"))
    with pytest.raises(CheckpointError, match=r"few-step heads of the schedule .*one schedule serves"):
        go(mesh, whole, 3, schedule=PddSchedule(shift=5.0, boundary=None))
    with pytest.raises(CheckpointError, match=r"another `watch.window` than 3: give the one that"):
        go(mesh, whole, 3, watch=replace(NEVER, window=3))
    assert steps(whole) == {"high": [1, 2], "low": [1, 2]}


@pytest.mark.parametrize(("broken", "what"), [("score", "student high"), ("critic_loss", "fake score high")])
def test_a_gradient_that_is_no_number_names_step_samples_and_levels(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, what: str
) -> None:
    sound = getattr(loop, broken)

    def spoilt(*given: object) -> object:
        out = sound(*given)
        if broken == "critic_loss":
            return out * float("nan")
        return tuple(replace(one, gradient=one.gradient * float("inf")) for one in out)

    monkeypatch.setattr(loop, broken, spoilt)
    with pytest.raises(NotFiniteError) as error:
        go(mesh, tmp_path, 1)
    line = str(error.value)
    assert line.startswith(f"stage 5, {what}, step 0: the gradient norm is ") and "\n" not in line
    assert "samples clip0; clip1, scored at sigma 0." in line
    assert not any(steps(tmp_path).values())

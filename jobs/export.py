"""`wp2 export`: which checkpoints of a run become weights, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import Saved, check_bytes, find, list_steps
from trainer.checkpoint_files import CheckpointError
from trainer.run_folder import RunFolder
from trainer.weights.checkpoint import PAIR, SINGLE

Say = Callable[[str], None]


def choose(path: Path, stage: str | None, step: int | None, say: Say) -> dict[str, Saved]:
    """A complete checkpoint of every expert, all of one stage. Raises CheckpointError.

    stage: the last one if None, in the order of names, that has one of each. step: the newest of each expert
    if None. Every byte is checked before anything is written.
    """
    run = RunFolder(path)
    name = _last_stage(run) if stage is None else stage
    chosen: dict[str, Saved] = {}
    for expert in _experts(run, name):
        folder = run.checkpoints(name, expert)
        saved = find(folder, step, say)
        if saved is None:
            raise CheckpointError(f"{folder} has no complete checkpoint: train that expert first")
        check_bytes(saved, saved.damage())
        chosen[expert] = saved
    if len({saved.step for saved in chosen.values()}) > 1:
        steps = ", ".join(f"{expert} at {saved.step}" for expert, saved in chosen.items())
        say(f"the experts of stage {name} are at different steps: {steps}")
    return chosen


def _last_stage(run: RunFolder) -> str:
    """Names of stages are in the order of training: 1, 2a, 2b, 3, 4, 5."""
    stages = sorted(p.name for p in run.path.iterdir() if p.is_dir()) if run.path.is_dir() else []
    for name in reversed(stages):
        folders = [run.checkpoints(name, expert) for expert in _experts(run, name, strict=False)]
        if folders and all(list_steps(folder)[0] for folder in folders):
            return name
    raise CheckpointError(f"{run.path} has no stage with a complete checkpoint of every expert: train first")


def _experts(run: RunFolder, stage: str, strict: bool = True) -> tuple[str, ...]:
    """Those that the stage's folder stands for: both, or the single one."""
    for experts in ((SINGLE,), PAIR):
        if any(run.expert(stage, expert).is_dir() for expert in experts):
            return experts
    if strict:
        raise CheckpointError(f"{run.path} has no stage {stage!r} with checkpoints")
    return ()

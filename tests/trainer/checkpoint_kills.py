"""Saves that are killed: `python -m tests.trainer.checkpoint_kills FOLDER KEEP POINT..`.

Forks once for each point (torch is imported once), saves steps 1, 2, 3, .. in a folder of that name, and is
killed by SIGKILL at the point of step 3, or after so many milliseconds where the point is a number.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, checkpoint_files
from trainer.checkpoint import Checkpoints

KILLED_AT = 3
POINTS = ("data", "metadata", "marker", "marker-rename", "latest", "old-marker", "old-files")


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 1000), float(step)), "b": torch.full((), float(step))}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, where: Callable[..., bool]) -> None:
    """Die before a call of `owner.name` whose arguments fit."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        if where(*arguments):
            die()
        return original(*arguments, **named)

    setattr(owner, name, patched)


def arm(point: str) -> None:
    """At this point of a save the process will be killed."""
    if point == "data":
        before(checkpoint_files._HashedFile, "write", lambda file, data: file.count > 1000)
    elif point == "metadata":
        before(checkpoint_files.Writer, "finish", lambda *a: True)
    elif point == "marker":
        before(checkpoint, "write_text", lambda path, text: path.name == "complete.json")
    elif point == "marker-rename":
        before(Path, "replace", lambda path, to: to.name == "complete.json")
    elif point == "latest":
        before(checkpoint, "write_text", lambda path, text: path.name == "latest")
    elif point == "old-marker":
        before(Path, "unlink", lambda path: path.name == "complete.json")
    elif point == "old-files":
        before(shutil, "rmtree", lambda path: True)


def save_until_killed(folder: Path, keep: int, point: str) -> None:
    checkpoints = Checkpoints(folder, keep, say=lambda line: None)
    if point.isdigit():
        delay = int(point) / 1000
        threading.Thread(target=lambda: (time.sleep(delay), die()), daemon=True).start()
    saved = checkpoints.newest()
    first = 1 if saved is None else saved.step + 1
    for step in range(first, first + 1000):
        if step == KILLED_AT and not point.isdigit():
            checkpoints.wait()
            arm(point)
        checkpoints.save(step, tensors(step), {"step": step})
        print(step, flush=True)  # the earlier step is complete
        time.sleep(0.01)


def main() -> None:
    folder, keep = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for point in sys.argv[3:]:
        name = "timed" if point.isdigit() else point
        child = os.fork()
        if child == 0:
            with (folder / f"{name}.log").open("a") as log:
                os.dup2(log.fileno(), sys.stdout.fileno())
                save_until_killed(folder / name, keep, point)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"{point} was not killed")
        check(folder / name, name)


def check(folder: Path, name: str) -> None:
    """What is loaded is what was saved, and no older than the last step that was said to be complete."""
    checkpoints = Checkpoints(folder, say=lambda line: None)
    saved = checkpoints.newest()
    said = [int(line) for line in (folder.parent / f"{name}.log").read_text().split()]
    if saved is None:
        if said and said[-1] > 1:
            sys.exit(f"{name}: nothing is left, though step {said[-1] - 1} was complete")
        return
    found = {key: torch.zeros_like(value) for key, value in tensors(0).items()}
    saved.read(found)
    if any(not torch.equal(found[key], value) for key, value in tensors(saved.step).items()):
        sys.exit(f"{name}: step {saved.step} has other values than were saved")
    if saved.step < said[-1] - 1 or saved.note != {"step": saved.step}:
        sys.exit(f"{name}: step {saved.step} was loaded, and {said[-1] - 1} was complete")
    print(name, saved.step)


if __name__ == "__main__":
    main()

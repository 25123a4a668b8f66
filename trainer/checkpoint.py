"""A folder of checkpoints: written in the background, complete or skipped, and always one that loads.

    checkpoints/latest                      "step-00000200": moves only after the whole was verified
    checkpoints/step-00000200/__0_0.distcp  one file a rank (DCP), and `.metadata`
    checkpoints/step-00000200/complete.json last: step, the caller's note, and bytes and hash of each file

A folder without `complete.json` is a save that was cut off: it is skipped, and removed by the next save.
Source: spec/faults.md F12, S11; DESIGN rules 2, 10.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save

from trainer.checkpoint_files import (
    METADATA,
    CheckpointError,
    Entry,
    FileNote,
    Reader,
    Writer,
    file_note,
    save_planner,
    sync_folder,
    write_text,
)

COMPLETE, LATEST, ASIDE = "complete.json", "latest", "set-aside-"
_NAME = re.compile(r"step-(\d{8,})")
_PRUNING = threading.Lock()  # folders that belong together are written by threads of one process
T = TypeVar("T")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint. note: what the caller stored beside the tensors, as JSON has it."""

    path: Path
    step: int
    note: Mapping[str, Any]
    files: Mapping[str, FileNote]

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.path)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Shape and dtype of every tensor."""
        return self.reader.entries()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def damage(self, part: int = 0, parts: int = 1) -> list[str]:
        """A line for each file that is not what it was when it was written. Reads every `parts`-th file."""
        faults = []
        for name, wanted in sorted(self.files.items())[part::parts]:
            path = self.path / name
            if not path.is_file():
                faults.append(f"{path} is gone")
            elif (size := path.stat().st_size) != wanted.bytes:
                faults.append(f"{path} has {size:,} bytes of {wanted.bytes:,}")
            elif file_note(path) != wanted:
                faults.append(f"{path} is damaged: its bytes have changed since it was written")
        return faults

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, plain or sharded over any number of ranks; see `Reader.read`."""
        self.reader.read(tensors)


def read_saved(path: Path) -> Saved | None:
    """The checkpoint of a folder, None where its save was cut off; CheckpointError on a damaged one."""
    marker = path / COMPLETE
    if not marker.is_file():
        return None
    try:
        found = json.loads(marker.read_text("utf-8"))
        content = found["content"]
        if found["xxh3"] != _digest(content):
            raise ValueError("hash")
        files = {name: FileNote(**value) for name, value in content["files"].items()}
        return Saved(path, int(content["step"]), content["note"], files)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{marker} is damaged{_earlier(path)}") from None


def list_steps(folder: Path) -> tuple[list[int], list[Path]]:
    """Steps of the complete checkpoints, ascending, and the folders of saves that were cut off."""
    complete, cut = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and (match := _NAME.fullmatch(path.name)):
            if (path / COMPLETE).is_file():
                complete.append(int(match[1]))
            else:
                cut.append(path)
    return sorted(complete), cut


def find(folder: Path, step: int | None, say: Callable[[str], None]) -> Saved | None:
    """The checkpoint of a step, the newest complete one if None; None where there is none at all.

    Says what was skipped and what was chosen. Raises CheckpointError when the step is not there, or when
    the newest one is gone or cut off that `latest` names: older state is never taken unasked.
    """
    complete, cut = list_steps(folder)
    for path in cut:
        say(f"{path} is skipped: its save was cut off")
    there = ", ".join(map(str, complete)) or "none"
    if step is not None:
        if step not in complete:
            raise CheckpointError(f"{folder} has no complete checkpoint of step {step}: there are {there}")
        say(f"step {step} of {folder}, as asked; complete are {there}")
        return read_saved(folder / folder_name(step))
    latest = _latest(folder)
    if latest is not None and (not complete or complete[-1] < latest):
        raise CheckpointError(
            f"{folder / LATEST} names step {latest}, which is not complete or gone; complete are {there}"
            + (f": give --step {complete[-1]} to go on from there" if complete else "")
        )
    if not complete:
        say(f"{folder} has no complete checkpoint")
        return None
    say(f"step {complete[-1]} of {folder}, the newest complete one; complete are {there}")
    return read_saved(folder / folder_name(complete[-1]))


def check_bytes(saved: Saved, faults: list[str]) -> None:
    """Raises CheckpointError for the first of `faults` that `Saved.damage` found."""
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise CheckpointError(f"{faults[0]}{more}{_earlier(saved.path)}")


def _latest(folder: Path) -> int | None:
    path = folder / LATEST
    if not path.is_file():
        return None
    match = _NAME.fullmatch(path.read_text("utf-8").strip())
    if match is None:
        raise CheckpointError(f"{path} names no checkpoint: remove it, and the newest complete one is taken")
    return int(match[1])


def _earlier(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    before = [s for s in list_steps(path.parent)[0] if match is None or s < int(match[1])]
    if not before:
        return ": restore it from a copy; there is no earlier checkpoint"
    return f": restore it from a copy, or give --step {before[-1]} to go on from the checkpoint before it"


def _digest(content: object) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run in a folder that all ranks share. Every method is called by all ranks.

    keep: complete ones that stay; the newest always does. wait_s: how long a save may take, after which the
    run ends with an error. say: told what was chosen, skipped and removed (first rank only). beside: folders
    of the same run without which a step is of no use; what stays is the newest `keep` that all of them have.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        wait_s: float = 1800.0,
        say: Callable[[str], None] = print,
        beside: Sequence[Path] = (),
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"{folder}: keep at least 1 checkpoint, not {keep}")
        self.folder, self.keep, self.wait_s = folder, keep, wait_s
        self.together = {folder, *beside}
        self._group: Any = None
        if dist.is_initialized():
            # A group of its own: the background save must not share one with the training step.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self.rank = dist.get_rank() if self._group is not None else 0
        self.world = dist.get_world_size() if self._group is not None else 1
        self._say = say if self.rank == 0 else lambda line: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
        """Copy tensors to host memory and write them in the background; the earlier save is joined first.

        tensors: by name, plain ones equal on all ranks, or sharded. note: for JSON. A step that is complete
        already is not written again. Raises CheckpointError: that of the earlier save, or when later
        checkpoints exist (`rewind` sets them aside).
        """
        self.wait()
        if not self._first(lambda: self._prepare(step)):
            return
        writer = Writer(self.folder / folder_name(step))
        upload = async_save(
            dict(tensors),
            storage_writer=writer,
            planner=save_planner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        written = cast("Future[object]", upload)
        self._pending = step, self._thread.submit(self._finish, step, written, writer, dict(note))

    def wait(self) -> None:
        """Until the save in flight is complete. Raises CheckpointError if it failed or takes too long."""
        if self._pending is None:
            return
        (step, done), self._pending = self._pending, None
        try:
            done.result(self.wait_s)
        except TimeoutError:
            path = self.folder / folder_name(step)
            raise CheckpointError(
                f"{path} is not complete after {self.wait_s:g} s: is the disk slow or full?"
            ) from None

    def close(self) -> None:
        """Join the save in flight, and give up the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def newest(self) -> Saved | None:
        """The newest complete checkpoint, every byte checked; None where there is none. See `find`."""
        return self._found(None)

    def at(self, step: int) -> Saved:
        """The checkpoint of a step, every byte checked. See `find`."""
        saved = self._found(step)
        assert saved is not None
        return saved

    def rewind(self, step: int) -> None:
        """Go on from an earlier step: later checkpoints are set aside by name, not removed. 0: all."""
        self.wait()
        self._first(lambda: self._rewind(step))

    def _found(self, step: int | None) -> Saved | None:
        self.wait()

        def chosen() -> int | None:
            saved = find(self.folder, step, self._say)
            return None if saved is None else saved.step

        number = self._first(chosen)
        saved = None if number is None else read_saved(self.folder / folder_name(number))
        if number is not None and saved is None:
            raise CheckpointError(f"rank {self.rank} does not see {self.folder}: all ranks need one disk")
        if saved is not None:
            faults = self._gathered(saved.damage(self.rank, self.world))
            check_bytes(saved, [line for lines in faults for line in lines])
        return saved

    def _prepare(self, step: int) -> bool:
        """Removes saves that were cut off. Is there something to write?"""
        complete, cut = list_steps(self.folder)
        if complete and step < complete[-1]:
            raise CheckpointError(
                f"{self.folder} has step {complete[-1]}, later than {step}: give --step to go back to one"
            )
        for path in cut:
            self._say(f"{path} is removed: its save was cut off")
            shutil.rmtree(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        return not complete or step > complete[-1]

    def _finish(self, step: int, written: Future[object], writer: Writer, note: dict[str, Any]) -> None:
        """In the background, on every rank: after DCP has written, read back, then publish."""
        path = self.folder / folder_name(step)
        try:
            written.result()
            parts = self._gathered(writer.read_back())
        except CheckpointException as error:  # no Exception: DCP tells what each rank raised
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{path} was not written (rank {rank}: {_line(cause)})") from error
        except RuntimeError as error:  # gloo: a rank is gone
            raise CheckpointError(f"{path} was not written: {_line(error)}") from error
        faults = [line for _, lines in parts for line in lines]
        if faults:
            raise CheckpointError(f"{faults[0]}: {path} is not complete; is the disk sound?")
        files = {name: note for notes, _ in parts for name, note in notes.items()}
        self._first(lambda: self._publish(Saved(path, step, note, files)))

    def _publish(self, saved: Saved) -> None:
        """The marker, then `latest`, then old ones go: a kill between any two leaves one that loads."""
        there = {p.name: p.stat().st_size for p in saved.path.iterdir()}
        wanted = {name: file.bytes for name, file in saved.files.items()}
        short = [n for n, end in saved.reader.lengths().items() if wanted.get(n, 0) < end]
        if there != wanted or METADATA not in wanted or short:
            odd = sorted(short) or sorted(n for n in there.keys() | wanted if there.get(n) != wanted.get(n))
            raise CheckpointError(f"{saved.path} is not complete: {', '.join(odd[:3])}")
        content = {
            "step": saved.step,
            "note": saved.note,
            "files": {name: asdict(file) for name, file in sorted(saved.files.items())},
        }
        content = json.loads(json.dumps(content))  # as a reader will have it
        sync_folder(saved.path)
        marker = {"content": content, "xxh3": _digest(content)}
        write_text(saved.path / COMPLETE, json.dumps(marker, indent=1) + "\n")
        sync_folder(self.folder)
        write_text(self.folder / LATEST, f"{saved.path.name}\n")
        self._prune()

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` steps that all folders have."""
        with _PRUNING:
            there = {folder: list_steps(folder)[0] for folder in self.together}
            common = sorted(set.intersection(*map(set, there.values())))[-self.keep :]
            if len(common) < self.keep:
                return
            for path in (f / folder_name(s) for f, steps in there.items() for s in steps if s < common[0]):
                (path / COMPLETE).unlink()  # first: one that is half removed is no checkpoint
                shutil.rmtree(path)

    def _rewind(self, step: int) -> None:
        complete, _ = list_steps(self.folder)
        if step and step not in complete:
            raise CheckpointError(f"{self.folder} has no complete checkpoint of step {step}")
        if step:
            write_text(self.folder / LATEST, f"{folder_name(step)}\n")
        else:
            (self.folder / LATEST).unlink(missing_ok=True)
        for later in (s for s in complete if s > step):
            aside = self._aside(folder_name(later))
            (self.folder / folder_name(later)).rename(aside)
            self._say(f"step {later} is set aside as {aside}: remove it when it is not needed")
        sync_folder(self.folder)

    def _aside(self, name: str) -> Path:
        """A name that nothing has: who goes back twice keeps both ways on."""
        later = (self.folder / f"{ASIDE}{name}-{k}" for k in itertools.count(2))
        return next(p for p in itertools.chain([self.folder / f"{ASIDE}{name}"], later) if not p.exists())

    def _first(self, work: Callable[[], T]) -> T:
        """What the first rank finds, on every rank; what it raises, too."""
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.rank == 0:
            try:
                answer[0] = work()
            except (CheckpointError, OSError) as error:
                failure, answer[1] = error, _line(error)
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise CheckpointError(answer[1]) from failure
        return cast(T, answer[0])

    def _gathered(self, value: T) -> list[T]:
        """The values of all ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__

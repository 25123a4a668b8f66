"""The files of one checkpoint: written by DCP with a hash of every byte, read back, read tensor by tensor.

A checkpoint is a flat mapping of names to tensors, sharded or not. Each rank writes one file, and the first
one `.metadata`, which says where each piece of each tensor lies; so any number of ranks can read them.
Source: spec/faults.md F12, S11; DESIGN rule 2.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from schemas.errors import UserError

METADATA = ".metadata"
_READ = 16 << 20


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or used; one line."""


@dataclass(frozen=True)
class FileNote:
    """What a file must be: its bytes, and xxh3 of them in hexadecimal."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def file_note(path: Path) -> FileNote:
    """Of a file as it lies on the disk: what the page cache holds of it is dropped first, where one can."""
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_READ):
            digest.update(block)
            size += len(block)
    return FileNote(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A small file that is there whole or not at all; it replaces the one of its name."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


class _HashedFile(io.BufferedWriter):
    """Counts and hashes what is written through it, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), 1 << 20)
        self.digest, self.count = xxhash.xxh3_64(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        done = super().write(data)
        self.count += done
        return done


class _HashingFiles(FileSystem):
    """notes: by name, what each file must be, from the bytes on their way to it."""

    def __init__(self) -> None:
        self.notes: dict[str, FileNote] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashedFile(Path(path)) as file:
            yield file
        self.notes[Path(path).name] = FileNote(file.count, file.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.notes[Path(new_path).name] = self.notes.pop(Path(path).name)


class Writer(FileSystemWriter):
    """One file a rank, flushed to the disk, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs: _HashingFiles = _HashingFiles()

    def read_back(self) -> tuple[dict[str, FileNote], list[str]]:
        """The files that this rank wrote, and a line for each that reads otherwise than it was written."""
        folder, faults = Path(self.path), []
        for name, wanted in self.fs.notes.items():
            try:
                found = file_note(folder / name)
            except OSError as error:
                faults.append(f"{folder / name}: {error.strerror}")
                continue
            if found != wanted:
                faults.append(f"{folder / name} reads otherwise than it was written")
        return dict(self.fs.notes), faults


def save_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class Reader(FileSystemReader):
    """Reads `.metadata` once: at full size on 64 ranks it lists some 300,000 pieces."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def entries(self) -> dict[str, Entry]:
        """Every tensor by its name."""
        found: dict[str, Entry] = {}
        for name, value in self.read_metadata().state_dict_metadata.items():
            if not isinstance(value, TensorStorageMetadata):
                raise CheckpointError(f"{self.path}: {name} is no tensor: this project writes nothing else")
            found[name] = Entry(tuple(value.size), value.properties.dtype)
        return found

    def lengths(self) -> dict[str, int]:
        """Of each file with tensors, how many bytes `.metadata` refers to."""
        ends: dict[str, int] = {}
        for info in (self.read_metadata().storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        return ends

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, each with what has its name; a sharded one takes its own piece.

        Needs no process group and no other rank. Reads one piece at a time, so nothing is held twice.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # wanted, see above
            load(dict(tensors), storage_reader=self, planner=planner, no_dist=True)

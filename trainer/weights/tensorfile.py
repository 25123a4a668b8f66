"""A safetensors file, without mapping it: the header first, then `pread`, one tensor at a time.

A map of a 34.9 GB file fails on a machine with 24 GB (the library maps it writable and private), so nothing
here maps. A file is checked whole before any tensor is read: its header, that the tensors fill it without gap
or overlap, and its size. Source: spec/worldplay2.md i.1, n.9.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schemas.errors import UserError

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")
_MOST_HEADER = 100_000_000  # as the format says; that of an expert has 140 kB
_BLOCK = 4 << 20
"""Zeros are left out of a written file in blocks of this many bytes."""

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsError(UserError):
    """A file of weights that cannot be used; one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: bytes [start, stop) of a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a file, by name. Raises WeightsError on a pickled, truncated or damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if path.suffix in PICKLED or start.startswith(_PICKLE_MAGIC):
            raise WeightsError(
                f"{path} is a pickle, and opening one runs what it holds: save it as safetensors first"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise WeightsError(f"{path} is no safetensors file, or ends in its header: fetch it again")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
    except ValueError:
        raise WeightsError(f"{path} has a damaged header: fetch it again") from None
    if not isinstance(header, dict):
        raise WeightsError(f"{path} has a damaged header: fetch it again")
    header.pop("__metadata__", None)
    entries = [_entry(path, name, value, 8 + length) for name, value in header.items()]
    _check_places(path, entries, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _entry(path: Path, name: str, value: object, base: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
            dtype in DTYPES and all(isinstance(n, int) and n >= 0 for n in shape)
        ):
            entry = Entry(path, name, DTYPES[dtype], tuple(shape), base + start, base + stop)
            if entry.bytes == entry.numel * entry.dtype.itemsize:
                return entry
            raise WeightsError(
                f"{path}: {name} is {shape} of {dtype}, but has {entry.bytes} bytes: fetch it again"
            )
        case {"dtype": str(dtype)} if dtype not in DTYPES:
            raise WeightsError(f"{path}: {name} is of type {dtype}; known are {', '.join(DTYPES)}")
    raise WeightsError(f"{path}: the header's entry of {name} is damaged: fetch it again")


def _check_places(path: Path, entries: list[Entry], base: int, size: int) -> None:
    at = base
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != at:
            raise WeightsError(f"{path}: {entry.name} does not begin where the tensor before it ends")
        at = entry.stop
    if at > size:
        raise WeightsError(f"{path} is cut short: {size:,} bytes of {at:,}; fetch it again")
    if at < size:
        raise WeightsError(f"{path} has {size - at:,} bytes behind its last tensor: fetch it again")


def read_tensor(entry: Entry) -> Tensor:
    """One tensor on the CPU, in memory of its own. Raises WeightsError when the file ends before it does."""
    if not entry.numel:
        return torch.empty(entry.shape, dtype=entry.dtype)
    buffer = bytearray(entry.bytes)
    view = memoryview(buffer)
    descriptor = os.open(entry.path, os.O_RDONLY)
    try:
        done = 0
        while done < entry.bytes:
            got = os.preadv(descriptor, [view[done : done + (1 << 30)]], entry.start + done)
            if not got:
                raise WeightsError(f"{entry.path} is cut short in {entry.name}: fetch it again")
            done += got
        # Read once: what stays in the page cache would only push out what is needed.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, entry.start, entry.bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return torch.frombuffer(buffer, dtype=entry.dtype).reshape(entry.shape)


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """A file of tensors that come one at a time, in the order of `shapes`; there when it is whole.

    Blocks of zeros become holes of the file, so a file of zeros takes no room.
    Raises WeightsError when a tensor comes in another order, shape or dtype, or the file is there already.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with _published(path) as descriptor:
        _write_at(descriptor, len(raw).to_bytes(8, "little") + raw, 0)
        place, awaited = 8 + len(raw), iter(shapes.items())
        os.ftruncate(descriptor, place + at)
        for name, tensor in tensors:
            if (name, tuple(tensor.shape)) != (wanted := next(awaited, None)) or tensor.dtype != dtype:
                raise WeightsError(f"{path}: {name} {list(tensor.shape)} came where {wanted} belongs")
            place = _write_sparse(descriptor, tensor, place)
        if (wanted := next(awaited, None)) is not None:
            raise WeightsError(f"{path}: {wanted[0]} never came")


@contextmanager
def _published(path: Path) -> Iterator[int]:
    """A descriptor of a new file that gets its name when it is whole and on the disk."""
    if path.exists():
        raise WeightsError(f"{path} is there already: remove it, or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for every try: what a kill left behind is overwritten.
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    try:
        yield descriptor
        os.fsync(descriptor)
        partial.rename(path)
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)


def _write_sparse(descriptor: int, tensor: Tensor, place: int) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for block in torch.split(flat, _BLOCK):
        if block.any():
            _write_at(descriptor, memoryview(block.numpy().data), place)
        place += len(block)
    return place


def _write_at(descriptor: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, place)
        view, place = view[done:], place + done

"""A folder at any fsspec URL: reads, and writes that are either complete or absent.

Local files are written under a temporary name, flushed to disk and renamed; on object stores one PUT (or
one completed multipart upload) makes the object visible. Source: DESIGN rule 2; spec/faults.md S11.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from schemas.errors import UserError

TEMPORARY = ".tmp"
"""Folder of a local store that holds files on their way to their names."""
_COPY_BYTES = 1 << 20


class StoreError(UserError, OSError):
    """A file of a store that cannot be read or written, in one line."""


@dataclass(frozen=True, slots=True)
class Stat:
    """path relative to the store; size in bytes; version: changes when the content does (mtime or ETag)."""

    path: str
    size: int
    version: str


@dataclass(frozen=True)
class Store:
    """A root folder given as a local path or an fsspec URL (`s3://bucket/corpus`). Paths inside are posix
    and relative. Picklable: the file system is opened on first use in each process.
    `options` are keyword arguments of the fsspec file system (endpoint, credentials)."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "://" not in self.url:
            object.__setattr__(self, "url", str(Path(self.url).absolute()))

    @property
    def fs(self) -> Any:
        return fsspec.url_to_fs(self.url, **self.options)[0]  # fsspec caches instances by arguments

    @property
    def root(self) -> str:
        return str(fsspec.url_to_fs(self.url, **self.options)[1]).rstrip("/")

    @property
    def is_local(self) -> bool:
        return "://" not in self.url or self.url.startswith("file://")

    def full(self, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise StoreError(f"path {path!r} leaves the store {self.url}")
        return f"{self.root}/{path}" if path else self.root

    # --- reading ---

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.full(path)))

    def size(self, path: str) -> int | None:
        """Size in bytes, or None when there is no such file."""
        if self.is_local:
            try:
                return Path(self.full(path)).stat().st_size
            except FileNotFoundError:
                return None
        try:
            return int(self.fs.size(self.full(path)))
        except FileNotFoundError:
            return None

    def open(self, path: str) -> BinaryIO:
        try:
            return cast(BinaryIO, self.fs.open(self.full(path), "rb"))
        except FileNotFoundError:
            raise StoreError(f"{path} is missing from {self.url}") from None
        except OSError as error:
            raise StoreError(f"{path} of {self.url} cannot be read: {error.strerror or error}") from None

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """Bytes [offset, offset + size) of a file, or the rest of it; one ranged GET on an object store.
        Raises StoreError when the file is missing or shorter than that."""
        if self.is_local:
            with self.open(path) as f:
                f.seek(offset)
                data = f.read() if size is None else f.read(size)
        else:
            data = self._get(path, offset, None if size is None else offset + size)
        if size is not None and len(data) != size:
            raise StoreError(f"{path} ends {size - len(data)} bytes early (wanted {size} at {offset})")
        return data

    def _get(self, path: str, start: int, end: int | None) -> bytes:
        if start == end:
            return b""
        try:
            return bytes(self.fs.cat_file(self.full(path), start=start or None, end=end))
        except FileNotFoundError:
            raise StoreError(f"{path} is missing from {self.url}") from None
        except OSError:  # a range that starts behind the end is an error of its own there
            if start < (self.size(path) or 0):
                raise
            return b""

    @contextlib.contextmanager
    def local(self, path: str) -> Iterator[Path]:
        """A local path with this file's content: the file itself, or a copy that is removed afterwards."""
        if not self.exists(path):
            raise StoreError(f"{path} is missing from {self.url}")
        if self.is_local:
            yield Path(self.full(path))
            return
        with tempfile.TemporaryDirectory(prefix="wp2-") as folder:
            copy = Path(folder) / PurePosixPath(path).name
            self.fs.get_file(self.full(path), str(copy))
            yield copy

    def table(self, path: str, remedy: str, **how: Any) -> pa.Table:
        """A Parquet file (arguments as for `pyarrow.parquet.read_table`). Raises StoreError, with what to do
        about it, when it is none."""
        data = self.read(path)
        try:
            return pq.read_table(io.BytesIO(data), **how)
        except (pa.ArrowInvalid, OSError):
            raise StoreError(f"{path} of {self.url} is damaged: {remedy}") from None

    def list(self, prefix: str = "") -> list[Stat]:
        """Every file below a folder, sorted by path; temporaries are not listed."""
        if self.is_local:
            return sorted(self._walk(prefix), key=lambda s: s.path)
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.full(prefix), detail=True)
        except FileNotFoundError:
            return []
        cut = len(self.root) + 1
        stats = [
            Stat(name[cut:], int(info["size"]), str(info.get("ETag") or info.get("LastModified") or ""))
            for name, info in found.items()
            if not name[cut:].startswith(f"{TEMPORARY}/")
        ]
        return sorted(stats, key=lambda s: s.path)

    def _walk(self, prefix: str) -> Iterator[Stat]:
        # os.scandir: 710K files in seconds, where a general find() builds a dict per file.
        stack = [self.full(prefix)]
        while stack:
            folder = stack.pop()
            try:
                entries = os.scandir(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"folder {folder} cannot be listed: {error.strerror}") from None
            with entries:
                for entry in entries:
                    path = entry.path[len(self.root) + 1 :]
                    if _is_folder(entry):
                        if path != TEMPORARY:
                            stack.append(entry.path)
                    else:
                        yield _stat(entry, path)

    def arrow(self) -> tuple[pafs.FileSystem, str]:
        """The same folder as a pyarrow file system, for Parquet data sets."""
        if self.is_local:
            return pafs.LocalFileSystem(), self.root
        return pafs.PyFileSystem(pafs.FSSpecHandler(self.fs)), self.root

    # --- writing ---

    def write(self, path: str, data: bytes) -> None:
        """Publish bytes under a name: complete or not at all."""
        with _writing(path, self.url):
            if not self.is_local:
                self.fs.pipe_file(self.full(path), data)
                return
            with self._temporary(path) as temporary:
                temporary.write_bytes(data)

    def put(self, local: Path, path: str) -> None:
        """Publish a local file under a name: complete or not at all. The local file stays."""
        with _writing(path, self.url):
            if not self.is_local:
                self.fs.put_file(str(local), self.full(path))
                return
            with self._temporary(path) as temporary:
                shutil.copyfile(local, temporary)

    @contextlib.contextmanager
    def _temporary(self, path: str) -> Iterator[Path]:
        temporary = self.scratch(path)
        try:
            yield temporary
            self.publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def scratch(self, path: str) -> Path:
        """Where to write a large local file before `publish` gives it the name `path`. On a local store it
        lies in the store's folder of temporaries, so that publishing renames it and copies nothing."""
        if not self.is_local:
            handle, name = tempfile.mkstemp(prefix="wp2-")
            os.close(handle)
            return Path(name)
        folder = Path(self.full(TEMPORARY))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{os.getpid()}-{path.replace('/', '-')}"

    def publish(self, temporary: Path, path: str) -> None:
        """Give a finished `scratch` file its name, complete or not at all: flush and rename, or one PUT.
        The temporary is gone afterwards."""
        if not self.is_local:
            self.fs.put_file(str(temporary), self.full(path))
            temporary.unlink()
            return
        target = Path(self.full(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(target)

    def remove(self, path: str) -> None:
        self.fs.rm_file(self.full(path))

    def sweep(self) -> int:
        """Remove the temporaries that killed writers left; returns how many. For the sole writer only."""
        if not self.is_local:
            return 0
        left = [s.path for s in self._walk(TEMPORARY)]
        for path in left:
            Path(self.full(path)).unlink(missing_ok=True)
        return len(left)


@contextlib.contextmanager
def _writing(path: str, url: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written to {url}: {error.strerror or error}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def _stat(entry: os.DirEntry[str], path: str) -> Stat:
    """A file that cannot be looked at (a broken link) is listed all the same: reading it tells why."""
    try:
        info = entry.stat()
    except OSError as error:
        return Stat(path, 0, f"unreadable: {error.strerror}")
    return Stat(path, info.st_size, str(info.st_mtime_ns))


def sha256_file(path: Path) -> str:
    """sha256 of a local file, hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

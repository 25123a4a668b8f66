"""The bytes of a tar: a pure function of its members' names and contents.

POSIX pax format, stated in every call: mtime 0, uid and gid 0, no user names, mode 0644, regular files only.
A member is a header, its data, and zeros up to a multiple of 512; the tar ends with 1,024 zeros and nothing
else. Plain ustar would hold names of at most 100 characters, and the longest legal one is 96 + 12
(`<id>.actions.npy`); pax equals ustar byte for byte below 100 characters and 8 GiB, and has no limit above.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from pathlib import Path
from typing import BinaryIO, TypedDict

import xxhash

from schemas.errors import UserError

BLOCK = 512
END = bytes(2 * BLOCK)
CHUNK = 1 << 20


class ShardError(UserError, ValueError):
    """Samples that cannot be written as they are, in one line."""


class Member(TypedDict):
    """A member's data in its tar: schemas.sample.MEMBER as a dict."""

    name: str
    offset: int
    size: int
    xxh64: int


class Place(TypedDict):
    """A sample's bytes in its tar: schemas.sample.PLACE as a dict."""

    tar: str
    offset: int
    size: int
    members: list[Member]


def header(name: str, size: int) -> bytes:
    """The header of a member: 512 bytes, or 1,536 where the name or the size needs a pax record."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, 0, 0o644
    info.uid, info.gid, info.uname, info.gname = 0, 0, "", ""
    return info.tobuf(tarfile.PAX_FORMAT, "ascii", "strict")


def padding(size: int) -> int:
    """Zeros that follow a member's data."""
    return -size % BLOCK


def tar_path(family: str, partition: str, number: int) -> str:
    """Path of a tar in the corpus."""
    return f"shards/{family}/{partition}-{number:04d}.tar"


def tar_pattern(partition: str) -> re.Pattern[str]:
    """Matches the paths of a partition's tars, of every family."""
    return re.compile(rf"shards/[a-z]+/{re.escape(partition)}-\d{{4,}}\.tar")


class TarWriter:
    """Writes members to a file and hashes what it writes: one pass, one buffer."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self._file = file
        self._sha256 = hashlib.sha256()
        self._buffer = memoryview(bytearray(CHUNK))

    def add(self, name: str, content: bytes | Path) -> Member:
        """Append one member; a file is streamed. Raises ShardError when it changes size on the way."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        self._write(header(name, size))
        offset = self.size
        if isinstance(content, bytes):
            self._write(content)
            checksum = xxhash.xxh64_intdigest(content)
        else:
            checksum = self._stream(content)
        if self.size - offset != size:
            raise ShardError(
                f"member {name} had {size} bytes and gave {self.size - offset}: its file is in use"
            )
        self._write(bytes(padding(size)))
        return Member(name=name, offset=offset, size=size, xxh64=checksum)

    def finish(self) -> str:
        """Write the end mark; the sha256 of the whole tar, hex."""
        self._write(END)
        self._file.flush()
        return self._sha256.hexdigest()

    def _stream(self, path: Path) -> int:
        checksum = xxhash.xxh64()
        with path.open("rb", buffering=0) as source:
            while count := source.readinto(self._buffer):
                checksum.update(self._buffer[:count])
                self._write(self._buffer[:count])
        return checksum.intdigest()

    def _write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._file.write(data)
        self.size += len(data)

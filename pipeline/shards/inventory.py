"""The records that say what is published: one inventory a partition, one root a corpus.

Both are canonical JSON that carries its own sha256, so that a changed byte anywhere in them is seen.
Source: DESIGN rule 2.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.store import Store, StoreError
from schemas import SCHEMA_VERSION

ROOT = "index/root.json"
PARTITION_PATTERN = re.compile(r"[a-z0-9_-]{1,64}")
_CHUNK = 1 << 20

Record = TypeVar("Record", bound=BaseModel)


class FileEntry(BaseModel):
    """A published file: its path in the corpus, size and sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    bytes: int
    sha256: str


class Inventory(BaseModel):
    """What a partition consists of. Written last: a partition without one is not published.

    bare: sha256 of the index as the shard writer left it, before selection filled in its tiers. Tiers come
    and go; `identity` is of what stays.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    partition: str
    samples: int
    tars: tuple[FileEntry, ...]
    index: FileEntry
    bare: str

    @property
    def identity(self) -> str:
        """sha256 over the partition, its tars and its index, whatever the tiers in it."""
        kept = self.model_dump(mode="json", exclude={"index"})
        return hashlib.sha256(_canonical(kept)).hexdigest()

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return (*self.tars, self.index)


class Root(BaseModel):
    """Every inventory and every file beside the shards, and one hash that stands for all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    samples: int
    files: tuple[FileEntry, ...]
    root: str


def inventory_path(partition: str) -> str:
    return f"index/{partition}.json"


def index_path(partition: str) -> str:
    return f"index/{partition}.parquet"


def partition_names(paths: list[str], suffix: str) -> list[str]:
    """Partitions that have a file of this suffix directly under index/, sorted."""
    found = re.compile(rf"index/({PARTITION_PATTERN.pattern}){re.escape(suffix)}")
    return sorted(m[1] for p in paths if p != ROOT and (m := found.fullmatch(p)))


def root_hash(files: tuple[FileEntry, ...]) -> str:
    """sha256 over one line a file, sorted by path: path, size, sha256."""
    lines = sorted(f"{f.path} {f.bytes} {f.sha256}\n" for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode()


def seal(record: BaseModel) -> bytes:
    """Canonical JSON of a record with the sha256 of its other keys under `checksum`."""
    body = record.model_dump(mode="json")
    return _canonical({**body, "checksum": hashlib.sha256(_canonical(body)).hexdigest()})


def unseal(data: bytes, model: type[Record], path: str) -> Record:
    """The record behind sealed bytes. Raises StoreError when a byte of them is not as it was written."""
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        record = model.model_validate_json(json.dumps(body))
    except (ValueError, KeyError, AttributeError, TypeError, ValidationError):
        raise StoreError(f"{path} is not a sealed {model.__name__}; write it again") from None
    if hashlib.sha256(_canonical(body)).hexdigest() != checksum or seal(record) != data:
        raise StoreError(f"{path} does not match its own checksum; write it again")
    return record


def read_inventory(corpus: Store, partition: str) -> Inventory:
    """The inventory of a partition. Raises StoreError when it is missing, damaged or another partition's."""
    path = inventory_path(partition)
    inventory = unseal(corpus.read(path), Inventory, path)
    if inventory.partition != partition:
        raise StoreError(f"{path} is the inventory of {inventory.partition}; write it again")
    return inventory


def whole(corpus: Store, partition: str, sizes: Mapping[str, int] | None = None) -> bool:
    """Is the inventory of a partition sound, and every file that it names there with its size?

    Never raises for damage, and reads the inventory alone: content is `wp2 verify`'s to check.
    sizes: bytes by path of everything below shards/ and index/, from one listing, where many partitions are
        asked for; by default each file is looked up.
    """
    try:
        inventory = read_inventory(corpus, partition)
    except StoreError:  # missing or damaged: not whole, which is the answer
        return False
    found = corpus.size if sizes is None else sizes.get
    return all(found(entry.path) == entry.bytes for entry in inventory.files)


def file_entry(corpus: Store, path: str) -> FileEntry:
    """Size and sha256 of a file of the corpus, streamed."""
    digest, size = hashlib.sha256(), 0
    with corpus.open(path) as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())

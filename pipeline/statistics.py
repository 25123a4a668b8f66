"""Corpus-wide records (rotation rates, percentiles, fitted codecs): frozen, versioned, referenced by value.

    statistics/<kind>-v0003.json

A version is written once and never changes. Stages are given the newest by value, in their config, so what a
unit was made with is part of its receipt; a new version re-runs exactly the stages that were given the old.
Source: DESIGN rule 10.
"""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.store import Store, StoreError

FOLDER = "statistics"
_NAME = re.compile(rf"{FOLDER}/(?P<kind>[a-z_]+)-v(?P<version>\d{{4}})\.json")

Record = TypeVar("Record", bound=BaseModel)


def versions(corpus: Store, kind: str) -> list[int]:
    """Versions of a kind of record, in order."""
    found = (_NAME.fullmatch(s.path) for s in corpus.list(FOLDER))
    return sorted(int(m["version"]) for m in found if m and m["kind"] == kind)


def freeze(corpus: Store, kind: str, record: BaseModel) -> int:
    """Publish a record as the next version of its kind; returns the version."""
    version = max(versions(corpus, kind), default=0) + 1
    corpus.write(f"{FOLDER}/{kind}-v{version:04d}.json", (record.model_dump_json(indent=1) + "\n").encode())
    return version


def newest(corpus: Store, kind: str, record: type[Record]) -> Record | None:
    """The newest version of a kind of record; None when the corpus has none.

    Raises StoreError when the file is not such a record.
    """
    held = versions(corpus, kind)
    if not held:
        return None
    path = f"{FOLDER}/{kind}-v{held[-1]:04d}.json"
    try:
        return record.model_validate_json(corpus.read(path))
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise StoreError(f"{path} of {corpus.url} is no {record.__name__}: {what}; restore it") from None

"""Opening a corpus: is it one, is its schema ours, and is nobody else writing to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.store import Store
from schemas import SCHEMA_VERSION
from schemas.errors import UserError

MARKER = "corpus.json"


class CorpusError(UserError):
    """A folder that is no corpus, or one that cannot be used now."""


def open_corpus(url: str, options: dict[str, Any] | None = None, create: bool = False) -> Store:
    """The store of a corpus. With `create`, an empty or missing folder becomes one.

    Raises CorpusError for a folder that is none, or whose schema version is not ours.
    """
    store = Store(url, options or {})
    if not store.exists(MARKER):
        if not create:
            raise CorpusError(
                f"{url} is not a corpus (no {MARKER}): make one with `wp2 curate SOURCE --out {url}`"
            )
        if store.list():
            raise CorpusError(f"{url} holds other files and no {MARKER}: give an empty folder to --out")
        marker = {"kind": "wp2-corpus", "schema_version": SCHEMA_VERSION}
        store.write(MARKER, (json.dumps(marker, sort_keys=True) + "\n").encode())
        return store
    try:
        version = json.loads(store.read(MARKER))["schema_version"]
    except (ValueError, KeyError):
        raise CorpusError(f"{url}/{MARKER} is damaged: restore it from another copy of the corpus") from None
    if version != SCHEMA_VERSION:
        raise CorpusError(
            f"{url} has schema version {version}, this wp2 reads {SCHEMA_VERSION}: use its release"
        )
    return store


@contextlib.contextmanager
def sole_writer(corpus: Store) -> Iterator[None]:
    """Hold a local corpus for one driver; a killed driver's hold ends with it. Object stores have no such
    lock: running two drivers on one corpus there is the user's to avoid (docs/data-engineers.md)."""
    if not corpus.is_local:
        yield
        return
    path = Path(corpus.full(".lock"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            raise CorpusError(f"another run (pid {f.read().strip()}) is writing to {corpus.url}") from None
        f.seek(0)
        f.truncate()
        f.write(str(os.getpid()))
        f.flush()
        yield

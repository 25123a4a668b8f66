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
ROOT = "index/root.json"


class CorpusError(UserError):
    """A folder that is no corpus, or one that cannot be used now."""


def open_corpus(url: str, options: dict[str, Any] | None = None, create: bool = False) -> Store:
    """The store of a corpus. With `create`, an empty or missing folder becomes one.

    Raises CorpusError for a place that is none or cannot be used, or whose schema version is not ours.
    """
    store = Store(url, options or {})
    try:
        there = store.exists(MARKER)
    except (OSError, ValueError, ImportError) as error:
        raise CorpusError(f"{url} cannot be opened: {error}") from None
    if not there:
        if not create:
            raise CorpusError(
                f"{url} is not a corpus (no {MARKER}): make one with `wp2 curate SOURCE --out {url}`"
            )
        if store.is_local and Path(store.root).is_file():
            raise CorpusError(f"{url} is a file: give a folder to --out")
        if store.list():
            raise CorpusError(f"{url} holds other files and no {MARKER}: give an empty folder to --out")
        marker = {"kind": "wp2-corpus", "schema_version": SCHEMA_VERSION}
        store.write(MARKER, (json.dumps(marker, sort_keys=True) + "\n").encode())
        return store
    try:
        version = json.loads(store.read(MARKER))["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise CorpusError(f"{url}/{MARKER} is damaged: restore it from another copy of the corpus") from None
    if version != SCHEMA_VERSION:
        raise CorpusError(
            f"{url} has schema version {version}, this wp2 reads {SCHEMA_VERSION}: use its release"
        )
    return store


def keep_apart(source: Store, corpus: Store) -> None:
    """Refuse a corpus inside its source, whose own files would be found as clips, and the other way round."""
    a, b = f"{source.url.rstrip('/')}/", f"{corpus.url.rstrip('/')}/"
    if a.startswith(b) or b.startswith(a):
        raise CorpusError(f"the corpus {corpus.url} and the source {source.url} must not lie in one another")


def require_catalogue(corpus: Store) -> None:
    """Refuse a corpus that lost a generation of its catalogue: its clips would be taken for new ones."""
    if not corpus.exists(ROOT):
        return
    try:
        paths = [entry["path"] for entry in json.loads(corpus.read(ROOT))["files"]]
    except (ValueError, KeyError, TypeError):
        return  # `wp2 verify` names a damaged root; this run writes a new one
    for path in paths:
        if path.startswith("catalogue/") and not corpus.exists(path):
            raise CorpusError(
                f"{path} is missing from {corpus.url}: restore it from another copy of the corpus"
            )


@contextlib.contextmanager
def sole_writer(corpus: Store) -> Iterator[None]:
    """Hold a local corpus for one driver; a killed driver's hold ends with it. Object stores have no such
    lock: running two drivers on one corpus there is the user's to avoid (docs/data-engineers.md)."""
    if not corpus.is_local:
        yield
        return
    path = Path(corpus.full(".lock"))
    try:
        file = path.open("a+")
    except OSError as error:
        raise CorpusError(f"cannot write to {corpus.url}: {error.strerror}") from None
    with file as f:
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

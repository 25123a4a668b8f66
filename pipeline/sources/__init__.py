"""Sources: what lies in a folder of videos, or of gameplay recordings with their logs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pipeline.sources import folder, gameplay
from pipeline.sources.found import Discovery, Found, SourceConfig
from pipeline.sources.keymap import KeyMapError, SourceError
from pipeline.store import Store

__all__ = [
    "SOURCES",
    "Discovery",
    "Found",
    "KeyMapError",
    "SourceConfig",
    "SourceError",
    "discover",
    "open_source",
]

SOURCES = {"folder": folder.discover, "gameplay": gameplay.discover}
"""Kinds of source, and what lists each."""


def open_source(name: str, options: Mapping[str, Any]) -> tuple[str, Store]:
    """(kind, store) of a source named KIND:PATH_OR_URL. Raises SourceError in one line."""
    kind, _, url = name.partition(":")
    if kind not in SOURCES or not url:
        near = difflib.get_close_matches(kind, SOURCES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(SOURCES)}"
        raise SourceError(f"source {name!r} must be KIND:PATH_OR_URL; {hint}")
    store = Store(url, dict(options))
    if not store.exists(""):
        raise SourceError(f"source folder {url} does not exist")
    if store.fs.isfile(store.root):
        raise SourceError(f"source {url} is not a folder: name the folder that holds the videos")
    return kind, store


def discover(kind: str, source: Store, config: SourceConfig) -> Discovery:
    """List a source: every recording with its sidecars, and what was passed over. Reads no media.

    Raises SourceError when the key map is missing, wrong, or claims a recording twice.
    """
    return SOURCES[kind](source, config)

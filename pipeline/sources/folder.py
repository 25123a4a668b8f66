"""A folder of videos without logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from pipeline.sources.found import Discovery, Found, SourceConfig
from pipeline.store import Stat, Store
from schemas.clip import Perspective

VIDEO = {
    ".mp4",
    ".m4v",
    ".mov",
    ".mkv",
    ".webm",
    ".ts",
    ".m2ts",
    ".avi",
    ".mpg",
    ".mpeg",
    ".flv",
    ".wmv",
    ".gif",
}
AUDIO = {".mp3", ".m4a", ".aac", ".wav", ".flac", ".ogg"}
MEDIA = VIDEO | AUDIO
"""Suffixes taken as recordings. Audio is among them so that a mistaken file is refused with a reason, later,
and not passed over in silence."""


def discover(source: Store, config: SourceConfig) -> Discovery:
    """Every media file below the source as a recording without game or logs."""
    files, notes = listed(source)
    media, other = split(files)
    return Discovery(tuple(plain(s, config) for s in media), ignored(other), notes=notes)


def listed(source: Store) -> tuple[list[Stat], tuple[str, ...]]:
    """(files below a source, notes on those passed over): a name that is not UTF-8 fits no catalogue."""
    files, notes = [], []
    for stat in source.list():
        name = stat.path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        if name == stat.path:
            files.append(stat)
        else:
            notes.append(f"{name}: file name is not valid UTF-8: rename it")
    return files, tuple(notes)


def plain(stat: Stat, config: SourceConfig) -> Found:
    """A recording of which nothing is known but that it lies there."""
    return Found(stat.path, stat.size, stat.version, "", Perspective.UNKNOWN, config.licence)


def split(files: Sequence[Stat]) -> tuple[list[Stat], list[Stat]]:
    """(media files, other files), by suffix whatever its case."""
    media = [s for s in files if suffix(s.path) in MEDIA]
    return media, [s for s in files if suffix(s.path) not in MEDIA]


def ignored(files: Sequence[Stat]) -> dict[str, int]:
    """How many files of each suffix; "(none)" for files without one."""
    return dict(sorted(Counter(suffix(s.path) or "(none)" for s in files).items()))


def suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()

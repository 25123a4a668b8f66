"""A folder of gameplay recordings: videos, logs beside them, and a key map that says what the logs mean."""

from __future__ import annotations

from functools import lru_cache

import fsspec

from pipeline.sources import folder
from pipeline.sources.found import Discovery, Found, SourceConfig
from pipeline.sources.keymap import Entry, KeyMap, KeyMapError, beside, parse
from pipeline.stage import Unit
from pipeline.store import Stat, Store

KEY_MAP = "games.yaml"
NAMES_SHOWN = 4


def discover(source: Store, config: SourceConfig) -> Discovery:
    """Every media file below the source with its game and sidecars. A recording that no entry matches is kept
    without game and log."""
    key_map = read_key_map(source, config)
    files, unnamed = folder.listed(source)
    media, other = folder.split(files)
    by_path = {s.path: s for s in other}
    found = tuple(_found(s, key_map, config) for s in media)
    notes, used = list(unnamed), {}
    for f in found:
        for path in filter(None, (f.log, f.poses, f.events)):
            if path in by_path:
                used[path] = by_path[path]
            else:
                # A listing holds files only. A folder of that name can be on a local disk alone.
                there = source.is_local and source.exists(path)
                notes.append(f"{f.path}: {path} is {'not a file' if there else 'missing'}")
    notes += _idle(key_map, {f.entry for f in found})
    passed_over = folder.ignored([s for s in other if s.path not in used and s.path != KEY_MAP])
    return Discovery(found, passed_over, used, tuple(notes), key_map)


def read_key_map(source: Store, config: SourceConfig) -> KeyMap:
    """The key map at the configured path, or games.yaml in the source. Raises KeyMapError when it is missing
    or wrong."""
    name = config.key_map or f"{source.url}/{KEY_MAP}"
    try:
        if config.key_map:
            with fsspec.open(config.key_map, "rb") as f:
                data = bytes(f.read())
        else:
            data = source.read(KEY_MAP)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyMapError(
            f"cannot read the key map {name} ({error}): write one, or use kind folder"
        ) from None
    return _parse(text, name)


def entry_of(unit: Unit, config: SourceConfig) -> Entry:
    """What the key map says of a clip that has sidecars. Raises KeyMapError when no entry claims it."""
    found = read_key_map(unit.source, config).match(unit.clip.source_path)
    if found is None:
        raise KeyMapError(
            f"no entry of the key map claims {unit.clip.source_path} any more; scan the source again"
        )
    return found


def _idle(key_map: KeyMap, used: set[int]) -> list[str]:
    """One line on the entries that match no file, or none."""
    idle = [entry.game for i, entry in enumerate(key_map.games) if i not in used]
    if not idle:
        return []
    names = list(dict.fromkeys(idle))
    shown = [*names[:NAMES_SHOWN], "..."] if len(names) > NAMES_SHOWN else names
    return [f"key map: {len(idle)} of {len(key_map.games)} entries match no file ({', '.join(shown)})"]


@lru_cache(maxsize=8)
def _parse(text: str, name: str) -> KeyMap:
    # By content: a worker meets the same key map for every clip, and parsing YAML takes longer than reading.
    return parse(text, name)


def _found(stat: Stat, key_map: KeyMap, config: SourceConfig) -> Found:
    index = key_map.claim(stat.path)
    if index < 0:
        return folder.plain(stat, config)
    entry = key_map.games[index]
    return Found(
        stat.path,
        stat.size,
        stat.version,
        entry.game,
        entry.perspective,
        entry.licence or config.licence,
        log=beside(stat.path, entry.log.file) if entry.log else "",
        poses=beside(stat.path, entry.poses.file) if entry.poses else "",
        events=beside(stat.path, entry.events.file) if entry.events else "",
        entry=index,
        recording=entry.recording,
    )

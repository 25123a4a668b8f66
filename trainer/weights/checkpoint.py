"""What lies at a path that a user gives: experts, the files of each, and what they are.

Known: one file; a folder with one file or with an index of shards; a folder of two such experts, under the
names of Wan (`high_noise_model`, `low_noise_model`) or of diffusers (`transformer`, `transformer_2`).
Source: spec/worldplay2.md i.1, i.2.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Preset
from trainer.model.adapters import EXPERTS, FILE, INDEX, Contents, Found, Naming, recognise
from trainer.weights.tensorfile import PICKLED, Entry, WeightsError, read_header

SINGLE = "single"
PAIR = ("high", "low")


@dataclass(frozen=True)
class Expert:
    """One network on disk. entries: by our name. files: in order."""

    name: str
    path: Path
    files: tuple[Path, ...]
    found: Found
    entries: Mapping[str, Entry]

    @property
    def parameters(self) -> int:
        return sum(e.numel for e in self.entries.values())

    @property
    def bytes(self) -> int:
        """Of the tensors, without headers."""
        return sum(e.bytes for e in self.entries.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Tensors of each dtype."""
        counts = Counter(str(e.dtype).removeprefix("torch.") for e in self.entries.values())
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class Checkpoint:
    """experts: "high" and "low", or "single"."""

    path: Path
    experts: tuple[Expert, ...]

    def __post_init__(self) -> None:
        kinds = {(e.found.naming, e.found.contents, e.found.preset.name) for e in self.experts}
        if len(kinds) > 1:
            what = " and ".join(
                f"{e.name}: {e.found.contents.words}, {e.found.preset.name}" for e in self.experts
            )
            raise WeightsError(f"{self.path} has two experts of different kinds ({what})")

    @property
    def naming(self) -> Naming:
        return self.experts[0].found.naming

    @property
    def contents(self) -> Contents:
        return self.experts[0].found.contents

    @property
    def preset(self) -> Preset:
        return self.experts[0].found.preset


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads headers only, and checks every name and shape. Raises WeightsError or AdapterError."""
    if path.is_dir():
        for naming in Naming:
            folders = {name: path / f for name, f in zip(PAIR, EXPERTS[naming])}
            there = [f for f in folders.values() if f.is_dir()]
            if len(there) == 2:
                return Checkpoint(path, tuple(_expert(n, f) for n, f in folders.items()))
            if len(there) == 1 and not (path / FILE).is_file():
                absent = next(f for f in folders.values() if f not in there)
                raise WeightsError(
                    f"{path} has {there[0].name}, but not {absent.name}: a model has both experts"
                )
    return Checkpoint(path, (_expert(SINGLE, path),))


def _expert(name: str, path: Path) -> Expert:
    files = _files(path)
    entries: dict[str, Entry] = {}
    for file in files:
        for tensor, entry in read_header(file).items():
            if tensor in entries:
                raise WeightsError(f"{tensor} lies in {entries[tensor].path.name} and in {file}")
            entries[tensor] = entry
    if path.is_dir() and (path / INDEX).is_file():
        _check_index(path / INDEX, entries)
    found, table = recognise({n: e.shape for n, e in entries.items()}, str(path))
    return Expert(name, path, files, found, {ours: entries[theirs] for ours, theirs in table.items()})


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise WeightsError(f"{path} does not exist")
    if (path / FILE).is_file():
        return (path / FILE,)
    if not (path / INDEX).is_file():
        pickled = next((f for f in sorted(path.iterdir()) if f.suffix in PICKLED), None)
        why = f"; {pickled.name} is a pickle, which is not opened" if pickled else ""
        raise WeightsError(f"{path} holds neither {FILE} nor {INDEX}{why}")
    files = tuple(path / name for name in sorted(set(_index(path / INDEX).values())))
    for file in files:
        if not file.is_file():
            raise WeightsError(f"{path / INDEX} names {file.name}, which is not there: fetch it")
    return files


def _index(path: Path) -> dict[str, str]:
    """Tensor -> file of a sharded model."""
    try:
        table = json.loads(path.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise WeightsError(f"{path} is no index of shards: fetch it again") from None
    if not isinstance(table, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in table.values()
    ):
        raise WeightsError(f"{path} is no index of shards: fetch it again")
    return table


def _check_index(path: Path, entries: Mapping[str, Entry]) -> None:
    table = _index(path)
    for name in sorted(table.keys() | entries.keys()):
        lies = entries[name].path.name if name in entries else "no file"
        if table.get(name) != lies:
            raise WeightsError(f"{path}: {name} is said to lie in {table.get(name)}, and lies in {lies}")

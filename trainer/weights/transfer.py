"""Weights on the move: into a network, into another layout, against another checkpoint. One tensor at a time.

Source: spec/worldplay2.md b (start of the action module), c.1, i.1, n.9.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.config import ModelConfig
from trainer.model.action import ActionEncoder, ActionMlp
from trainer.model.adapters import (
    CONFIG,
    EXPERTS,
    FILE,
    Contents,
    Found,
    Naming,
    config_json,
    is_added,
    make_head,
    manifest,
    names,
)
from trainer.model.memory import MemoryCompressor
from trainer.model.wan import WanModel
from trainer.noise import keyed
from trainer.weights.checkpoint import PAIR, Checkpoint, Expert
from trainer.weights.tensorfile import WeightsError, read_tensor, write

Tick = Callable[[str, int], None]
"""Called after each tensor with the expert's name and the bytes it had."""

_COMPARED = 1 << 24  # elements compared at once: 64 MB in fp32


def load(
    expert: Expert, device: str = "cpu", dtype: torch.dtype = torch.float32, tick: Tick | None = None
) -> WanModel:
    """The network of an expert, ready to predict. Base weights are refused: they know no actions."""
    if expert.found.contents is Contents.BASE:
        raise WeightsError(
            f"{expert.path} has neither actions nor memory: add them by `wp2 weights convert --fresh SEED`"
        )
    with torch.device("meta"):
        model = WanModel(expert.found.model, make_head(expert.found))
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            parameter.copy_(read_tensor(expert.entries[name]))
            if tick:
                tick(expert.name, expert.entries[name].bytes)
    return model.eval().requires_grad_(False)


def save(models: Mapping[str, nn.Module], found: Found, folder: Path) -> None:
    """Networks in memory as a native checkpoint in bf16. models: "high" and "low", or "single"."""
    for expert, model in models.items():
        target = folder / folder_of(expert, Naming.NATIVE)
        write_expert(target, replace(found, naming=Naming.NATIVE), model.state_dict().__getitem__)


def convert(
    source: Checkpoint, folder: Path, naming: Naming, fresh: int | None = None, tick: Tick | None = None
) -> None:
    """Write a checkpoint in another layout, in bf16, beside a config.json for the loaders of others.

    fresh: seed of the actions and memory that are added to a base, which then predicts what it did without.
    Raises WeightsError when they are there already, AdapterError when the layout has no place for a tensor.
    """
    if fresh is not None and source.contents is not Contents.BASE:
        raise WeightsError(f"{source.path} has actions and memory already: leave --fresh out")
    contents = Contents.VELOCITY if fresh is not None else source.contents
    targets = {e.name: folder / folder_of(e.name, naming) for e in source.experts}
    names(
        replace(source.experts[0].found, naming=naming, contents=contents)
    )  # has the layout a place for all?
    for target in targets.values():
        if (target / FILE).exists():
            raise WeightsError(f"{target / FILE} is there already: remove it, or choose another folder")
    kinds = {e.name: replace(e.found, naming=naming, contents=contents) for e in source.experts}
    check_room(folder, sum(2 * math.prod(s) for found in kinds.values() for s in manifest(found).values()))
    for expert in source.experts:
        found = kinds[expert.name]
        added = _Fresh(found.preset.model, expert.name, fresh)

        def tensor(name: str, expert: Expert = expert, added: _Fresh = added) -> Tensor:
            entry = expert.entries.get(name)
            value = added.tensor(name) if entry is None else read_tensor(entry)
            if tick:
                tick(expert.name, value.numel() * value.element_size())
            return value

        write_expert(targets[expert.name], found, tensor)


def check_room(folder: Path, size: int) -> None:
    """Raises WeightsError where the disk of a folder that is to be made has less room."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise WeightsError(f"{folder} needs {size / 1e9:.1f} GB and its disk has {free / 1e9:.1f}: make room")


def folder_of(expert: str, naming: Naming) -> str:
    return dict(zip(PAIR, EXPERTS[naming])).get(expert, "")


def write_expert(folder: Path, found: Found, tensor: Callable[[str], Tensor]) -> None:
    shapes, table = manifest(found), names(found)
    order = sorted(table, key=lambda ours: table[ours])

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for ours in order:
            yield table[ours], tensor(ours).to(torch.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config_json(found), indent=2) + "\n")
    write(folder / FILE, {table[ours]: shapes[ours] for ours in order}, torch.bfloat16, tensors())


class _Fresh:
    """Actions and memory at their start, one part of the network at a time: 0.3 GB each at full size."""

    def __init__(self, config: ModelConfig, expert: str, seed: int | None) -> None:
        self._config, self._expert, self._seed = config, expert, seed
        self._part, self._state = "", dict[str, Tensor]()

    def tensor(self, name: str) -> Tensor:
        if self._seed is None or not is_added(name):
            raise WeightsError(f"nothing to draw for {name}")
        part = (
            name.partition("action_mlp.")[0] + "action_mlp."
            if "action_mlp." in name
            else name.split(".")[0] + "."
        )
        if part != self._part:
            self._part, self._state = part, self._drawn(part)
        return self._state[name.removeprefix(part)]

    def _drawn(self, part: str) -> dict[str, Tensor]:
        assert self._seed is not None
        config, generator = self._config, keyed(self._seed, self._expert, part)
        module: nn.Module
        if part == "action.":
            module = encoder = ActionEncoder(config.dim, config.action_hidden)
            encoder.init_weights(generator)
        elif part == "memory.":
            module = memory = MemoryCompressor(config.in_dim, config.dim, config.memory)
            memory.init_weights(generator)
        else:
            module = mlp = ActionMlp(config.dim)
            first, last = mlp[0], mlp[2]
            assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
            nn.init.xavier_uniform_(first.weight, generator=generator)
            for bias in (first.bias, last.bias):
                nn.init.zeros_(bias)
            mlp.init_weights()
        return {name: value.detach() for name, value in module.state_dict().items()}


@dataclass(frozen=True)
class Difference:
    """What two experts do not share, in our names. changed: name -> largest absolute difference.

    compared: tensors that both have in one shape; the equal ones are not in `changed`.
    """

    expert: str
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    changed: dict[str, float]
    compared: int

    @property
    def equal(self) -> bool:
        return not (self.only_left or self.only_right or self.shapes or self.changed)


def diff(left: Checkpoint, right: Checkpoint, tick: Tick | None = None) -> tuple[Difference, ...]:
    """Compare two checkpoints expert by expert, whatever their layouts. Raises WeightsError when they do not
    have the same experts."""
    if [e.name for e in left.experts] != [e.name for e in right.experts]:
        raise WeightsError(
            f"{left.path} has {len(left.experts)} experts and {right.path} {len(right.experts)}: "
            "compare those of one with those of the other"
        )
    return tuple(_diff(a, b, tick) for a, b in zip(left.experts, right.experts))


def _diff(left: Expert, right: Expert, tick: Tick | None) -> Difference:
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    changed: dict[str, float] = {}
    shared = sorted(left.entries.keys() & right.entries.keys())
    for name in shared:
        a, b = left.entries[name], right.entries[name]
        if a.shape != b.shape:
            shapes.append((name, a.shape, b.shape))
        else:
            distance = _distance(read_tensor(a), read_tensor(b))
            if distance != 0.0:
                changed[name] = distance
        if tick:
            tick(left.name, a.bytes)
    return Difference(
        left.name,
        tuple(sorted(left.entries.keys() - right.entries.keys())),
        tuple(sorted(right.entries.keys() - left.entries.keys())),
        tuple(shapes),
        changed,
        len(shared) - len(shapes),
    )


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where only one of two is a number."""
    largest = 0.0
    for x, y in zip(torch.split(a.flatten(), _COMPARED), torch.split(b.flatten(), _COMPARED)):
        x, y = x.float(), y.float()
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs()[~same]
        if apart.numel():
            largest = max(largest, float("inf") if bool(apart.isnan().any()) else float(apart.max()))
    return largest

"""From the checkpoints of a run to weights that others load: both experts, averages, bf16.

One tensor at a time: an expert of 17.5 B parameters never lies in memory as a whole. The heads of few-step
training become the two fused heads a block that the release has.
Source: spec/worldplay2.md f.2, i.1, i.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint import Saved
from trainer.checkpoint_files import CheckpointError
from trainer.config import PRESETS, Preset
from trainer.model.adapters import (
    FILE,
    Contents,
    Found,
    Naming,
    check,
    foreign_name,
    is_added,
    manifest,
)
from trainer.model.pdd_head import IntervalHead, compact_from_bank
from trainer.schedule import PddSchedule, schedule_of
from trainer.state import read_weight, weight_shapes
from trainer.weights.tensorfile import WeightsError, write
from trainer.weights.transfer import Tick, check_room, folder_of, write_expert

SCHEDULE = "schedule"
"""Key of a checkpoint's note that has the few-step schedule of its heads: the fields of `PddSchedule`."""
ADDITIONS = "worldplay2_additions.safetensors"
"""What diffusers has no place for, beside its own file; names as in the native layout."""


class Layout(StrEnum):
    """worldplay2: as the release, one folder an expert, names of Wan. diffusers: as WanTransformer3DModel,
    with actions and memory in a file of their own, because that network has no place for them."""

    WORLDPLAY2 = "worldplay2"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True)
class _Source:
    """One expert of a run, as the layout will have it."""

    saved: Saved
    average: bool
    found: Found
    heads: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        return self.heads[name] if name in self.heads else read_weight(self.saved, name, self.average)


def export(
    experts: Mapping[str, Saved],
    folder: Path,
    layout: Layout,
    *,
    average: bool = True,
    tick: Tick | None = None,
) -> None:
    """Write weights that `trainer.weights.open_checkpoint` opens. experts: "high" and "low", or "single".

    Raises CheckpointError when the experts do not belong together or their heads have another schedule than
    the layout stands for; AdapterError when tensors are missing or the layout has no place for their head;
    WeightsError when files are there already or the disk is too small.
    """
    naming = Naming.DIFFUSERS if layout is Layout.DIFFUSERS else Naming.NATIVE
    sources = {name: _source(name, saved, average, naming) for name, saved in experts.items()}
    if len({source.found for source in sources.values()}) != 1:
        kinds = ", ".join(
            f"{name} is {s.found.preset.name}, {s.found.contents.words}" for name, s in sources.items()
        )
        raise CheckpointError(f"the experts are of different kinds: {kinds}")
    preset = next(iter(sources.values())).found.preset
    if set(sources) != set(preset.experts):
        raise CheckpointError(f"{preset.name} has the experts {', '.join(preset.experts)}: give all of them")
    targets = {name: folder / folder_of(name, naming) for name in sources}
    for other in Naming:  # of either layout: a reader would take one of two
        for file in (folder / folder_of(name, other) / FILE for name in sources):
            if file.exists():
                raise WeightsError(f"{file} is there already: remove it, or choose another folder")
    check_room(folder, sum(2 * _numel(s.found) for s in sources.values()))
    for name, source in sources.items():
        read = _told(source, name, tick)
        if layout is Layout.WORLDPLAY2:
            write_expert(targets[name], source.found, read)
            continue
        base = Found(naming, Contents.BASE, source.found.preset)
        write_expert(targets[name], base, read)
        _write_additions(targets[name] / ADDITIONS, source.found, read)


def _source(expert: str, saved: Saved, average: bool, naming: Naming) -> _Source:
    shapes = weight_shapes(saved)
    preset = _preset(saved, shapes)
    if expert not in preset.experts:
        raise CheckpointError(f"{saved.path} is of {preset.name}, which has no expert {expert!r}")
    if "head.bank_weight" not in shapes:
        found = Found(Naming.NATIVE, Contents.VELOCITY, preset)
        check(shapes, manifest(found), f"the network of {saved.path}")
        return _Source(saved, average, found, {})
    if naming is Naming.DIFFUSERS:
        raise CheckpointError(
            f"{saved.path} has few-step heads, and diffusers has no place for them: use worldplay2"
        )
    bank = Found(Naming.NATIVE, Contents.BANK, preset, shapes["head.bank_weight"][0])
    check(shapes, manifest(bank), f"the network of {saved.path}")
    schedule = _schedule(saved, preset)
    blocks = schedule.blocks_of(expert)
    head = _bank(saved, preset, average, bank.heads)
    compact = {f"head.{n}": value for n, value in compact_from_bank(head, blocks).state_dict().items()}
    return _Source(saved, average, Found(Naming.NATIVE, Contents.COMPACT, preset, len(blocks)), compact)


def _preset(saved: Saved, shapes: Mapping[str, tuple[int, ...]]) -> Preset:
    width = shapes.get("patch_embedding.weight", (0,))[0]
    for preset in PRESETS.values():
        if preset.model.dim == width:
            return preset
    raise CheckpointError(f"{saved.path} has a network of width {width}, which no preset has")


def _schedule(saved: Saved, preset: Preset) -> PddSchedule:
    """The only one that the layout can stand for: the loaders of compact heads are told of no other."""
    meant = schedule_of(preset)
    trained = saved.note.get(SCHEDULE)
    if trained != asdict(meant):
        raise CheckpointError(
            f"{saved.path} has heads of the schedule {trained}, and the layout stands for {asdict(meant)}: "
            "train with that one to export"
        )
    return meant


def same_schedule(saved: Saved, schedule: PddSchedule) -> None:
    """Raises CheckpointError where the few-step heads of a checkpoint are of another schedule."""
    trained = saved.note.get(SCHEDULE)
    if trained != asdict(schedule):
        raise CheckpointError(
            f"{saved.path} has few-step heads of the schedule {trained}, this run has {asdict(schedule)}: "
            "one schedule serves start, rollout, replay and inference"
        )


def _bank(saved: Saved, preset: Preset, average: bool, heads: int) -> IntervalHead:
    head = IntervalHead(preset.model.dim, preset.model.patch_out, preset.model.eps, heads)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(read_weight(saved, f"head.{name}", average))
    return head


def expected_bytes(saved: Saved) -> int:
    """Of the weights of one expert, about: few-step heads become smaller."""
    return sum(2 * math.prod(shape) for shape in weight_shapes(saved).values())


def _numel(found: Found) -> int:
    return sum(math.prod(shape) for shape in manifest(found).values())


def _told(source: _Source, expert: str, tick: Tick | None) -> Callable[[str], Tensor]:
    def read(name: str) -> Tensor:
        value = source.tensor(name)
        if tick:
            tick(expert, 2 * value.numel())
        return value

    return read


def _write_additions(path: Path, found: Found, read: Callable[[str], Tensor]) -> None:
    names = {foreign_name(n, Naming.NATIVE): n for n in manifest(found) if is_added(n)}
    shapes = {theirs: manifest(found)[names[theirs]] for theirs in sorted(names)}
    write(path, shapes, torch.bfloat16, ((n, read(names[n]).bfloat16()) for n in shapes))

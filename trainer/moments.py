"""8-bit moments in a checkpoint, exactly.

torchao scales blocks of 256 elements, counted from the start of a rank's piece, and its largest negative code
stands for -0.993, not -1: quantised anew from their own values, 46 % of the blocks of a normal first moment
shrink by 0.7 %. So each piece is stored as it is, under the place of its first element in the whole tensor:

    KEY@0:codes, KEY@0:scale, KEY:map      a piece in 8 bits, flat; map: the 256 values of the codes
    KEY@8192:values                        a piece that is too small for blocks, fp32

The same shards get the same codes back; others are put together from the values, and quantised anew.
Source: spec/faults.md F3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.checkpoint import Saved
from trainer.checkpoint_files import CheckpointError, Entry
from trainer.parameters import local


def is_quantising(optimizer: Optimizer) -> bool:
    """Does an optimizer keep moments in 8 bits (those of torchao)?"""
    return hasattr(optimizer, "_new_buffer")


def new_moment(optimizer: Optimizer, parameter: Tensor, key: str) -> Tensor:
    """A moment of zeros as torchao keeps it for a parameter."""
    made: Tensor = optimizer._new_buffer(parameter, key == "exp_avg")  # type: ignore[attr-defined]
    return made  # only the first moment has a sign


def stored(key: str, moment: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold this rank's piece, by name; they share its memory."""
    piece, start = local(moment), _start(moment)
    if not piece.numel():
        return
    if is_traceable_wrapper_subclass(piece):
        yield f"{key}@{start}:codes", piece.codes.view(-1)
        yield f"{key}@{start}:scale", piece.scale
        yield f"{key}:map", piece.qmap
    else:
        yield f"{key}@{start}:values", piece.view(-1)


def restore(saved: Saved, prefix: str, key: str, moment: Tensor) -> None:
    """Fill a moment from what `stored` gave, on any number of ranks.

    prefix: of the names in the checkpoint. Raises CheckpointError when elements are missing.
    """
    own = {prefix + name: tensor for name, tensor in stored(key, moment) if name != f"{key}:map"}
    if all(_fits(saved.entries.get(name), tensor) for name, tensor in own.items()):
        saved.read(own)
        return
    piece, start = local(moment), _start(moment)
    values, filled = torch.empty(piece.numel()), 0
    for begin, name, length in _pieces(saved.entries, prefix + key):
        first, stop = max(begin, start), min(begin + length, start + piece.numel())
        if first < stop:
            found = _values(saved, prefix + key, begin, name)
            values[first - start : stop - start] = found[first - begin : stop - begin]
            filled += stop - first
    if filled != piece.numel():
        raise CheckpointError(f"{saved.path}: {prefix}{key} lacks {piece.numel() - filled} elements")
    piece.copy_(values.view(piece.shape).to(piece.device))


def _fits(entry: Entry | None, tensor: Tensor) -> bool:
    return entry is not None and (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype)


def _pieces(entries: Mapping[str, Entry], key: str) -> Iterator[tuple[int, str, int]]:
    """First element, name and length of each stored piece."""
    for name, entry in entries.items():
        if name.startswith(f"{key}@") and name.endswith((":codes", ":values")):
            yield int(name.removeprefix(f"{key}@").partition(":")[0]), name, math.prod(entry.shape)


def _values(saved: Saved, key: str, begin: int, name: str) -> Tensor:
    """fp32 [n] of one stored piece."""
    names = [name] if name.endswith(":values") else [name, f"{key}@{begin}:scale", f"{key}:map"]
    read = [torch.empty(saved.entries[n].shape, dtype=saved.entries[n].dtype) for n in names]
    saved.read(dict(zip(names, read)))
    if len(read) == 1:
        return read[0]
    codes, scale, table = read
    return (table[codes.int()].view(len(scale), -1) * scale[:, None]).view(-1)


def _start(tensor: Tensor) -> int:
    """Where this rank's piece begins in the whole, flat; pieces are cut along the first dimension."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * math.prod(tensor.shape[1:])

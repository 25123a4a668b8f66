"""What a step of training tells: one line of JSON each, always; TensorBoard where it is installed.

Rows are keyed by their step: a run that goes on from a checkpoint cuts the rows behind it, so that the file
of a run that was killed reads like that of one which was not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

METRICS, BOARD = "metrics.jsonl", "tensorboard"
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.94, 0.97, 1.0)
"""Bins of sigma. Shift 5 puts a third of all levels above 0.9, so the range of the high expert has three."""

# Dense bf16 FLOP/s of a device, by a part of its name; the first that fits. MFU is null on any other.
_PEAK = {
    "H20": 148e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "RTX PRO 6000": 504e12,
}


@dataclass(frozen=True)
class StepRecord:
    """One step of one expert. Means are over the whole batch, all ranks together.

    history: chunks of memory of all its samples. by_sigma: mean loss of the noise levels of each bin that has
    some. grad_norm: global, before clipping. mfu: None where the device's peak is not known. memory_gb: peak
    of the rank with most since this expert began or went on (device memory; on the CPU resident memory since
    the process began). data_wait_s: of the rank that waited longest. step_s: the whole step, without the save
    and the videos that may follow it. others_s_most, others_s_least: that a rank waited for other ranks where
    all meet, after the data and after the gradients, of the rank that waited longest and of the one that
    waited least. slow_rank: that last one, whose data or host the others waited for.
    """

    stage: str
    expert: str
    step: int
    loss: float
    history: int
    by_sigma: dict[str, float]
    grad_norm: float
    lr: float
    samples_per_s: float
    tokens_per_s: float
    mfu: float | None
    memory_gb: float
    data_wait_s: float
    step_s: float
    others_s_most: float
    others_s_least: float
    slow_rank: int

    def row(self) -> dict[str, Any]:
        """For JSON: five significant digits, and exact losses, so that two runs can be compared."""
        exact = ("loss", "grad_norm", "lr", "by_sigma")
        return {
            name: value if name in exact or not isinstance(value, float) else float(f"{value:.5g}")
            for name, value in vars(self).items()
        }

    def line(self) -> str:
        """For a terminal."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        return (
            f"loss {self.loss:.4g}, gradient {self.grad_norm:.3g}, lr {self.lr:.2g}, "
            f"{self.samples_per_s:.3g} clips/s{mfu}, {self.memory_gb:.1f} GB, "
            f"data {self.data_wait_s:.2f} of {self.step_s:.2f} s"
        )

    def scalars(self) -> Sequence[tuple[str, float]]:
        """For TensorBoard."""
        left_out = ("stage", "expert", "step", "history", "by_sigma", "mfu", "slow_rank")
        found = [(name, float(value)) for name, value in vars(self).items() if name not in left_out]
        found += [(f"loss_by_sigma/{name}", value) for name, value in self.by_sigma.items()]
        found += [(f"loss_by_history/{self.history}", self.loss)]
        return found if self.mfu is None else [*found, ("mfu", self.mfu)]


def by_sigma(sigma: Tensor, value: Tensor) -> dict[str, float]:
    """Mean of the losses `value` [n] in each bin of the levels `sigma` [n]; empty bins are left out."""
    edges = torch.tensor(EDGES[1:-1], dtype=sigma.dtype)
    places = torch.bucketize(sigma.cpu().flatten().contiguous(), edges, right=True)
    losses = value.cpu().double().flatten()
    return {
        f"{EDGES[k]:g}-{EDGES[k + 1]:g}": float(losses[places == k].mean())
        for k in sorted(set(places.tolist()))
    }


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    fits = [label for label in _PEAK if label in name]
    return _PEAK[max(fits, key=len)] if fits else None


def forget_peak(device: torch.device) -> None:
    """From here on `memory_gb` is that of what follows. Resident memory's peak cannot be set back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_gb(device: torch.device) -> float:
    """Peak of this process: of device memory since `forget_peak`, or of resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl in order. A last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Record(Protocol):
    """A row of a log."""

    @property
    def step(self) -> int: ...

    def row(self) -> dict[str, Any]: ...

    def line(self) -> str: ...

    def scalars(self) -> Sequence[tuple[str, float]]: ...


class MetricsLog:
    """Rows of one expert of one stage, from step `first` on. Only one process of a run may have it."""

    def __init__(self, folder: Path, first: int) -> None:
        self._path = folder / METRICS
        folder.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_rows(self._path) if row["step"] < first]
        partial = self._path.with_name(f".{METRICS}")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
        partial.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _board(folder / BOARD, first)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record.row()) + "\n")
        self._file.flush()
        if self._board is not None:
            for tag, value in record.scalars():
                self._board.add_scalar(tag, value, record.step)


def _board(folder: Path, first: int) -> Any:
    """A TensorBoard writer that hides what lies behind the checkpoint; None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first)

"""What a run holds between two steps, as named tensors, and the rules by which it comes back.

    model/NAME          every parameter; masters in fp32
    ema/NAME            the average of each parameter that is trained, fp32
    optimizer/NAME/KEY  each entry of the optimizer for that parameter; in 8 bits: see moments.py

NAME is canonical, so a checkpoint does not know how its network was wrapped or sharded. Random draws are
keyed by position, and the place in the data is the step: there is no other state.
Source: spec/faults.md F3; DESIGN rules 2, 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint import Saved
from trainer.checkpoint_files import CheckpointError, Entry
from trainer.ema import Ema
from trainer.model.adapters import check
from trainer.moments import is_quantising, new_moment, restore, stored
from trainer.parameters import local, named_parameters

MODEL, AVERAGE, OPTIMIZER = "model/", "ema/", "optimizer/"


@dataclass(frozen=True)
class Resumed:
    """What came back. fresh: trained parameters whose optimizer entries and average begin anew, because they
    had none. dropped: names with entries in the checkpoint that are not trained now."""

    step: int
    parameters: int
    moments: int
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """For the log."""
        said = [f"step {self.step}: {self.parameters} parameters, optimizer state of {self.moments}"]
        for names, what in ((self.fresh, "begin anew"), (self.dropped, "are not trained now: state dropped")):
            if names:
                said.append(f"{len(names)} {what}: {', '.join(names[:5])}{', ..' if len(names) > 5 else ''}")
        return tuple(said)


@dataclass(frozen=True)
class TrainState:
    """The network (sharded or not), its optimizer and its average."""

    model: nn.Module
    optimizer: Optimizer
    ema: Ema

    def tensors(self) -> dict[str, Tensor]:
        """For `Checkpoints.save`. Nothing is gathered or copied."""
        found: dict[str, Tensor] = {}
        for name, parameter in named_parameters(self.model).items():
            found[MODEL + name] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(f"optimizer entry {key} of {name} is no tensor: it would be lost")
                if is_quantising(self.optimizer) and value.dim():
                    found |= {f"{OPTIMIZER}{name}/{k}": piece for k, piece in stored(key, value.detach())}
                else:
                    found[f"{OPTIMIZER}{name}/{key}"] = value.detach()
        found |= {AVERAGE + name: value for name, value in self.ema.shadow.items()}
        return found

    def note(self) -> dict[str, Any]:
        """What explains absent entries; it goes into the note of the checkpoint under "state"."""
        names = {id(p): name for name, p in named_parameters(self.model).items()}
        trained = {names[id(p)] for group in self.optimizer.param_groups for p in group["params"]}
        stepped = {names[id(p)] for p, state in self.optimizer.state.items() if state}
        return {
            "optimizer": type(self.optimizer).__name__,
            "untouched": sorted(trained - stepped),
            "frozen": sorted(set(names.values()) - trained),
        }

    def load(self, saved: Saved) -> Resumed:
        """Fill everything in place from a checkpoint of any number of ranks.

        Raises CheckpointError naming what is missing, unexpected, of another shape or dtype; AdapterError for
        names and shapes of the network. A trained parameter without optimizer entries is accepted only where
        the checkpoint's note says why: it was frozen, or not a step had been made.
        """
        note, entries = saved.note["state"], saved.entries
        kind = type(self.optimizer).__name__
        if note["optimizer"] != kind:
            raise CheckpointError(
                f"{saved.path} has the state of {note['optimizer']}, and this run uses {kind}: use the same, "
                "or begin a new run from its weights"
            )
        parameters = named_parameters(self.model)
        _check_model(saved, parameters)
        wanted = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        excused = {*note["untouched"], *note["frozen"]}
        moments = _moments(entries)
        loaded: dict[str, dict[str, Tensor]] = {}
        fresh, dropped = [], []
        for name, parameter in parameters.items():
            if id(parameter) not in trained:
                dropped += [name] if name in moments or AVERAGE + name in entries else []
                continue
            if name in moments:
                loaded[name] = {k: _empty(parameter, e) for k, e in moments[name].items() if "@" not in k}
                wanted |= {f"{OPTIMIZER}{name}/{k}": value for k, value in loaded[name].items()}
            elif name in excused:
                fresh.append(name)
            else:
                raise CheckpointError(f"{saved.path} lacks the optimizer state of {name}: restore it")
        anew = []
        for name, average in self.ema.shadow.items():
            if AVERAGE + name in entries:
                wanted[AVERAGE + name] = average
            elif name in note["frozen"]:
                anew.append(name)
            else:
                raise CheckpointError(f"{saved.path} lacks the average of {name}: restore it")
        _check_entries(saved, wanted)
        saved.read(wanted)
        self.optimizer.state.clear()
        for name, kept in loaded.items():
            for key in sorted({part.partition("@")[0] for part in moments[name] if "@" in part}):
                kept[key] = new_moment(self.optimizer, parameters[name], key)
                restore(saved, f"{OPTIMIZER}{name}/", key, kept[key])
            self.optimizer.state[parameters[name]] = kept
        with torch.no_grad():
            for name in anew:
                local(self.ema.shadow[name]).copy_(local(parameters[name]))
        return Resumed(saved.step, len(parameters), len(loaded), tuple(fresh), tuple(dropped))


def load_weights(saved: Saved, model: nn.Module, average: bool) -> None:
    """Only the weights, into a network of one process or into shards, cast to what it is made of.

    average: those of the average; parameters that were not trained have none and come as they are.
    Raises AdapterError naming what is missing, unexpected or misshapen.
    """
    parameters = named_parameters(model)
    _check_model(saved, parameters)
    saved.read({weight_key(saved, name, average): p.detach() for name, p in parameters.items()})


def weight_key(saved: Saved, name: str, average: bool) -> str:
    """The entry that holds a parameter, or its average where there is one."""
    return AVERAGE + name if average and AVERAGE + name in saved.entries else MODEL + name


def weight_shapes(saved: Saved) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the network of a checkpoint."""
    return {k.removeprefix(MODEL): e.shape for k, e in saved.entries.items() if k.startswith(MODEL)}


def read_weight(saved: Saved, name: str, average: bool) -> Tensor:
    """One parameter, whole, in host memory."""
    key = weight_key(saved, name, average)
    value = torch.empty(saved.entries[key].shape, dtype=saved.entries[key].dtype)
    saved.read({key: value})
    return value


def _check_model(saved: Saved, parameters: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    check(weight_shapes(saved), shapes, f"the network of {saved.path}")


def _check_entries(saved: Saved, wanted: Mapping[str, Tensor]) -> None:
    for key, tensor in wanted.items():
        entry = saved.entries[key]
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{saved.path}: {key} is {entry.dtype} {list(entry.shape)}, "
                f"and this run has {tensor.dtype} {list(tensor.shape)}"
            )


def _moments(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Optimizer entries by parameter, then key; those of pieces have an @ in it."""
    found: dict[str, dict[str, Entry]] = {}
    for key, entry in entries.items():
        if key.startswith(OPTIMIZER):
            name, _, part = key.removeprefix(OPTIMIZER).partition("/")
            if not part.endswith(":map"):
                found.setdefault(name, {})[part] = entry
    return found


def _empty(parameter: Tensor, entry: Entry) -> Tensor:
    """Room for an entry: laid out like its parameter, or a number on the host."""
    if entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=entry.dtype)
    return torch.zeros(entry.shape, dtype=entry.dtype)

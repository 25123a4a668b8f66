"""How alike are two pictures: PSNR and SSIM, and LPIPS and MEt3R where their weights are given.

Nothing is downloaded. Source: spec/worldplay2.md j; LPIPS: Zhang et al. 2018, version 0.1 of its weights.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torchmetrics.functional.image as image_metrics
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn

from jobs.evaluate.stats import Floats, keyed
from jobs.evaluate.world import EvaluationError, Frames

MOST_DB = 60.0
"""PSNR of pictures that differ by no more than rounding to 8 bits (58.9 dB), and of equal ones, whose own is
infinite and would be the mean of everything."""
HERE = Path(__file__).parent


class Measure(Protocol):
    """name; better: "higher" or "lower"; every: one pair in so many is measured, for dear ones."""

    @property
    def name(self) -> str: ...

    @property
    def better(self) -> str: ...

    @property
    def every(self) -> int: ...

    def of(self, left: Frames, right: Frames) -> Floats:
        """left, right: uint8 [B, H, W, 3]. float64 [B]."""


class Psnr:
    """Decibels over all three channels; at most MOST_DB."""

    name, better, every = "psnr", "higher", 1

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def of(self, left: Frames, right: Frames) -> Floats:
        a, b = _unit(left, self._device), _unit(right, self._device)
        db = image_metrics.peak_signal_noise_ratio(a, b, data_range=1.0, reduction="none", dim=(1, 2, 3))
        return _numbers(db.clamp(max=MOST_DB))


class Ssim:
    """Gaussian window of 11 pixels, sigma 1.5, over all three channels, as torchmetrics has it."""

    name, better, every = "ssim", "higher", 1

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def of(self, left: Frames, right: Frames) -> Floats:
        a, b = _unit(left, self._device), _unit(right, self._device)
        found = image_metrics.structural_similarity_index_measure(a, b, data_range=1.0, reduction="none")
        assert isinstance(found, Tensor)
        return _numbers(found)


# --- LPIPS ------------------------------------------------------------------------------------------------

# Layers whose output is compared: after each of five ReLUs.
_TAPS = {"alex": (1, 4, 7, 9, 11), "vgg": (3, 8, 15, 22, 29)}
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_LEAST_SIDE = {"alex": 63, "vgg": 16}
"""Pixels without which a pooling of the backbone has nothing left."""


class Lpips(nn.Module):
    """Learned distance on a torchvision AlexNet or VGG16.

    backbone: file with the state dict of torchvision's `alexnet` or `vgg16`; its shapes tell which.
    heads: `lin*.model.1.weight` of version 0.1; None takes the file that torchmetrics ships.
    Raises EvaluationError where a file is something else.
    """

    name, better, every = "lpips", "lower", 1

    def __init__(self, backbone: Path, heads: Path | None = None, device: str = "cpu") -> None:
        super().__init__()
        state = _state(backbone)
        first = state.get("features.0.weight")
        kind = {11: "alex", 3: "vgg"}.get(0 if first is None else first.shape[-1])
        if kind is None:
            raise EvaluationError(f"{backbone} is no AlexNet or VGG16 of torchvision: see docs/evaluation.md")
        make: Any = torchvision.models.alexnet if kind == "alex" else torchvision.models.vgg16
        with torch.device("meta"):
            self.features = make(weights=None).features
        own = {k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")}
        heads = heads or _shipped(kind)
        linear = _state(heads)
        try:
            self.features.load_state_dict(own, assign=True)
            weights = [linear[f"lin{k}.model.1.weight"].flatten() for k in range(5)]
        except (RuntimeError, KeyError) as error:
            why = " ".join(str(error).split())[:160]
            raise EvaluationError(f"{backbone} and {heads} hold no LPIPS of one kind: {why}") from None
        self.kind = kind
        for k, weight in enumerate(weights):
            self.register_buffer(f"head{k}", weight)
        self.shift = torch.tensor(_SHIFT, device=device).view(1, 3, 1, 1)
        self.scale = torch.tensor(_SCALE, device=device).view(1, 3, 1, 1)
        for layer in self.features:
            if isinstance(layer, nn.ReLU):  # a tap is kept while later layers run
                layer.inplace = False
        self._device = device
        self.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def of(self, left: Frames, right: Frames) -> Floats:
        """Raises EvaluationError on pictures that the backbone pools to nothing."""
        if min(left.shape[1:3]) < _LEAST_SIDE[self.kind]:
            raise EvaluationError(
                f"LPIPS on {self.kind} needs pictures of {_LEAST_SIDE[self.kind]} pixels a side, "
                f"not {left.shape[1]}x{left.shape[2]}"
            )
        total = torch.zeros(len(left), device=self._device)
        taps = (self._taps(2 * _unit(p, self._device) - 1) for p in (left, right))
        for k, (a, b) in enumerate(zip(*taps)):
            head: Tensor = getattr(self, f"head{k}")
            apart = (_direction(a) - _direction(b)).square()
            total += torch.einsum("bchw,c->bhw", apart, head).mean(dim=(1, 2))
        return _numbers(total)

    def _taps(self, pixels: Tensor) -> list[Tensor]:
        """pixels: [B, 3, H, W] in [-1, 1]."""
        found, x = [], (pixels - self.shift) / self.scale
        for k, layer in enumerate(self.features[: _TAPS[self.kind][-1] + 1]):
            x = layer(x)
            if k in _TAPS[self.kind]:
                found.append(x)
        return found


def _direction(x: Tensor) -> Tensor:
    return x / (x.square().sum(dim=1, keepdim=True) + 1e-10).sqrt()


def _state(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        why = " ".join(str(error).split())[:120]
        raise EvaluationError(f"{path} is no file of weights: {why}") from None
    if not isinstance(state, dict):
        raise EvaluationError(f"{path} holds no state dict")
    return state


def _shipped(kind: str) -> Path:
    return Path(inspect.getfile(image_metrics)).parent / "lpips_models" / f"{kind}.pth"


# --- MEt3R ------------------------------------------------------------------------------------------------


class Met3r:
    """MEt3R in an environment of its own, one pair a second.

    python: interpreter of an environment that has the `met3r` package, with its weights in that
    environment's caches; downloads are switched off. Raises EvaluationError with what that process said.
    """

    name, better, every = "met3r", "lower", 16

    def __init__(self, python: Path, device: str = "cpu", environment: dict[str, str] | None = None) -> None:
        if not python.is_file():
            raise EvaluationError(f"--met3r {python}: give the Python of an environment that has met3r")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._python = python
        # Not a pipe: one that nobody reads stops the process when it is full.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._process = subprocess.Popen(
            [str(python), str(HERE / "met3r_process.py"), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **offline, **(environment or {})},
        )

    def of(self, left: Frames, right: Frames) -> Floats:
        pair = np.ascontiguousarray(np.stack([left, right], axis=1))
        header = json.dumps({"shape": pair.shape}).encode() + b"\n"
        process = self._process
        assert process.stdin and process.stdout
        try:
            process.stdin.write(header + pair.tobytes())
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise EvaluationError(f"--met3r {self._python} ended: {said[-1][:200]}")
        return np.asarray(json.loads(answer), np.float64)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._said.close()


def _unit(frames: Frames, device: str) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).to(device).permute(0, 3, 1, 2).float() / 255


def _numbers(values: Tensor) -> Floats:
    found: npt.NDArray[np.float64] = values.detach().cpu().double().numpy()
    return found.reshape(-1)


def check(measures: Sequence[Measure], height: int, width: int) -> None:
    """Each measures one pair of a size, so that what cannot be measured is known before anything is played.

    Raises EvaluationError where one fails or says no number."""
    shape = (1, height, width, 3)
    left, right = (keyed(0, "check", side).integers(0, 256, shape).astype(np.uint8) for side in "ab")
    for measure in measures:
        if not np.isfinite(found := measure.of(left, right)).all():
            raise EvaluationError(f"{measure.name} of two pictures of {height}x{width} is {found[0]}")


def plain(device: str = "cpu") -> Sequence[Measure]:
    """Those that need no weights."""
    return (Psnr(device), Ssim(device))

"""How pleasing a picture is: the LAION aesthetic head over CLIP where weights are given, else a named proxy.

The head is one of the two published layouts over an L2-normalised 768-wide image embedding: one linear
layer (`weight`, `bias`), or a chain of linear layers (`layers.N.weight`, `layers.N.bias`). Both answer on
a scale from 1 to 10. Weights are read from given paths; nothing is fetched. Source: spec/faults.md Q5;
spec/formats.md 2.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.errors import StopRun

PROXY = "proxy-colourfulness-contrast-1"
"""Name of what is not a judgement of beauty: how colourful and how contrasty a picture is."""
SCALE = (1.0, 10.0)
"""Range of the head's answers; anything outside means another head, another scale, or the wrong CLIP."""


class AestheticsConfig(BaseModel):
    """Weights of the learned scorer: files on the machine that runs the stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    clip_model: str = Field(
        default="ViT-L-14-quickgelu", description="architecture of CLIP, by open_clip's name"
    )
    clip_weights: str | None = Field(default=None, description="open_clip weights: .safetensors, .pt or .bin")
    head_weights: str | None = Field(default=None, description="LAION head: .safetensors, .pt or .pth")

    @model_validator(mode="after")
    def _both(self) -> AestheticsConfig:
        if (self.clip_weights is None) != (self.head_weights is None):
            raise ValueError("clip_weights and head_weights belong together: give both or neither")
        return self


class ScorerError(StopRun):
    """Weights that do not make a scorer, or a scorer whose answers cannot be aesthetic scores."""


class Scorer(Protocol):
    """name: goes into column `aesthetics_by`. judge: score from 1 to 10 of uint8 RGB [H, W, 3]."""

    @property
    def name(self) -> str: ...

    def judge(self, rgb: npt.NDArray[np.uint8]) -> float: ...


def proxy(levels: npt.NDArray[np.float32], chroma: npt.NDArray[np.float32]) -> float:
    """From 0 to 1. levels: luma above black [N]; chroma: U and V [2, C] of the same places.

    Mean of colourfulness (Hasler and Suesstrunk's sum of spread and distance from grey, on U and V) and of
    the standard deviation of luma, each saturating softly.
    """
    spread = float(np.hypot(*chroma.std(axis=1)))
    distance = float(np.hypot(*(chroma.mean(axis=1) - 128)))
    colour = (spread + 0.3 * distance) / 20
    contrast = float(levels.std()) / 40
    return (colour / (1 + colour) + contrast / (1 + contrast)) / 2


@functools.lru_cache(maxsize=1)
def load_scorer(config: AestheticsConfig) -> Scorer | None:
    """The scorer of a config, loaded once a process; None where no weights are given. Raises ScorerError."""
    if config.clip_weights is None or config.head_weights is None:
        return None
    return LaionScorer(config.clip_model, Path(config.clip_weights), Path(config.head_weights))


class LaionScorer:
    """CLIP's image tower by open_clip and an aesthetic head, on the CPU, one picture at a time."""

    def __init__(self, clip_model: str, clip_weights: Path, head_weights: Path) -> None:
        """clip_model: an architecture that open_clip knows, such as ViT-L-14.

        Raises ScorerError when a file is missing, does not fit, or the packages are not installed.
        """
        for path in (clip_weights, head_weights):
            if not path.is_file():
                raise ScorerError(f"no weights at {path}: give the path of a file on this machine")
        try:
            import open_clip
            import torch
        except ImportError as error:
            raise ScorerError(f"aesthetics needs {error.name}: install wp2 with the extra 'train'") from None
        if clip_model not in open_clip.list_models():
            raise ScorerError(f"open_clip knows no model {clip_model!r}: set observe.aesthetics.clip_model")
        self._torch: Any = torch
        torch.set_num_threads(1)  # a machine full of workers has no more
        try:
            model, _, self._prepare = open_clip.create_model_and_transforms(
                clip_model, pretrained=str(clip_weights)
            )
        except (RuntimeError, KeyError, OSError, pickle.UnpicklingError) as error:
            raise ScorerError(f"{clip_weights} does not fit {clip_model}: {_line(error)}") from None
        self._model = model.eval()
        self._head = _head(torch, head_weights, int(open_clip.get_model_config(clip_model)["embed_dim"]))
        self.name = f"laion-{clip_model.lower()}-{_digest(clip_weights)}-{_digest(head_weights)}"

    def judge(self, rgb: npt.NDArray[np.uint8]) -> float:
        """Score of one picture. Raises ScorerError when it is no number from 1 to 10."""
        from PIL import Image

        with self._torch.inference_mode():
            picture = self._prepare(Image.fromarray(rgb))[None]
            embedding = self._model.encode_image(picture).float()
            embedding = embedding / embedding.norm(dim=-1, keepdim=True)
            for weight, bias in self._head:
                embedding = embedding @ weight.T + bias
        return in_scale(float(embedding.item()), self.name)


def in_scale(score: float, name: str) -> float:
    """The score. Raises ScorerError when it does not lie on the scale."""
    low, high = SCALE
    if not low <= score <= high:
        raise ScorerError(
            f"{name} answers {score:.3g}, outside {low:g} to {high:g}: its weights belong to another scale "
            "or to another CLIP model"
        )
    return score


def _head(torch: Any, path: Path, width: int) -> list[tuple[Any, Any]]:
    """(weight, bias) of each linear layer in order. Dropout between them does nothing at inference."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(str(path))
    else:
        state = torch.load(str(path), map_location="cpu", weights_only=True)
    names = [name.removesuffix("weight") for name in state if name.endswith("weight")]
    names.sort(key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
    layers = [(state[f"{n}weight"].float(), state[f"{n}bias"].float()) for n in names if f"{n}bias" in state]
    for weight, _ in layers:
        if weight.ndim != 2 or weight.shape[1] != width:
            raise ScorerError(f"{path} is no aesthetic head for embeddings {width} wide")
        width = int(weight.shape[0])
    if not layers or width != 1:
        raise ScorerError(f"{path} is no aesthetic head: linear layers that end in one number are wanted")
    return layers


def _digest(path: Path) -> str:
    """First 8 hex digits of a file's sha256."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:8]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

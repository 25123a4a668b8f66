"""What is measured: a world that plays a case, chunk by chunk.

A measure knows nothing of weights. `ModelWorld` is a trained model; recorded footage and the worlds that are
built by hand for the controls are others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from jobs.model import Opening, OpenModel, Tick
from schemas.action import AXES, PERSPECTIVE
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.timeline import FRAMES_PER_LATENT, LATENTS_PER_CHUNK
from trainer.codec.base import to_rgb
from trainer.rollout import Rollout

if TYPE_CHECKING:
    from trainer.model.wan import WanModel

Frames = npt.NDArray[np.uint8]
"""uint8 [F, H, W, 3], 16 a second."""
Rows = npt.NDArray[np.float32]
"""float32 [T, 6] in the order of `schemas.action.AXES`."""


class EvaluationError(UserError):
    """What cannot be measured, in one line."""


@dataclass(frozen=True)
class Case:
    """One video to be made.

    image: uint8 [H, W, 3], the start. rows: float32 [T, 6], T whole chunks, row 0 idle. prompts: a text a
    chunk. noise: what a model's noise is keyed by beside the seed, its name if not given; cases that are to
    differ in their rows alone share one. Raises ValueError where they do not fit each other.
    """

    name: str
    image: npt.NDArray[np.uint8]
    perspective: Perspective
    rows: Rows
    prompts: tuple[str, ...]
    noise: str = ""

    def __post_init__(self) -> None:
        latents = len(self.rows)
        if self.rows.shape != (latents, len(AXES)) or latents != LATENTS_PER_CHUNK * len(self.prompts):
            raise ValueError(
                f"{self.name}: rows {self.rows.shape} and {len(self.prompts)} prompts: give "
                f"{len(AXES)} values a latent, and a prompt each {LATENTS_PER_CHUNK} latents"
            )
        if np.any(np.delete(self.rows[0], PERSPECTIVE)):
            raise ValueError(f"{self.name}: row 0 moves, before there is a frame")
        if self.image.ndim != 3 or self.image.shape[2] != 3 or self.image.dtype != np.uint8:
            raise ValueError(f"{self.name}: image must be uint8 [H, W, 3], not {self.image.shape}")

    @property
    def chunks(self) -> int:
        return len(self.prompts)

    @property
    def frames(self) -> int:
        return FRAMES_PER_LATENT * (len(self.rows) - 1) + 1

    @property
    def position(self) -> int:
        """A number of 63 bits that stands for `noise`, the same in every process."""
        digest = hashlib.sha256((self.noise or self.name).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def under(self, rows: Rows) -> Case:
        """The same start under other rows, as long; its first prompt if they are not."""
        chunks = len(rows) // LATENTS_PER_CHUNK
        prompts = self.prompts if chunks == self.chunks else self.prompts[:1] * chunks
        return replace(self, rows=rows, prompts=prompts)


class World(Protocol):
    """Plays cases. The same case and seed give the same pictures."""

    @property
    def name(self) -> str: ...

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        """The video, a chunk at a time: 13 frames first, 16 in every later chunk. What a chunk shows depends
        on rows and prompts up to it alone."""


@dataclass(frozen=True)
class ModelWorld:
    """A trained model at play. Noise depends on the case and the seed, so that an interval over cases has the
    scatter of the noise in it; two models get the same."""

    name: str
    model: OpenModel
    experts: dict[str, WanModel]

    @staticmethod
    def of(weights: Path, opening: Opening, tick: Tick) -> ModelWorld:
        """Opens and loads. Raises UserError of the part that is wrong."""
        return ModelWorld.loaded(weights, OpenModel.of(weights, opening), tick)

    @staticmethod
    def loaded(weights: Path, model: OpenModel, tick: Tick) -> ModelWorld:
        """Of a model that was opened before."""
        return ModelWorld(weights.name or str(weights), model, model.load(tick))

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        model = self.model
        rows = np.ascontiguousarray(case.rows)
        scene = model.scene(case.image, rows, case.prompts, case.name, (case.position,))
        settings = replace(model.settings, seed=seed)
        for chunk in Rollout(model.preset, self.experts, model.codec, scene, settings).chunks():
            yield np.asarray(to_rgb(chunk.pixels.cpu()).numpy(), np.uint8)


def whole(chunks: Iterator[Frames]) -> Frames:
    """A whole video in memory: uint8 [4T-3, H, W, 3]."""
    return np.concatenate(list(chunks))

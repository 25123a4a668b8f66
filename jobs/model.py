"""A trained model as commands open it: checkpoint, codec and text encoder, and what a video is made from.

Opening reads headers only. Codec, encoder and weights are loaded when they are first needed, so that a
command can look at everything else before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import numpy.typing as npt
import torch

from pipeline.geometry import Cover
from schemas.latents import NEGATIVE, FittedCodec
from schemas.rollout import RolloutError
from trainer.codec.base import to_pixels
from trainer.codec.weights import Precision, TextKind
from trainer.config import ConfigError, Geometry, Preset
from trainer.model.adapters import Contents
from trainer.model.kvcache import HorizonError, check_horizon
from trainer.rollout import Scene, Settings
from trainer.sampler import ManySteps
from trainer.schedule import schedule_of
from trainer.weights.checkpoint import Checkpoint, open_checkpoint
from trainer.weights.transfer import load

if TYPE_CHECKING:
    from trainer.codec.base import Codec
    from trainer.codec.text import TextEncoder
    from trainer.model.wan import WanModel

Tick = Callable[[str, int, int], None]
"""Called with a description, and how much of how much is done."""
CODECS, TEXTS = ("linear", "wan"), ("minilm", "umt5")
# Degrees per latent of a held turn, as the release's launchers have them. Source: spec/worldplay2.md a.6.
YAW = 3.0
PITCH, PITCH_FEW = 3.0, 1.0


@dataclass(frozen=True)
class Opening:
    """What a model is opened with. codec, text: KIND:PATH. size: HEIGHTxWIDTH, that of the preset when empty.
    steps, guidance: None takes what the kind of weights is made for. Raises RolloutError of a device that is
    not there."""

    codec: str
    text: str = "minilm"
    size: str = ""
    steps: int | None = None
    guidance: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        checked_device(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def checked_device(device: str) -> str:
    """cpu, cuda or cuda:N, if it is there. Raises RolloutError."""
    kind, _, number = device.partition(":")
    if device not in ("cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise RolloutError(f"--device {device!r}: give cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):
        raise RolloutError(
            f"--device {device}: PyTorch sees {count} GPUs here: give cpu, or a GPU with its driver"
        )
    return device


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint that can be played. Raises RolloutError of what does not fit, in one line."""

    checkpoint: Checkpoint
    preset: Preset
    settings: Settings
    opening: Opening

    @staticmethod
    def of(weights: Path, opening: Opening) -> OpenModel:
        """Raises RolloutError, WeightsError or AdapterError. Reads headers of the weights only."""
        checkpoint = open_checkpoint(weights)
        return OpenModel(checkpoint, _preset(checkpoint, opening), _settings(checkpoint, opening), opening)

    @property
    def pitch(self) -> float:
        """Degrees per latent of a held look up, as this kind of weights is made for."""
        return PITCH_FEW if self.settings.few is not None else PITCH

    def check_horizon(self, latents: int, where: str) -> None:
        """Raises RolloutError where the weights cannot place a video of so many latents."""
        try:
            check_horizon(latents, self.preset.model.max_latents)
        except HorizonError as error:
            raise RolloutError(f"{where}: {error}") from None

    @cached_property
    def codec(self) -> Codec:
        return open_codec(self.opening)

    @cached_property
    def encoder(self) -> TextEncoder:
        """Raises RolloutError where its embeddings are not those that the weights read."""
        from trainer.codec import text

        kind, path = _kind(self.opening.text, TEXTS, "--text")
        name: TextKind = "umt5" if kind == "umt5" else "minilm"
        encoder = text.load(name, path, self.opening.device, _precision(self.opening))
        if encoder.width != self.preset.model.text_dim:
            raise RolloutError(
                f"the text encoder gives {encoder.width} values a token and the weights read "
                f"{self.preset.model.text_dim}: choose another with --text"
            )
        return encoder

    def encoded(self, prompt: str, where: str) -> torch.Tensor:
        """[n, text_dim]. Raises RolloutError where it is too long; `where` names its place."""
        limit, found = self.preset.model.text_len, self.encoder.encode(prompt)
        if found.cut or len(found.tokens) > limit:
            raise RolloutError(f"{where}: prompt {prompt[:40]!r} has more than {limit} tokens: shorten it")
        return found.tokens

    def scene(
        self,
        image: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.float32],
        prompts: Sequence[str],
        where: str,
        positions: tuple[int, ...] = (0,),
    ) -> Scene:
        """image: uint8 [H, W, 3] of any size. rows: [T, 6]. prompts: one a chunk. where: names the video.
        positions: its noise is keyed by."""
        distinct = tuple(dict.fromkeys(prompts))
        return Scene(
            to_pixels(torch.from_numpy(covered(image, self.preset.geometry))[None]),
            torch.from_numpy(rows)[None],
            tuple(self.encoded(p, where) for p in distinct),
            tuple(distinct.index(p) for p in prompts),
            self.encoded(NEGATIVE, where),
            positions,
            where,
        )

    def load(self, tick: Tick) -> dict[str, WanModel]:
        """The experts, ready to predict. Takes as long as their files are large."""
        device, experts = self.opening.device, self.checkpoint.experts
        dtype = torch.bfloat16 if self.opening.on_gpu else torch.float32
        done, total = 0, sum(e.bytes for e in experts)

        def read(expert: str, count: int) -> None:
            nonlocal done
            done += count
            tick("weights", done, total)

        loaded = {e.name: load(e, device, dtype, read) for e in experts}
        if self.settings.few is None:  # takes seconds, which are not the first video's
            importlib.import_module("diffusers.schedulers.scheduling_unipc_multistep")
        return loaded


def read_image(path: Path, what: str = "image_path") -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3]. what: names its place in errors. Raises RolloutError."""
    bgr = (
        cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR) if path.is_file() else None
    )
    if bgr is None:
        raise RolloutError(f"{what} {path} is no picture that can be read")
    return np.ascontiguousarray(bgr[:, :, ::-1], np.uint8)


def covered(rgb: npt.NDArray[np.uint8], geometry: Geometry) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3] of the model's size: scaled to cover and centre-cropped, as training pictures are."""
    height, width = rgb.shape[:2]
    return Cover.of(height, width, geometry.height, geometry.width).apply(rgb)


def open_codec(opening: Opening) -> Codec:
    """Raises RolloutError or CodecError."""
    kind, path = _kind(opening.codec, CODECS, "--codec")
    if path is None:
        raise RolloutError(f"--codec {kind} needs a path: {kind}:PATH")
    if kind == "wan":
        from trainer.codec import wan

        return wan.load(path, opening.device, _precision(opening))
    from trainer.codec.linear import Linear

    try:
        record = FittedCodec.model_validate_json(path.read_bytes())
    except ValueError:
        raise RolloutError(f"{path} is no fitted codec: give statistics/codec-v*.json of a corpus") from None
    return Linear(record, opening.device)


def _preset(checkpoint: Checkpoint, opening: Opening) -> Preset:
    found = checkpoint.experts[0].found
    preset = replace(found.preset, model=found.model)
    if [e.name for e in checkpoint.experts] != list(preset.experts):
        raise RolloutError(
            f"{checkpoint.path} is one expert of {len(preset.experts)}: give the folder that holds them"
        )
    if checkpoint.contents is Contents.BASE:
        raise RolloutError(
            f"{checkpoint.path} has neither actions nor memory: it is a base to train from, not a world model"
        )
    if not opening.size:
        return preset
    height, _, width = opening.size.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise RolloutError(f"--size {opening.size!r}: give HEIGHTxWIDTH, as 448x832")
    try:
        return replace(preset, geometry=Geometry(int(height), int(width)))
    except ConfigError as error:
        raise RolloutError(f"--size: {error}") from None


def _settings(checkpoint: Checkpoint, opening: Opening) -> Settings:
    """Of seed 0."""
    if checkpoint.contents in (Contents.COMPACT, Contents.BANK):
        if opening.steps is not None or opening.guidance is not None:
            raise RolloutError(
                f"{checkpoint.path} is made for 4 steps without guidance: leave --steps and --guidance out"
            )
        return Settings(few=schedule_of(checkpoint.preset))
    many = ManySteps()
    steps = many.steps if opening.steps is None else opening.steps
    guidance = many.guidance if opening.guidance is None else opening.guidance
    return Settings(many=replace(many, steps=steps, guidance=guidance))


def _precision(opening: Opening) -> Precision:
    return "bfloat16" if opening.on_gpu else "float32"


def _kind(value: str, kinds: tuple[str, ...], flag: str) -> tuple[str, Path | None]:
    """KIND or KIND:PATH."""
    kind, colon, path = value.partition(":")
    if kind not in kinds or (colon and not path):
        raise RolloutError(f"{flag} {value!r}: give KIND:PATH; kinds are {', '.join(kinds)}")
    return kind, Path(path) if path else None

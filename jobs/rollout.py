"""`wp2 rollout`: released input JSON and weights to video.

Two files a video: `NAME.mp4`, the pictures as the model made them, and `NAME.actions.mp4`, the same with the
controls drawn on top.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import cv2
import numpy as np
import numpy.typing as npt
import torch

from jobs.overlay import drawn
from pipeline.geometry import Cover
from schemas.latents import NEGATIVE, FittedCodec
from schemas.rollout import RolloutError, RolloutInput, action_rows, parse_inputs
from schemas.timeline import FRAMES_PER_LATENT, GRID_RATE
from trainer.codec.base import to_pixels, to_rgb
from trainer.codec.weights import Precision
from trainer.config import ConfigError, Geometry, Preset
from trainer.model.adapters import Contents
from trainer.model.kvcache import HorizonError, check_horizon
from trainer.rollout import Rollout, Scene, Settings
from trainer.sampler import ManySteps
from trainer.schedule import PddSchedule
from trainer.weights.checkpoint import Checkpoint, open_checkpoint
from trainer.weights.transfer import load

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.codec.base import Codec
    from trainer.codec.text import TextEncoder
    from trainer.model.wan import WanModel

Tick = Callable[[str, int, int], None]
"""Called with a description, and how much of how much is done."""
CODECS, TEXTS = ("linear", "wan"), ("minilm", "umt5")
# Degrees per latent of a held turn, as the release's launchers have them. Source: spec/worldplay2.md a.6.
YAW = 3.0
PITCH, PITCH_FEW = 3.0, 1.0
CRF = "14"


@dataclass(frozen=True)
class Options:
    """Of a run. codec, text: KIND:PATH. size: HEIGHTxWIDTH, that of the preset when empty. steps, guidance,
    pitch: None takes what the kind of weights is made for. yaw, pitch: degrees per latent."""

    codec: str
    text: str = "minilm"
    size: str = ""
    seed: int = 0
    steps: int | None = None
    guidance: float | None = None
    yaw: float = YAW
    pitch: float | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Made:
    """One video. frames at 16 a second; seconds that it took."""

    path: Path
    chunks: int
    frames: int
    seconds: float

    def line(self) -> str:
        return (
            f"{self.path}: {self.frames} frames ({self.frames / GRID_RATE:.1f} s), {self.chunks} chunks in "
            f"{self.seconds:.1f} s, {1000 * self.seconds / self.chunks:.0f} ms a chunk"
        )


def run(weights: Path, input_file: Path, folder: Path, options: Options, tick: Tick) -> Iterator[Made]:
    """Make every video of an input JSON. All that can be wrong is looked at before weights are loaded.

    Raises UserError of the part that is wrong, in one line.
    """
    asked = parse_inputs(input_file.read_bytes(), str(input_file))
    checkpoint = open_checkpoint(weights)
    preset, settings = _preset(checkpoint, options), _settings(checkpoint, options)
    images = [_image(input_file.parent / one.image, preset.geometry) for one in asked]
    limit = checkpoint.experts[0].found.model.max_latents
    for k, one in enumerate(asked):
        try:
            check_horizon(one.latents, limit)
        except HorizonError as error:
            raise RolloutError(f"{input_file}: entry {k}, action: {error}") from None
    codec = _codec(options)
    texts = _Texts(_encoder(options), checkpoint.preset, str(input_file))
    scenes = [_scene(checkpoint, options, one, image, texts) for one, image in zip(asked, images)]
    experts = _load(checkpoint, options, tick)
    if settings.few is None:  # takes seconds, which are not the first video's
        importlib.import_module("diffusers.schedulers.scheduling_unipc_multistep")
    folder.mkdir(parents=True, exist_ok=True)
    for one, scene in zip(asked, scenes):
        yield _video(Rollout(preset, experts, codec, scene, settings), one, folder, tick)


def _video(rollout: Rollout, one: RolloutInput, folder: Path, tick: Tick) -> Made:
    began, frames = time.monotonic(), 0
    names, rows = one.prompt_names, rollout.scene.actions[0].numpy()
    plain, shown = folder / f"{one.name}.mp4", folder / f"{one.name}.actions.mp4"
    tick(one.name, 0, one.chunks)
    with _writer(plain) as write_plain, _writer(shown) as write_shown:
        for chunk in rollout.chunks():
            first = chunk.index * rollout.preset.chunk
            for k, rgb in enumerate(to_rgb(chunk.pixels.cpu()).numpy()):
                # Latent 0 is one frame, every other four.
                latent = first + (k if first else k + FRAMES_PER_LATENT - 1) // FRAMES_PER_LATENT
                write_plain(rgb)
                write_shown(drawn(rgb, rows[latent], f"chunk {chunk.index}  {names[chunk.index]}"))
                frames += 1
            tick(one.name, chunk.index + 1, one.chunks)
    return Made(shown, one.chunks, frames, time.monotonic() - began)


@contextmanager
def _writer(path: Path) -> Iterator[Callable[[npt.NDArray[np.uint8]], None]]:
    """H.264 at 16 frames a second, there under its name when it is whole."""
    partial = path.with_name(f".{path.name}")
    stream: Any = None
    with av.open(str(partial), "w", format="mp4") as container:

        def write(rgb: npt.NDArray[np.uint8]) -> None:
            nonlocal stream
            if stream is None:
                stream = container.add_stream("libx264", rate=GRID_RATE, options={"crf": CRF})
                stream.height, stream.width, stream.pix_fmt = *rgb.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, "rgb24")))

        try:
            yield write
            container.mux(stream.encode(None))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    partial.rename(path)


# --- what a run is made of --------------------------------------------------------------------------------


def _preset(checkpoint: Checkpoint, options: Options) -> Preset:
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
    if not options.size:
        return preset
    height, _, width = options.size.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise RolloutError(f"--size {options.size!r}: give HEIGHTxWIDTH, as 448x832")
    try:
        return replace(preset, geometry=Geometry(int(height), int(width)))
    except ConfigError as error:
        raise RolloutError(f"--size: {error}") from None


def _settings(checkpoint: Checkpoint, options: Options) -> Settings:
    if checkpoint.contents in (Contents.COMPACT, Contents.BANK):
        if options.steps is not None or options.guidance is not None:
            raise RolloutError(
                f"{checkpoint.path} is made for 4 steps without guidance: leave --steps and --guidance out"
            )
        return Settings(options.seed, few=PddSchedule(boundary=checkpoint.preset.boundary))
    many = ManySteps()
    steps = many.steps if options.steps is None else options.steps
    guidance = many.guidance if options.guidance is None else options.guidance
    return Settings(options.seed, replace(many, steps=steps, guidance=guidance))


def _load(checkpoint: Checkpoint, options: Options, tick: Tick) -> dict[str, WanModel]:
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    done, total = 0, sum(e.bytes for e in checkpoint.experts)

    def read(expert: str, count: int) -> None:
        nonlocal done
        done += count
        tick("weights", done, total)

    return {e.name: load(e, options.device, dtype, read) for e in checkpoint.experts}


def _codec(options: Options) -> Codec:
    kind, path = _kind(options.codec, CODECS, "--codec")
    if path is None:
        raise RolloutError(f"--codec {kind} needs a path: {kind}:PATH")
    if kind == "wan":
        from trainer.codec import wan

        return wan.load(path, options.device, _precision(options))
    from trainer.codec.linear import Linear

    try:
        record = FittedCodec.model_validate_json(path.read_bytes())
    except ValueError:
        raise RolloutError(f"{path} is no fitted codec: give statistics/codec-v*.json of a corpus") from None
    return Linear(record, options.device)


def _encoder(options: Options) -> TextEncoder:
    from trainer.codec import text

    kind, path = _kind(options.text, TEXTS, "--text")
    return text.load("umt5" if kind == "umt5" else "minilm", path, options.device, _precision(options))


def _precision(options: Options) -> Precision:
    return "bfloat16" if options.device == "cuda" else "float32"


def _kind(value: str, kinds: tuple[str, ...], flag: str) -> tuple[str, Path | None]:
    """KIND or KIND:PATH."""
    kind, colon, path = value.partition(":")
    if kind not in kinds or (colon and not path):
        raise RolloutError(f"{flag} {value!r}: give KIND:PATH; kinds are {', '.join(kinds)}")
    return kind, Path(path) if path else None


@dataclass(frozen=True)
class _Texts:
    """Encoded prompts that the weights can read."""

    encoder: TextEncoder
    preset: Preset
    where: str

    def encoded(self, prompt: str) -> Tensor:
        """[n, text_dim]. Raises RolloutError where it is too long, or the encoder another."""
        model = self.preset.model
        if self.encoder.width != model.text_dim:
            raise RolloutError(
                f"the text encoder gives {self.encoder.width} values a token and the weights read "
                f"{model.text_dim}: choose another with --text"
            )
        found = self.encoder.encode(prompt)
        if found.cut or len(found.tokens) > model.text_len:
            raise RolloutError(
                f"{self.where}: prompt {prompt[:40]!r} has more than {model.text_len} tokens: shorten it"
            )
        return found.tokens


def _scene(
    checkpoint: Checkpoint, options: Options, one: RolloutInput, image: Tensor, texts: _Texts
) -> Scene:
    few = checkpoint.contents in (Contents.COMPACT, Contents.BANK)
    pitch = options.pitch if options.pitch is not None else (PITCH_FEW if few else PITCH)
    rows = action_rows(one.commands, one.perspective, options.yaw, pitch)
    distinct = tuple(dict.fromkeys(one.chunk_prompts))
    return Scene(
        image,
        torch.from_numpy(rows)[None],
        tuple(texts.encoded(p) for p in distinct),
        tuple(distinct.index(p) for p in one.chunk_prompts),
        texts.encoded(NEGATIVE),
    )


def _image(path: Path, geometry: Geometry) -> Tensor:
    """[1, 3, 1, H, W] in [-1, 1], scaled to cover and centre-cropped as training pictures are."""
    bgr = (
        cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR) if path.is_file() else None
    )
    if bgr is None:
        raise RolloutError(f"image_path {path} is no picture that can be read")
    rgb: npt.NDArray[np.uint8] = np.ascontiguousarray(bgr[:, :, ::-1], np.uint8)
    height, width = rgb.shape[:2]
    cover = Cover.of(height, width, geometry.height, geometry.width)
    return to_pixels(torch.from_numpy(cover.apply(rgb))[None])

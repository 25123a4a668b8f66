"""`wp2 rollout`: released input JSON and weights to video.

Two files a video: `NAME.mp4`, the pictures as the model made them, and `NAME.actions.mp4`, the same with the
controls drawn on top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.model import YAW, Opening, OpenModel, Tick, covered, read_image
from jobs.overlay import drawn
from jobs.video import video_writer
from schemas.rollout import RolloutInput, action_rows, parse_inputs
from schemas.timeline import FRAMES_PER_LATENT, GRID_RATE
from trainer.codec.base import to_rgb
from trainer.rollout import Rollout


@dataclass(frozen=True)
class Options:
    """Of a run. yaw, pitch: degrees per latent; pitch None takes what the kind of weights is made for."""

    opening: Opening
    seed: int = 0
    yaw: float = YAW
    pitch: float | None = None


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
    model = OpenModel.of(weights, options.opening)
    images = [covered(read_image(input_file.parent / one.image), model.preset.geometry) for one in asked]
    for k, one in enumerate(asked):
        model.check_horizon(one.latents, f"{input_file}: entry {k}, action")
    pitch = model.pitch if options.pitch is None else options.pitch
    codec = model.codec
    scenes = [
        model.scene(
            image,
            action_rows(one.commands, one.perspective, options.yaw, pitch),
            one.chunk_prompts,
            f"{input_file}: {one.name}",
        )
        for one, image in zip(asked, images)
    ]
    experts, settings = model.load(tick), replace(model.settings, seed=options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    for one, scene in zip(asked, scenes):
        yield _video(Rollout(model.preset, experts, codec, scene, settings), one, folder, tick)


def _video(rollout: Rollout, one: RolloutInput, folder: Path, tick: Tick) -> Made:
    began, frames = time.monotonic(), 0
    names, rows = one.prompt_names, rollout.scene.actions[0].numpy()
    plain, shown = (folder / file for file in one.files)
    tick(one.name, 0, one.chunks)
    with video_writer(plain) as write_plain, video_writer(shown) as write_shown:
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

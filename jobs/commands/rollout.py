"""`wp2 rollout`: video from weights, an image, actions and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.commands.base import app, out
from jobs.commands.evaluate import DeviceOpt, GuidanceOpt, PitchOpt, SizeOpt, StepsOpt, YawOpt, ticks
from jobs.commands.weights import MODEL


@app.command(rich_help_panel=MODEL)
def rollout(
    weights: Annotated[Path, typer.Option(help="folder with both experts; see `wp2 weights inspect`")],
    input_file: Annotated[Path, typer.Option("--input", help="JSON of the release: image, actions, prompts")],
    folder: Annotated[Path, typer.Option("--out", help="folder for the videos")],
    codec: Annotated[
        str,
        typer.Option(help="wan:PATH (diffusers folder or Wan2.1_VAE.pth), linear:statistics/codec-v*.json"),
    ],
    text: Annotated[str, typer.Option(help="umt5:PATH, or minilm")] = "minilm",
    size: SizeOpt = "",
    seed: Annotated[int, typer.Option(help="same seed, same video")] = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    device: DeviceOpt = "cpu",
) -> None:
    """Play actions through a world model: NAME.mp4, and NAME.actions.mp4 with the controls drawn on it."""
    from jobs.model import Opening
    from jobs.rollout import Options, run

    options = Options(Opening(codec, text, size, steps, guidance, device), seed, yaw, pitch)
    with ticks() as tick:
        for made in run(weights, input_file, folder, options, tick):
            out.print(made.line(), markup=False, soft_wrap=True)

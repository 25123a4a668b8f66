"""`wp2 rollout`: video from weights, an image, actions and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from jobs.commands.base import app, err, out
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
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH; what the weights are made for if not given")] = "",
    seed: Annotated[int, typer.Option(help="same seed, same video")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="of the sampler; 40 if not given")] = None,
    guidance: Annotated[float | None, typer.Option(help="3.5 if not given; 1 takes half the time")] = None,
    yaw: Annotated[float, typer.Option(help="degrees per latent of left and right")] = 3.0,
    pitch: Annotated[
        float | None, typer.Option(help="degrees per latent of up and down; 3, with 4-step weights 1")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; on cuda in bfloat16")] = "cpu",
) -> None:
    """Play actions through a world model: NAME.mp4, and NAME.actions.mp4 with the controls drawn on it."""
    from jobs.model import Opening
    from jobs.rollout import Options, run

    options = Options(Opening(codec, text, size, steps, guidance, device), seed, yaw, pitch)
    with Progress(*Progress.get_default_columns(), console=err, transient=True) as bar:
        task = bar.add_task("reading")

        def tick(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        for made in run(weights, input_file, folder, options, tick):
            out.print(made.line(), markup=False, soft_wrap=True)

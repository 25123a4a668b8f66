"""`wp2 train`: a corpus through the stages of the curriculum."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.commands.base import CorpusArg, JsonOpt, app, complain, out

TRAIN = "Train a model"
STOPPED = 128 + 15  # as a process that SIGTERM ended


@app.command(rich_help_panel=TRAIN)
def train(
    corpus: CorpusArg = "",
    run: Annotated[Path | None, typer.Option("--out", metavar="RUN", help="folder of the run")] = None,
    stages: Annotated[
        str, typer.Option(help="as 1-3, 2a-2b or 3; a number stands for all its phases")
    ] = "1-3",
    preset: Annotated[
        str | None, typer.Option(help="tiny, small, wan1_3b or a14b; small if not given")
    ] = None,
    experts: Annotated[str, typer.Option(help="high,low or one of them; all if not given")] = "",
    config: Annotated[Path | None, typer.Option(help="YAML of what differs; see --show-config")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="of each stage and expert, instead of its own")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(metavar="WEIGHTS", help="that the first of the stages starts from")
    ] = None,
    gate_override: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="go on though this gate did not pass; repeatable")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="steps from checkpoint to checkpoint")] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="go on from this checkpoint of what is in training; later ones are set aside. Leave it out "
            "when the command is given again: it would go back once more",
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="go on with another optimizer, rate or precision than before; run.json remembers from where",
        ),
    ] = False,
    redraw: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE/EXPERT/STEP",
            help="draw other samples at a step that gave no number; run.json remembers it; repeatable",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one")] = None,
    json_logs: JsonOpt = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="print the settings and end")] = False,
) -> None:
    """Train a world model on a corpus with latents and text. The same command goes on where it was stopped;
    under torchrun it is one of its ranks."""
    from dataclasses import replace

    from jobs.train_config import TrainError, load, shown

    settings = load(config, preset)
    if save_every is not None:
        settings = replace(settings, save_every=save_every)
    if show_config:
        out.print(shown(settings), markup=False, soft_wrap=True)
        return
    if not corpus or run is None:
        raise TrainError("give the CORPUS to train on and the folder of the run: wp2 train CORPUS --out RUN")
    from jobs.train import Options
    from jobs.train import train as run_all
    from jobs.train_progress import Progress
    from trainer.distributed.mesh import end_rank
    from trainer.loop import Stopped

    options = Options(
        corpus,
        run,
        stages,
        tuple(name for name in experts.split(",") if name),
        steps,
        init,
        tuple(name for given in gate_override or () for name in given.split(",")),
        device,
        step,
        accept_changes,
        tuple(redraw or ()),
    )
    with Progress(json_logs) as progress:
        try:
            run_all(settings, options, progress.told)
        except Stopped as stopped:
            complain(str(stopped))
            sys.exit(STOPPED)
    end_rank()

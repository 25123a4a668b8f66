"""`wp2 export`: a trained run as weights that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.commands.base import app, err, out
from jobs.commands.weights import MODEL


@app.command(rich_help_panel=MODEL)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of `wp2 train`")],
    folder: Annotated[Path, typer.Option("--out", help="folder to write")],
    layout: Annotated[
        str,
        typer.Option(help="worldplay2: as the release; diffusers: the base, actions and memory beside it"),
    ] = "worldplay2",
    stage: Annotated[str | None, typer.Option(help="the last one with both experts if not given")] = None,
    step: Annotated[int | None, typer.Option(help="the newest of each expert if not given")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="the weights themselves, not their average")] = False,
) -> None:
    """Write both experts of a run in bf16, for `wp2 rollout` and for the loaders of the release."""
    from jobs.export import choose
    from jobs.weights import described
    from trainer.checkpoint_files import CheckpointError
    from trainer.export import ADDITIONS, Layout, expected_bytes
    from trainer.export import export as write
    from trainer.weights.checkpoint import open_checkpoint

    if layout not in tuple(Layout):
        raise CheckpointError(f"no layout is named {layout!r}; the layouts are {', '.join(Layout)}")
    chosen = choose(run, stage, step, lambda line: err.print(line, markup=False, soft_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        tasks = {name: bar.add_task(name, total=expected_bytes(saved)) for name, saved in chosen.items()}
        write(
            chosen,
            folder,
            Layout(layout),
            average=not raw,
            tick=lambda expert, count: bar.advance(tasks[expert], count),
        )
    for line in described(open_checkpoint(folder)):
        out.print(line, markup=False, soft_wrap=True)
    if layout == Layout.DIFFUSERS:
        out.print(f"  without its actions and memory, which lie in {ADDITIONS}", markup=False, soft_wrap=True)

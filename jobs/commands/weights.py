"""`wp2 weights`: look at, convert and compare the weights of world models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.commands.base import app, err, out

if TYPE_CHECKING:
    from trainer.weights.checkpoint import Checkpoint
    from trainer.weights.transfer import Tick

MODEL = "Run a model"
weights = typer.Typer(no_args_is_help=True, help="Look at, convert and compare the weights of world models.")
app.add_typer(weights, name="weights", rich_help_panel=MODEL)

PathArg = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="folder with both experts, folder of one, or a .safetensors file"),
]
DIFFERENT = 1


@weights.command()
def inspect(path: PathArg) -> None:
    """Say what weights are: kind, sizes, counts, bytes. Reads headers only; refuses what does not fit."""
    from jobs.weights import described
    from trainer.weights.checkpoint import open_checkpoint

    for line in described(open_checkpoint(path)):
        out.print(line, markup=False, soft_wrap=True)


@weights.command()
def convert(
    path: PathArg,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write")],
    to: Annotated[
        str, typer.Option(help="native: two folders with the names of Wan; diffusers: of the base only")
    ] = "native",
    fresh: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="add actions and memory to a base; they change nothing yet"),
    ] = None,
) -> None:
    """Write weights in bf16 in the layout of the release, or of diffusers; one tensor at a time."""
    from trainer.model.adapters import Naming
    from trainer.weights.checkpoint import open_checkpoint
    from trainer.weights.tensorfile import WeightsError
    from trainer.weights.transfer import convert as write

    if to not in tuple(Naming):
        raise WeightsError(f"no layout is named {to!r}; the layouts are {', '.join(Naming)}")
    source = open_checkpoint(path)
    with _bar(source) as tick:
        write(source, folder, Naming(to), fresh, tick)
    inspect(folder)


@weights.command()
def diff(
    left: PathArg, right: Annotated[Path, typer.Argument(metavar="OTHER", help="in any layout")]
) -> None:
    """Compare two checkpoints: names, shapes, largest difference of values. Exit code 1 if they differ."""
    from jobs.weights import compared
    from trainer.weights.checkpoint import open_checkpoint
    from trainer.weights.transfer import diff as compare

    first, second = open_checkpoint(left), open_checkpoint(right)
    with _bar(first) as tick:
        differences = compare(first, second, tick)
    for difference in differences:
        for line in compared(difference):
            out.print(line, markup=False, soft_wrap=True)
    if not all(d.equal for d in differences):
        raise typer.Exit(DIFFERENT)


@contextmanager
def _bar(checkpoint: Checkpoint) -> Iterator[Tick]:
    """Bytes that were read, expert by expert."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        tasks = {e.name: progress.add_task(e.name, total=e.bytes) for e in checkpoint.experts}
        yield lambda expert, count: progress.advance(tasks[expert], count)

"""`wp2 eval history`: does a model use its actions and its memory?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from jobs.commands.base import complain, err, out
from jobs.commands.evaluate import OutOpt, SeedOpt, evaluate


@evaluate.command()
def history(
    model: Annotated[
        Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="folder of `wp2 train`, or of weights")
    ],
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="whose held-out clips are read")],
    folder: OutOpt,
    stage: Annotated[
        str | None,
        typer.Option(help="that asks as the model is asked: 1 to 3; of a run its last, of weights 2b"),
    ] = None,
    clips: Annotated[int, typer.Option(min=2, max=100000, help="of each length of history, at most")] = 32,
    levels: Annotated[int, typer.Option(min=1, max=1000, help="noise levels of each expert")] = 4,
    lengths: Annotated[int, typer.Option(min=1, max=1000, help="different lengths of history")] = 3,
    longest: Annotated[int, typer.Option(min=0, max=100000, help="chunks of history, at most")] = 24,
    batch: Annotated[int, typer.Option(min=2, max=100000, help="clips of a pass")] = 4,
    raw: Annotated[bool, typer.Option("--raw", help="of a run: not the average of its weights")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    seed: SeedOpt = 0,
) -> None:
    """Held-out flow loss by noise level and by history, with actions or memory made wrong; paired."""
    from jobs.evaluate.history import HistoryOptions
    from jobs.evaluate.history_run import NOT_HELD_OUT, run
    from jobs.evaluate.page import shown, write

    options = HistoryOptions(clips=clips, batch=batch, levels=levels, seed=seed)
    with Progress(*Progress.get_default_columns(), console=err, transient=True) as bar:
        task = bar.add_task("batches")
        report = run(
            model,
            corpus,
            stage,
            (lengths, longest),
            options,
            average=not raw,
            device=device,
            tick=lambda done, of: bar.update(task, completed=done, total=of),
        )
    page = write(report, folder)
    for number in report.numbers:
        value = number.value
        mean, low, high = (shown(v, "+.5f") for v in (value.mean, value.low, value.high))
        out.print(
            f"{number.part}: {number.measure} {mean} ({low} to {high}), {number.value.groups} clips",
            markup=False,
            soft_wrap=True,
        )
    if NOT_HELD_OUT in report.notes:
        complain(NOT_HELD_OUT)
    out.print(str(page), markup=False, soft_wrap=True)

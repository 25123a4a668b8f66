"""`wp2 record`: footage with truth, for the demo and the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from jobs.commands.base import MAKE, app, err, out


@app.command(rich_help_panel=MAKE)
def record(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder for the recordings")],
    seed: Annotated[int, typer.Option(help="same seed and counts: same bytes")] = 0,
    navigation: Annotated[int, typer.Option(help="exploration recordings")] = 4,
    loops: Annotated[int, typer.Option(help="walks that come back to their start")] = 1,
    events: Annotated[int, typer.Option(help="doors, pick-ups and fights")] = 1,
    sessions: Annotated[
        int, typer.Option(help="recordings of 3 minutes with menus, deaths, loading and idling")
    ] = 0,
    seconds: Annotated[float, typer.Option(help="length of a navigation recording")] = 30.0,
    third_person: Annotated[float, typer.Option(help="share of recordings in third person")] = 0.25,
) -> None:
    """Play ViZDoom and record video, input log, camera telemetry and game log."""
    from jobs.record import record as play

    with Progress(*Progress.get_default_columns(), console=err, transient=True) as bar:
        task = bar.add_task("recording")
        made = play(
            folder,
            seed=seed,
            navigation=navigation,
            loops=loops,
            events=events,
            sessions=sessions,
            seconds=seconds,
            third_person_share=third_person,
            progress=lambda name, done, of: bar.update(task, description=name, completed=done, total=of),
        )
    for summary in made:
        out.print(summary.line(), soft_wrap=True)

"""`wp2 calibrate-quality` and `wp2 select`: which clips deserve training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.commands.base import MAKE, ConfigOpt, CorpusArg, app, err, out


@app.command("calibrate-quality", rich_help_panel=MAKE)
def calibrate_quality(
    corpus: CorpusArg,
    config: ConfigOpt = None,
    sample: Annotated[int | None, typer.Option(min=1, help="most clips of a game or source")] = None,
    picture: Annotated[
        Path | None, typer.Option("--out", help="PNG of the distributions with the thresholds in them")
    ] = None,
) -> None:
    """Freeze the distribution of a corpus's scores as a new version, which `wp2 select` then judges by."""
    from jobs.config import load
    from jobs.select import run_calibrate

    settings = load(config)
    version, _ = run_calibrate(corpus, settings.select, settings.storage, sample, picture)
    out.print(f"statistics/quality-v{version:04d}.json; `wp2 select {corpus}` judges by it")
    if picture is not None:
        out.print(str(picture))


@app.command(rich_help_panel=MAKE)
def select(corpus: CorpusArg, config: ConfigOpt = None) -> None:
    """Give every clip a tier and its reasons by the policy in the config; rewrites no tar and no score."""
    from jobs.config import load
    from jobs.select import run_select, show

    settings = load(config)
    show(run_select(corpus, settings.select, settings.storage, err), out)

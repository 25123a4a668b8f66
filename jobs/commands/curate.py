"""`wp2 curate`, `recalibrate`, `verify` and `status`: a source to verified shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from jobs.commands.base import (
    MAKE,
    SEE,
    AddressOpt,
    ConfigOpt,
    CorpusArg,
    JsonOpt,
    OutOpt,
    SourceArg,
    app,
    err,
    open_for,
    out,
)
from pipeline.status import CorpusStatus
from schemas.quality import Status


@app.command(rich_help_panel=MAKE)
def curate(
    source: SourceArg,
    corpus: OutOpt,
    config: ConfigOpt = None,
    only: Annotated[
        str | None, typer.Option(help="run this stage (and what it needs), nothing after it")
    ] = None,
    anew: Annotated[str | None, typer.Option("--from", help="make this stage and all after it again")] = None,
    address: AddressOpt = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="try failed clips again")] = False,
    json_logs: JsonOpt = False,
) -> None:
    """Bring every clip of a source to verified shards. Run it again to go on, or to add what is new."""
    _curate(source, corpus, config, address, json_logs, only=only, anew=anew, retry_failed=retry_failed)


@app.command(rich_help_panel=MAKE)
def recalibrate(
    source: SourceArg,
    corpus: OutOpt,
    config: ConfigOpt = None,
    address: AddressOpt = None,
    json_logs: JsonOpt = False,
) -> None:
    """Measure cameras, rotation rates and the linear codec again, and remake what uses them."""
    _curate(source, corpus, config, address, json_logs, recalibrate=True)


def _curate(
    source: str, corpus: str, config: Path | None, address: str | None, json_logs: bool, **how: Any
) -> None:
    from jobs.config import load
    from jobs.corpus_run import run_curate
    from jobs.select import show

    outcome = run_curate(
        source, corpus, load(config), address=address, json_logs=json_logs, console=err, **how
    )
    for note in outcome.notes:
        err.print(f"note: {note}", markup=False, soft_wrap=True)
    if outcome.ignored:
        passed = ", ".join(f"{n} {kind or 'without suffix'}" for kind, n in sorted(outcome.ignored.items()))
        err.print(f"passed over in the source: {passed}", markup=False)
    _, cut = show_status(corpus, config)
    if outcome.selection is not None:
        show(outcome.selection, out)
    problems = [f"shards of {line}" for line in outcome.shard_failures]
    problems += [f"unreadable, to be tried again: {line}" for line in outcome.unreadable]
    if uncut := cut.stages["clips", Status.FAILED]:
        problems.append(
            f"{uncut} recordings could not be cut and are no clips: see `wp2 table {corpus} failures`, "
            "then run again with --retry-failed"
        )
    for line in problems:
        err.print(f"wp2: {line}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@app.command(rich_help_panel=MAKE)
def verify(corpus: CorpusArg, config: ConfigOpt = None) -> None:
    """Check every published byte of a corpus; name each file and member that is not what it should be."""
    from pipeline.shards.verify import verify as check

    store = open_for(corpus, config)
    findings = check(store)
    for finding in findings:
        out.print(f"{finding}", markup=False, soft_wrap=True)
    if findings:
        err.print(
            f"wp2: {len(findings)} findings: restore these files, or remove them and run `wp2 curate` again"
        )
        raise typer.Exit(1)
    out.print("every published file is what its inventory says")


@app.command(rich_help_panel=SEE)
def status(corpus: CorpusArg, config: ConfigOpt = None) -> None:
    """Units done, rejected and failed, per stage, and the reasons."""
    show_status(corpus, config)


def show_status(corpus: str, config: Path | None) -> tuple[CorpusStatus, CorpusStatus]:
    """Print the state of a corpus, and answer with that of its clips and of its recordings."""
    from jobs.stages import SHOWN
    from pipeline.recordings import recordings_of
    from pipeline.status import corpus_status

    store = open_for(corpus, config)
    found, cut = corpus_status(store), corpus_status(recordings_of(store))
    title = (
        f"{corpus}: {found.clips} clips of {cut.clips} recordings; partitions: {found.partitions}, "
        f"complete {found.marked}"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("stage", "ok", "rejected", "failed", "CPU s"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in SHOWN:
        counts = [
            str(found.stages[stage, s] + cut.stages[stage, s])
            for s in (Status.OK, Status.REJECTED, Status.FAILED)
        ]
        table.add_row(stage, *counts, f"{found.seconds[stage] + cut.seconds[stage]:.0f}")
    out.print(table)
    for (stage, verdict, reason), n in sorted((found.reasons + cut.reasons).items(), key=lambda x: -x[1]):
        out.print(f"  {n:>7} {verdict} at {stage}: {reason}", markup=False)
    return found, cut

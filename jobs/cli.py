"""The `wp2` command. Each command is thin: it reads its arguments, calls one function and prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import typer
from pydantic import BaseModel
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pipeline.corpus import CorpusError, open_corpus
from pipeline.store import Store
from schemas.errors import UserError
from schemas.quality import Status
from schemas.tables import TABLES

app = typer.Typer(
    name="wp2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Raw gameplay and navigation video to the shards that train a steerable world model.",
)
# Piped output is not cut to a terminal's width.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
err = Console(stderr=True, highlight=False)

INTERRUPTED = 130
MAKE, SEE, SETTINGS = "Make a corpus", "Look at a corpus", "Settings"

CorpusArg = Annotated[str, typer.Argument(metavar="CORPUS", help="folder or URL of a corpus")]
ConfigOpt = Annotated[Path | None, typer.Option("--config", help="YAML file; see `wp2 config`")]


def main() -> None:
    """Entry point: known errors end in one line and exit code 1."""
    try:
        app()
    except UserError as error:
        _complain(str(error))
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # how typer answers Ctrl-C
            _complain("stopped; the same command goes on from here")
        raise
    except KeyboardInterrupt:  # while modules load
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `wp2 table ... | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}")
        sys.exit(1)


def _complain(text: str) -> None:
    err.print(f"wp2: {text}", markup=False, soft_wrap=True)


def _open(corpus: str, config: Path | None) -> Store:
    """A corpus to read. The config is loaded only where one is given: it imports every stage."""
    if config is None:
        return open_corpus(corpus)
    from jobs.config import load

    return open_corpus(corpus, load(config).storage)


@app.command(rich_help_panel=MAKE)
def record(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder for the recordings")],
    seed: Annotated[int, typer.Option(help="same seed and counts: same bytes")] = 0,
    navigation: Annotated[int, typer.Option(help="exploration recordings")] = 4,
    loops: Annotated[int, typer.Option(help="walks that come back to their start")] = 1,
    events: Annotated[int, typer.Option(help="doors, pick-ups and fights")] = 1,
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
            seconds=seconds,
            third_person_share=third_person,
            progress=lambda name, done, of: bar.update(task, description=name, completed=done, total=of),
        )
    for summary in made:
        out.print(summary.line(), soft_wrap=True)


SourceArg = Annotated[str, typer.Argument(metavar="SOURCE", help="KIND:PATH_OR_URL; kinds: folder, gameplay")]
OutOpt = Annotated[str, typer.Option("--out", metavar="CORPUS", help="folder or URL of the corpus")]
AddressOpt = Annotated[
    str | None, typer.Option(help="a running Ray cluster; a local one is started if not given")
]
JsonOpt = Annotated[bool, typer.Option("--json-logs", help="progress as JSON lines on stderr")]


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
    """Measure cameras and rotation rates of every game again, as new versions, and remake what uses them."""
    _curate(source, corpus, config, address, json_logs, recalibrate=True)


def _curate(
    source: str, corpus: str, config: Path | None, address: str | None, json_logs: bool, **how: Any
) -> None:
    from jobs.config import load
    from jobs.corpus_run import run_curate

    outcome = run_curate(
        source, corpus, load(config), address=address, json_logs=json_logs, console=err, **how
    )
    for note in outcome.notes:
        err.print(f"note: {note}", markup=False, soft_wrap=True)
    if outcome.ignored:
        passed = ", ".join(f"{n} {kind or 'without suffix'}" for kind, n in sorted(outcome.ignored.items()))
        err.print(f"passed over in the source: {passed}", markup=False)
    status(corpus, config)
    problems = [f"shards of {line}" for line in outcome.shard_failures]
    problems += [f"unreadable, to be tried again: {line}" for line in outcome.unreadable]
    for line in problems:
        err.print(f"wp2: {line}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@app.command(rich_help_panel=MAKE)
def verify(corpus: CorpusArg, config: ConfigOpt = None) -> None:
    """Check every published byte of a corpus; name each file and member that is not what it should be."""
    from pipeline.shards.verify import verify as check

    store = _open(corpus, config)
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
    from jobs.stages import STAGES
    from pipeline.status import corpus_status

    found = corpus_status(_open(corpus, config))
    title = f"{corpus}: {found.clips} clips; partitions: {found.partitions}, complete {found.marked}"
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in ("stage", "ok", "rejected", "failed", "CPU s"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in STAGES:
        counts = [str(found.stages[stage, s]) for s in (Status.OK, Status.REJECTED, Status.FAILED)]
        table.add_row(stage, *counts, f"{found.seconds[stage]:.0f}")
    out.print(table)
    for (stage, verdict, reason), n in sorted(found.reasons.items(), key=lambda x: -x[1]):
        out.print(f"  {n:>7} {verdict} at {stage}: {reason}", markup=False)


@app.command(rich_help_panel=SEE)
def table(
    corpus: CorpusArg,
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(TABLES))],
    csv: Annotated[bool, typer.Option("--csv", help="every row as CSV on stdout")] = False,
    clip: Annotated[str, typer.Option(help="rows of one clip only: id, first digits or file name")] = "",
    columns: Annotated[str, typer.Option(help="columns to give, separated by commas")] = "",
    rows: Annotated[int, typer.Option(min=1, help="rows to print without --csv")] = 40,
    config: ConfigOpt = None,
) -> None:
    """Print a table; every column is described in docs/tables.md."""
    from pipeline.tables import batches, find_clip

    if name not in TABLES:
        raise CorpusError(f"no table is named {name!r}; the tables are {', '.join(TABLES)}")
    chosen = columns.split(",") if columns else TABLES[name].names
    for column in chosen:
        if column not in TABLES[name].names:
            raise CorpusError(
                f"table {name} has no column {column!r}; it has {', '.join(TABLES[name].names)}"
            )
    store = _open(corpus, config)
    found = batches(store, name, find_clip(store, clip) if clip else "")
    if csv:
        _write_csv(found, pa.schema([TABLES[name].field(c) for c in chosen]))
    else:
        _print(found, chosen, rows)


def _write_csv(found: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
    with pa.output_stream(sys.stdout.buffer) as sink, pacsv.CSVWriter(sink, schema) as writer:
        for batch in found:
            writer.write_batch(batch.select(schema.names))


def _print(found: Iterator[pa.RecordBatch], columns: list[str], rows: int) -> None:
    shown = Table(*columns, box=SIMPLE)
    values = (row for batch in found for row in batch.select(columns).to_pylist())
    for row in islice(values, rows):
        shown.add_row(*(_cell(v) for v in row.values()))
    out.print(shown)
    if next(values, None) is not None:
        out.print(f"the first {rows} rows; --rows N for more, --csv for all")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command(rich_help_panel=SEE)
def show(
    corpus: CorpusArg,
    clip: Annotated[str, typer.Argument(metavar="CLIP", help="clip id, its first digits, or its file name")],
    picture: Annotated[
        Path | None, typer.Option("--out", help="PNG to write; <clip>.png if not given")
    ] = None,
    config: ConfigOpt = None,
) -> None:
    """Draw one clip: contact sheet, trajectory, yaw rate against its log."""
    from jobs.show import draw
    from pipeline.tables import find_clip, units

    store = _open(corpus, config)
    clip_id = find_clip(store, clip)
    target = picture or Path(f"{clip_id}.png")
    if target.suffix.lower() not in (".png", ".jpg", ".pdf", ".svg"):
        raise CorpusError(f"{target} must end in .png, .jpg, .pdf or .svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    draw(next(units(store, clip_id)), target)
    out.print(str(target))


@app.command("config", rich_help_panel=SETTINGS)
def show_config(config: ConfigOpt = None) -> None:
    """Print the resolved config: every key, its value and its meaning."""
    from jobs.config import load, render

    print(render(load(config)))


@app.command(rich_help_panel=SETTINGS)
def schema(
    name: Annotated[str, typer.Argument(help="annotation, caption, config, or a table")] = "annotation",
) -> None:
    """Print a JSON Schema (records) or an Arrow schema (tables, index)."""
    from jobs.config import CurateConfig
    from schemas.caption import StructuredCaption
    from schemas.sample import Annotation, index_schema

    records: dict[str, type[BaseModel]] = {
        "annotation": Annotation,
        "caption": StructuredCaption,
        "config": CurateConfig,
    }
    if name in records:
        print(json.dumps(records[name].model_json_schema(), indent=2))
    elif name in TABLES or name == "index":
        print(index_schema() if name == "index" else TABLES[name])
    else:
        names = [*records, "index", *TABLES]
        raise CorpusError(f"no schema is named {name!r}; the schemas are {', '.join(names)}")

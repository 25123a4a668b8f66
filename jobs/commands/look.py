"""`wp2 table` and `wp2 show`: what a corpus holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.csv as pacsv
import typer
from rich.box import SIMPLE
from rich.table import Table

from jobs.commands.base import SEE, ConfigOpt, CorpusArg, app, open_for, out
from pipeline.corpus import CorpusError
from schemas.tables import TABLES


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
    store = open_for(corpus, config)
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

    store = open_for(corpus, config)
    clip_id = find_clip(store, clip)
    target = picture or Path(f"{clip_id}.png")
    if target.suffix.lower() not in (".png", ".jpg", ".pdf", ".svg"):
        raise CorpusError(f"{target} must end in .png, .jpg, .pdf or .svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    draw(next(units(store, clip_id)), target)
    out.print(str(target))

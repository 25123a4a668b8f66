"""What every command shares: the app, its consoles, common arguments, and how a command ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipeline.corpus import open_corpus
from pipeline.store import Store

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

MAKE, SEE, SETTINGS = "Make a corpus", "Look at a corpus", "Settings"

CorpusArg = Annotated[str, typer.Argument(metavar="CORPUS", help="folder or URL of a corpus")]
ConfigOpt = Annotated[Path | None, typer.Option("--config", help="YAML file; see `wp2 config`")]
SourceArg = Annotated[str, typer.Argument(metavar="SOURCE", help="KIND:PATH_OR_URL; kinds: folder, gameplay")]
OutOpt = Annotated[str, typer.Option("--out", metavar="CORPUS", help="folder or URL of the corpus")]
AddressOpt = Annotated[
    str | None, typer.Option(help="a running Ray cluster; a local one is started if not given")
]
JsonOpt = Annotated[bool, typer.Option("--json-logs", help="progress as JSON lines on stderr")]


def complain(text: str) -> None:
    err.print(f"wp2: {text}", markup=False, soft_wrap=True)


def open_for(corpus: str, config: Path | None) -> Store:
    """A corpus to read. The config is loaded only where one is given: it imports every stage."""
    if config is None:
        return open_corpus(corpus)
    from jobs.config import load

    return open_corpus(corpus, load(config).storage)

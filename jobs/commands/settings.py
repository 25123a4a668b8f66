"""`wp2 config` and `wp2 schema`: every setting and every record."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from pydantic import BaseModel

from jobs.commands.base import SETTINGS, ConfigOpt, app
from pipeline.corpus import CorpusError
from schemas.tables import TABLES


@app.command("config", rich_help_panel=SETTINGS)
def show_config(config: ConfigOpt = None) -> None:
    """Print the resolved config: every key, its value and its meaning."""
    from jobs.config import load, render

    print(render(load(config)))


@app.command(rich_help_panel=SETTINGS)
def schema(
    name: Annotated[
        str, typer.Argument(help="annotation, caption, config, policy, or a table")
    ] = "annotation",
) -> None:
    """Print a JSON Schema (records) or an Arrow schema (tables, index)."""
    from jobs.config import CurateConfig
    from schemas.caption import StructuredCaption
    from schemas.policy import Policy
    from schemas.sample import Annotation, index_schema

    records: dict[str, type[BaseModel]] = {
        "annotation": Annotation,
        "caption": StructuredCaption,
        "config": CurateConfig,
        "policy": Policy,
    }
    if name in records:
        print(json.dumps(records[name].model_json_schema(), indent=2))
    elif name in TABLES or name == "index":
        print(index_schema() if name == "index" else TABLES[name])
    else:
        names = [*records, "index", *TABLES]
        raise CorpusError(f"no schema is named {name!r}; the schemas are {', '.join(names)}")

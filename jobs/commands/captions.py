"""`wp2 caption`: captions from a served model. What they will cost says `wp2 plan` (plan.py)."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.commands import plan as plan
from jobs.commands.base import MAKE, AddressOpt, ConfigOpt, CorpusArg, JsonOpt, app, err, out
from schemas.errors import UserError


@app.command(rich_help_panel=MAKE)
def caption(
    corpus: CorpusArg,
    config: ConfigOpt = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="an OpenAI-protocol server; may be repeated")
    ] = None,
    serve: Annotated[
        str, typer.Option(metavar="MODEL", help="start vLLM engines of this model for the run")
    ] = "",
    engines: Annotated[int | None, typer.Option(min=1, help="engines to start; default: one a GPU")] = None,
    budget_tokens: Annotated[int | None, typer.Option(min=0, help="end cleanly after so many tokens")] = None,
    address: AddressOpt = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="ask again for failed clips")] = False,
    json_logs: JsonOpt = False,
) -> None:
    """Caption every clip of a corpus with a vision-language model, and write its shards."""
    from jobs.caption_run import run_caption
    from jobs.commands.curate import show_status
    from jobs.config import load
    from schemas.quality import Status

    settings = load(config)
    told = settings.serve
    if endpoint:
        told = told.model_copy(update={"endpoints": tuple(endpoint)})
    if budget_tokens is not None:
        told = told.model_copy(update={"budget": told.budget.model_copy(update={"tokens": budget_tokens})})
    for url in told.endpoints:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"endpoint {url!r} is no http address: write http://HOST:PORT")
    if bool(serve) == bool(told.endpoints):
        raise UserError("give --endpoint URL (or serve.endpoints in the config), or --serve MODEL")
    started = settings.engines
    if engines is not None:
        started = started.model_copy(update={"engines": engines})
    outcomes = run_caption(
        corpus,
        settings.model_copy(update={"serve": told}),
        started,
        model=serve,
        address=address,
        retry_failed=retry_failed,
        json_logs=json_logs,
        console=err,
    )
    done, rejected, failed = (sum(o.counts[s] for o in outcomes) for s in Status)
    out.print(f"{done} clips captioned, {rejected} rejected, {failed} failed in this run")
    found, _ = show_status(corpus, config)
    problems = [line for o in outcomes for line in o.shard_failures]
    for line in problems:
        err.print(f"wp2: shards of {line}", markup=False, soft_wrap=True)
    if standing := found.stages["caption", Status.FAILED]:
        err.print(f"wp2: {standing} clips have no answer yet: `wp2 caption ... --retry-failed` asks again")
    if problems or standing:
        raise typer.Exit(1)

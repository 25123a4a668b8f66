"""One `wp2 curate`: opens source and corpus, starts the pool, runs the curator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from jobs.config import CurateConfig, RunConfig
from jobs.curate import Curator, Outcome
from jobs.package import package_env
from jobs.progress import Progress
from jobs.runner import Pool, RayPool
from jobs.stages import STAGES, flow
from pipeline.corpus import open_corpus, sole_writer
from pipeline.flow import forget
from pipeline.shards.stage import Shards
from pipeline.sources import discover, open_source
from pipeline.statistics import newest
from pipeline.store import Store
from schemas.action import RotationRates

ROTATION = "rotation"


def run_curate(
    source: str,
    corpus_url: str,
    config: CurateConfig,
    only: str | None = None,
    anew: str | None = None,
    address: str | None = None,
    retry_failed: bool = False,
    json_logs: bool = False,
    console: Console | None = None,
    pool: Pool | None = None,
) -> Outcome:
    """Run to the end, or to the first error that is not a clip's.

    only, anew: names of stages (StageOrderError for others). pool: None starts Ray.
    Raises BudgetExceeded, CorpusError, SourceError, RunnerError.
    """
    kind, store = open_source(source, config.storage)
    name = f"{kind}:{store.url}"
    corpus = open_corpus(corpus_url, config.storage, create=True)
    progress = Progress(STAGES, json_logs, console or Console(stderr=True))
    with sole_writer(corpus), progress:
        progress.enter("list")
        corpus.sweep()
        listing = discover(kind, store, config.source)
        config = with_statistics(config, corpus)
        work = flow(config, corpus, only)
        if anew is not None:
            forget({}, work.stages, anew)  # refuse a wrong name before anything starts
        shards = Shards(config.shards, corpus) if only in (None, Shards.name) else None
        progress.enter("start")
        with contextlib.nullcontext(pool) if pool else ray_pool(config.run, address) as used:
            curator = Curator(corpus, config, name, work, shards, used, progress, anew, retry_failed)
            outcome = curator.run(curator.update_catalogue(store, listing))
    return replace(outcome, ignored=dict(listing.ignored), notes=listing.notes)


@contextlib.contextmanager
def ray_pool(run: RunConfig, address: str | None) -> Iterator[RayPool]:
    """Ray for the length of a run: our own on this machine, or a running cluster, which is sent our code."""
    with contextlib.ExitStack() as stack:
        shipped = stack.enter_context(package_env()) if address else None
        pool = RayPool(address, run.cpus, run.in_flight, run.dashboard, shipped)
        stack.callback(pool.close)
        yield pool


def with_statistics(config: CurateConfig, corpus: Store) -> CurateConfig:
    """The config with the corpus's newest frozen records, by value. A record in the config file wins."""
    if config.actions.rates.rates:
        return config
    rates = newest(corpus, ROTATION, RotationRates) or RotationRates()
    return config.model_copy(update={"actions": config.actions.model_copy(update={"rates": rates})})

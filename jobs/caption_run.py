"""`wp2 caption`: captions for the clips of a corpus from a served model, then the shards that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rich.console import Console

from jobs.captioner import captioning
from jobs.config import CurateConfig
from jobs.corpus_run import ray_pool
from jobs.curate import Curator, Outcome
from jobs.engine import EngineConfig
from jobs.progress import Progress
from jobs.runner import Pool
from jobs.select import CLIP_STAGES
from jobs.stages import SHOWN, Statistics, flow, shards
from pipeline.caption.attempts import merge
from pipeline.caption.stage import Caption
from pipeline.catalogue import Catalogue
from pipeline.corpus import open_corpus, require_catalogue, sole_writer
from pipeline.flow import Flow
from pipeline.quality.select import select
from pipeline.shards.stage import Shards
from pipeline.shards.tiers import heal


def run_caption(
    corpus_url: str,
    config: CurateConfig,
    engines: EngineConfig,
    model: str = "",
    address: str | None = None,
    retry_failed: bool = False,
    json_logs: bool = False,
    console: Console | None = None,
    pool: Pool | None = None,
) -> list[Outcome]:
    """Caption every clip that has come to the caption stage, then write the shards of whole partitions.

    model: started by `engines` on the GPUs of Ray; "" asks at config.serve.endpoints. A clip that holds a
    caption of this config keeps it. pool: writes the shards; None starts Ray.
    Returns an outcome a source of the corpus, of its captions and of partitions that could not be written.
    Raises BudgetReached, NotReady, EndpointError, NoEndpoint, EngineError, RunnerError, BudgetExceeded,
    CorpusError.
    """
    config = config.model_copy(update={"caption": config.caption.model_copy(update={"source": "vlm"})})
    corpus = open_corpus(corpus_url, config.storage)
    require_catalogue(corpus)
    console = console or Console(stderr=True)
    progress = Progress(SHOWN, json_logs, console)
    with sole_writer(corpus), progress:
        progress.enter("start")
        heal(corpus)
        merge(corpus)
        catalogue = Catalogue.load(corpus)
        statistics = Statistics.newest(corpus)
        work = flow(config, corpus, statistics, Caption.name)

        def run(pool: Pool, work: Flow, last: Shards | None) -> list[Outcome]:
            return [
                Curator(
                    corpus,
                    config,
                    source,
                    work,
                    last,
                    pool,
                    progress,
                    retry_failed=retry_failed and not last,
                ).run(catalogue)
                for source in catalogue.sources()
            ]

        with contextlib.nullcontext(pool) if pool else ray_pool(config.run, address) as used:
            with captioning(work, engines, model, address is None, _teller(console)) as captions:
                outcomes = run(captions, work, None)
            written = run(used, flow(config, corpus, statistics), shards(config, corpus))
        for outcome, wrote in zip(outcomes, written, strict=True):
            outcome.shard_failures += wrote.shard_failures
        if len(catalogue):
            progress.enter("select")
            select(corpus, config.select, CLIP_STAGES)
    return outcomes


def _teller(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False)

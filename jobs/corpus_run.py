"""One `wp2 curate`: opens source and corpus, starts the pool, runs the curator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from jobs.config import CurateConfig, RunConfig
from jobs.curate import Curator, Outcome
from jobs.package import package_env
from jobs.progress import Progress
from jobs.runner import Pool, RayPool
from jobs.stages import STAGES, Statistics, flow
from pipeline.actions import Actions
from pipeline.calibration import CAMERA, ROTATION, calibrate_cameras, calibrate_rotation
from pipeline.catalogue import Catalogue
from pipeline.corpus import keep_apart, open_corpus, require_catalogue, sole_writer
from pipeline.flow import forget
from pipeline.observe import Observe
from pipeline.pose.stage import Pose
from pipeline.shards.stage import Shards
from pipeline.sources import discover, open_source
from pipeline.statistics import freeze
from pipeline.store import Store
from pipeline.tables import units
from schemas.action import RotationRates
from schemas.camera import Cameras


def run_curate(
    source: str,
    corpus_url: str,
    config: CurateConfig,
    only: str | None = None,
    anew: str | None = None,
    address: str | None = None,
    retry_failed: bool = False,
    recalibrate: bool = False,
    json_logs: bool = False,
    console: Console | None = None,
    pool: Pool | None = None,
) -> Outcome:
    """Run to the end, or to the first error that is not a clip's.

    only, anew: names of stages (StageOrderError for others). recalibrate: measure cameras and rotation rates
    of every game again, as new versions. pool: None starts Ray.
    Raises BudgetExceeded, CorpusError, SourceError, RunnerError.
    """
    kind, store = open_source(source, config.storage)
    corpus = open_corpus(corpus_url, config.storage, create=True)
    keep_apart(store, corpus)
    require_catalogue(corpus)
    progress = Progress(STAGES, json_logs, console or Console(stderr=True))
    with sole_writer(corpus), progress:
        progress.enter("list")
        corpus.sweep()
        listing = discover(kind, store, config.source)
        if anew not in (None, Shards.name):  # refuse a wrong name before anything starts
            forget({}, flow(config, corpus, Statistics.newest(corpus), only).stages, anew)
        progress.enter("start")
        with contextlib.nullcontext(pool) if pool else ray_pool(config.run, address) as used:
            run = _Run(corpus, config, f"{kind}:{store.url}", used, progress, retry_failed)
            scanner = run.curator(only, shards=False)
            catalogue = scanner.update_catalogue(store, listing)
            if only in (None, Shards.name, Actions.name):
                anew = run.calibrate(catalogue, anew, recalibrate)
            outcome = run.curator(only, only in (None, Shards.name), anew).run(catalogue)
    unreadable = scanner.outcome.unreadable
    return replace(outcome, unreadable=unreadable, ignored=dict(listing.ignored), notes=listing.notes)


@dataclass(frozen=True)
class _Run:
    """What every pass over the corpus in one run has in common."""

    corpus: Store
    config: CurateConfig
    source: str
    pool: Pool
    progress: Progress
    retry_failed: bool

    def curator(self, only: str | None, shards: bool, anew: str | None = None) -> Curator:
        """A pass with the newest frozen records."""
        work = flow(self.config, self.corpus, Statistics.newest(self.corpus), only)
        last = Shards(self.config.shards, self.corpus) if shards else None
        return Curator(
            self.corpus,
            self.config,
            self.source,
            work,
            last,
            self.pool,
            self.progress,
            anew,
            self.retry_failed,
        )

    def calibrate(self, catalogue: Catalogue, anew: str | None, everything: bool) -> str | None:
        """Freeze cameras and rotation rates of games that have none yet, each as soon as the stages that it
        is measured from have run over the corpus. Returns the stage that is still to be made anew."""
        held = Statistics.newest(self.corpus)
        cameras, games = held.cameras.games, catalogue.games(without="poses")
        if missing := games if everything else games - set(cameras):
            self._pass(catalogue, Observe.name, anew)
            found = calibrate_cameras(units(self.corpus), missing, self.config.source)
            freeze(self.corpus, CAMERA, Cameras(games=cameras | found.games))
        rates, games = held.rotation.rates, catalogue.games(having="log")
        if missing := games if everything else games - set(rates):
            self._pass(catalogue, Pose.name, anew)
            rotation = calibrate_rotation(units(self.corpus), missing, self.config.source)
            freeze(self.corpus, ROTATION, RotationRates(rates=rates | rotation.rates))
            return anew if anew in (Actions.name, Shards.name) else None
        return anew

    def _pass(self, catalogue: Catalogue, last: str, anew: str | None) -> None:
        work = self.curator(last, shards=False)
        if anew in [stage.name for stage in work.flow.stages]:
            work.anew = anew
        work.run(catalogue)


@contextlib.contextmanager
def ray_pool(run: RunConfig, address: str | None) -> Iterator[RayPool]:
    """Ray for the length of a run: our own on this machine, or a running cluster, which is sent our code."""
    with contextlib.ExitStack() as stack:
        shipped = stack.enter_context(package_env()) if address else None
        pool = RayPool(address, run.cpus, run.in_flight, run.dashboard, shipped)
        stack.callback(pool.close)
        yield pool

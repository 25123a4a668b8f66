"""One `wp2 curate`: opens source and corpus, starts the pool, runs the curator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from jobs.captioner import captioning
from jobs.config import CurateConfig, RunConfig
from jobs.curate import Curator, Outcome
from jobs.package import package_env
from jobs.progress import Progress
from jobs.runner import Lost, Pool, RayPool, RunnerError
from jobs.select import CLIP_STAGES
from jobs.stages import SHOWN, Statistics, flow, shards
from pipeline.actions import Actions
from pipeline.calibration import CAMERA, ROTATION, calibrate_cameras, calibrate_rotation
from pipeline.caption.stage import Caption
from pipeline.catalogue import Catalogue
from pipeline.clips.stage import Clips
from pipeline.corpus import keep_apart, open_corpus, require_catalogue, sole_writer
from pipeline.flow import Flow, StageOrderError, forget
from pipeline.latents.fit import choose, fit_codec, given_codec
from pipeline.latents.stage import CODEC, Latents
from pipeline.observe import Observe
from pipeline.pose.stage import Pose
from pipeline.quality.select import Report, select
from pipeline.recordings import clip_rows, recordings_of
from pipeline.shards.stage import Shards
from pipeline.shards.tiers import heal
from pipeline.sources import discover, open_source
from pipeline.sources.found import Discovery
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
    of every game, and the linear codec, again, as new versions. pool: None starts Ray.
    Raises BudgetExceeded, CorpusError, SourceError, RunnerError, CodecError.
    """
    kind, store = open_source(source, config.storage)
    corpus = open_corpus(corpus_url, config.storage, create=True)
    keep_apart(store, corpus)
    require_catalogue(corpus)
    progress = Progress(SHOWN, json_logs, console or Console(stderr=True))
    with sole_writer(corpus), progress:
        progress.enter("list")
        corpus.sweep()
        recordings_of(corpus).sweep()
        heal(corpus)
        listing = discover(kind, store, config.source)
        if anew == Clips.name:
            raise StageOrderError("a recording is cut once, when it is new: to cut again, make a new corpus")
        # A wrong name, and a path without weights, are refused before anything starts.
        if only != Clips.name:
            stages = flow(config, corpus, Statistics.newest(corpus), only).stages
            if anew not in (None, Shards.name):
                forget({}, stages, anew)
        progress.enter("start")
        with contextlib.nullcontext(pool) if pool else ray_pool(config.run, address) as used:
            run = _Run(corpus, config, f"{kind}:{store.url}", used, progress, retry_failed)
            cutter = run.cutter()
            cutter.run(cutter.update_catalogue(store, listing))
            catalogue = Catalogue.load(corpus).update(
                clip_rows(corpus, Catalogue.load(corpus)), config.run.partition_size, config.run.val_share
            )
            if only == Clips.name:
                return _told(cutter.outcome, cutter, listing)
            if Actions.name in [stage.name for stage in stages]:
                anew = run.calibrate(catalogue, anew, recalibrate)
            if Latents.name in [stage.name for stage in stages]:
                run.fit_codec(catalogue, recalibrate)
            if config.caption.source == "vlm" and only in (None, Shards.name, Caption.name):
                anew = run.captions(catalogue, anew, address is None)
            whole = only in (None, Shards.name)
            outcome = run.curator(only, whole, anew).run(catalogue)
            if whole and len(catalogue):
                outcome.selection = run.select()
    return _told(outcome, cutter, listing)


def _told(outcome: Outcome, cutter: Curator, listing: Discovery) -> Outcome:
    unreadable = cutter.outcome.unreadable
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

    def cutter(self) -> Curator:
        """The pass over the recordings that are new: each is cut once."""
        store = recordings_of(self.corpus)
        cut = Flow((Clips(self.config.clips, self.config.source),), store, self.config.storage)
        return Curator(
            store,
            self.config,
            self.source,
            cut,
            None,
            self.pool,
            self.progress,
            retry_failed=self.retry_failed,
            alone=True,
        )

    def captions(self, catalogue: Catalogue, anew: str | None, local: bool) -> str | None:
        """Everything before captions, then captions, many at once. Returns what is still to be made anew."""
        work = flow(self.config, self.corpus, Statistics.newest(self.corpus), Caption.name)
        self._pass(catalogue, work.stages[-2].name, anew)
        with captioning(work, self.config.engines, "", local, self.progress.console.print) as pool:
            first = anew if anew == Caption.name else None
            Curator(
                self.corpus,
                self.config,
                self.source,
                work,
                None,
                pool,
                self.progress,
                first,
                self.retry_failed,
            ).run(catalogue)
        return anew if anew in SHOWN[SHOWN.index(Caption.name) + 1 :] else None

    def select(self) -> Report:
        """Tiers for every clip, by the policy: an index is never left without."""
        self.progress.enter("select")

        def tell(done: int, of: int) -> None:
            self.progress.finished, self.progress.total = done, of
            self.progress.tick()

        return select(self.corpus, self.config.select, CLIP_STAGES, tell)

    def curator(self, only: str | None, whole: bool, anew: str | None = None) -> Curator:
        """A pass with the newest frozen records. whole: to shards."""
        work = flow(self.config, self.corpus, Statistics.newest(self.corpus), only)
        last = shards(self.config, self.corpus) if whole else None
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
            return anew if anew in SHOWN[SHOWN.index(Actions.name) :] else None
        return anew

    def fit_codec(self, catalogue: Catalogue, everything: bool) -> None:
        """Freeze the linear codec, where the config asks for one and none of its size is there yet.

        The clips that it is fitted on are decoded in a worker. Raises RunnerError, with what is wrong, when
        that comes to nothing; a corpus without a clip to fit on gets none.
        """
        config, held = self.config.latents, Statistics.newest(self.corpus).codec
        if config.codec.kind == "linear" and config.codec.path is not None:
            if held != (given := given_codec(config)):
                freeze(self.corpus, CODEC, given)
            return
        there = held is not None and (held.height, held.width) == (config.height, config.width)
        if config.codec.kind != "linear" or (there and not everything):
            return
        self._pass(catalogue, Observe.name, None)
        self.progress.enter("fit codec")
        self.pool.submit(CODEC, fit_codec, choose(units(self.corpus)), config)
        results = []
        while self.pool.busy:
            results += self.pool.wait(0.5)
            self.progress.tick()
        found = results[0][1]
        if isinstance(found, Lost):
            raise RunnerError(f"the linear codec cannot be fitted: {found.reason}")
        if found is not None:
            freeze(self.corpus, CODEC, found)

    def _pass(self, catalogue: Catalogue, last: str, anew: str | None) -> None:
        work = self.curator(last, whole=False)
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

"""Selection: a tier and its reasons for every clip, as files of their own and as columns of the index.

    selection/<partition>.parquet    clip_id, tier, reasons, duplicate_of
    selection/policy.json            the policy, its thresholds, and the distributions behind them
    index/<partition>.parquet        columns tier and tier_reasons

All of it follows from receipts, the frozen distribution and the policy: nothing is measured again, no tar and
no receipt is written, and the same input gives the same bytes. Source: DESIGN 2, rule 10; docs/selection.md.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.catalogue import Catalogue
from pipeline.quality.duplicates import drop, find_shared
from pipeline.quality.facts import Facts, read_facts
from pipeline.quality.policy import Judge, Moved
from pipeline.quality.thresholds import applied, check_scorer, freeze_first
from pipeline.recordings import recordings_of
from pipeline.shards.inventory import ROOT, partition_names
from pipeline.shards.tiers import set_tiers
from pipeline.shards.write import write_root
from pipeline.store import Store
from schemas import SCHEMA_VERSION
from schemas.policy import AXES, OUT, PENDING, Applied, Policy, QualityStatistics

FOLDER = "selection"
POLICY = f"{FOLDER}/policy.json"
COLUMNS = ("clip_id", "tier", "reasons", "duplicate_of")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Step:
    """One step of the funnel: clips that passed it, and those that it left behind, by reason."""

    name: str
    clips: int
    left: dict[str, int]


@dataclass(frozen=True)
class Share:
    """Clips of a game or source that passed every stage, by tier; `out` among them."""

    group: str
    of: str
    tiers: dict[str, int]


@dataclass(frozen=True)
class Selection:
    """A judged corpus of C clips: tier, reasons joined by |, and the clip that stands for a near-duplicate
    ("" for others), each [C]."""

    facts: Facts
    applied: Applied
    tier: npt.NDArray[np.object_]
    reasons: npt.NDArray[np.object_]
    duplicate_of: npt.NDArray[np.object_]
    sensitivity: list[Moved]


@dataclass(frozen=True)
class Report:
    """What a selection came to. written: partitions whose files changed."""

    recordings: int
    clips: int
    steps: list[Step]
    tiers: dict[str, int]
    shares: list[Share]
    sensitivity: list[Moved]
    thresholds_version: int
    notes: list[str]
    written: int


def selection_path(partition: str) -> str:
    return f"{FOLDER}/{partition}.parquet"


def select(corpus: Store, policy: Policy, stages: Sequence[str], progress: Progress | None = None) -> Report:
    """Judge every clip of a corpus and write what changes. The first time, the distribution of its scores is
    frozen. stages: those that a clip passes, in order. progress: partitions done, and all.

    For the sole writer of the corpus. A kill anywhere is healed by the next call.
    Raises StoreError on damaged files, ScaleError on scores that do not fit their thresholds.
    """
    facts = read_facts(corpus, stages)
    version, statistics = freeze_first(corpus, facts, policy.min_clips)
    check_scorer(facts, statistics)
    chosen = judge(facts, policy, statistics, version)
    sharded = np.zeros(len(facts), np.bool_)
    written = _write(corpus, chosen, sharded, progress)
    _replace(corpus, POLICY, (chosen.applied.model_dump_json(indent=1) + "\n").encode())
    if corpus.exists(ROOT) or sharded.any():
        write_root(corpus)
    recordings = len(Catalogue.load(recordings_of(corpus))) or len(set(facts.column("recording_id")))
    return _report(chosen, statistics, sharded, recordings, written)


def judge(facts: Facts, policy: Policy, statistics: QualityStatistics, version: int) -> Selection:
    """Tiers, reasons and near-duplicates of every clip."""
    groups = sorted(set(facts.column("group")))
    judged = facts.judged
    work = Judge(facts, policy, applied(policy, statistics, version, groups))
    names = np.array([*work.tiers, OUT], object)
    tier = np.where(judged, names[work.rank], PENDING)
    reasons = np.full(len(facts), "", object)
    for clip in np.flatnonzero(judged & (work.rank > 0)):
        reasons[clip] = "|".join(work.reasons(int(clip)))
    status, reason = facts.column("status"), facts.column("reason")
    for clip in np.flatnonzero(~judged):
        if status[clip] in ("rejected", "failed"):
            tier[clip], reasons[clip] = OUT, reason[clip]
    duplicate_of = np.full(len(facts), "", object)
    if policy.duplicates.drop:
        ids, kept = facts.column("clip_id"), judged & (work.rank < len(work.tiers))
        share = policy.duplicates.least_share
        instead = drop(facts.hashes, find_shared(facts.hashes), kept, list(facts.column("split")), share)
        for gone, stands in instead.items():
            tier[gone], duplicate_of[gone] = OUT, ids[stands]
            reasons[gone] = f"near_duplicate: {ids[stands]}"
    return Selection(facts, work.applied, tier, reasons, duplicate_of, work.sensitivity())


def _write(
    corpus: Store, chosen: Selection, sharded: npt.NDArray[np.bool_], progress: Progress | None
) -> int:
    """Write selection and index of every partition; marks the clips that are in a shard."""
    published = set(partition_names([s.path for s in corpus.list("index")], ".json"))
    names, starts = np.unique(chosen.facts.column("partition").astype(str), return_index=True)
    bounds = [*starts.tolist(), len(chosen.facts)]
    ids = chosen.facts.column("clip_id")
    written = 0
    for done, name in enumerate(names, 1):
        rows = slice(bounds[done - 1], bounds[done])
        values = (ids[rows], chosen.tier[rows], chosen.reasons[rows], chosen.duplicate_of[rows])
        changed = _replace(corpus, selection_path(name), _parquet(values, chosen.applied))
        if name in published:
            tiers = dict(zip(values[0], zip(values[1], values[2], strict=True), strict=True))
            samples, new = set_tiers(corpus, str(name), tiers)
            sharded[rows] = np.isin(ids[rows].astype(str), samples)
            changed = changed or new
        written += int(changed)
        if progress is not None:
            progress(done, len(names))
    return written


def _parquet(values: tuple[npt.NDArray[np.object_], ...], about: Applied) -> bytes:
    schema = pa.schema(
        [pa.field(name, pa.string(), nullable=False) for name in COLUMNS],
        metadata={
            "schema_version": str(SCHEMA_VERSION),
            "policy": about.digest,
            "thresholds_version": str(about.thresholds_version),
        },
    )
    columns = [pa.array(v, pa.string()) for v in values]
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), sink, version="2.6", compression="zstd")
    return sink.getvalue()


def _replace(corpus: Store, path: str, data: bytes) -> bool:
    """Write a file unless it holds just that already."""
    if corpus.size(path) == len(data) and corpus.read(path) == data:
        return False
    corpus.write(path, data)
    return True


# --- the report -------------------------------------------------------------------------------------------


def _report(
    chosen: Selection,
    statistics: QualityStatistics,
    sharded: npt.NDArray[np.bool_],
    recordings: int,
    written: int,
) -> Report:
    facts = chosen.facts
    tiers = list(chosen.applied.policy.tiers)
    kept = np.isin(chosen.tier.astype(str), tiers) & sharded
    return Report(
        recordings=recordings,
        clips=len(facts),
        steps=_funnel(chosen, sharded),
        tiers={t: int(((chosen.tier == t) & kept).sum()) for t in tiers},
        shares=_shares(chosen, statistics),
        sensitivity=chosen.sensitivity,
        thresholds_version=chosen.applied.thresholds_version,
        notes=_notes(facts, statistics),
        written=written,
    )


def _funnel(chosen: Selection, sharded: npt.NDArray[np.bool_]) -> list[Step]:
    """Each clip is left behind at one step, or selected: the counts add up to the clips."""
    facts = chosen.facts
    ended, status, reason = facts.column("ended"), facts.column("status"), facts.column("reason")
    at: dict[str, Counter[str]] = {}
    through = np.asarray(pc.is_null(facts.table.column("ended")))
    for clip in np.flatnonzero(~through):
        said = PENDING if status[clip] is None else f"{status[clip]}: {reason[clip].split(':')[0]}"
        at.setdefault(ended[clip], Counter())[said] += 1
    steps, passed = [], len(facts)
    for stage in facts.stages:
        left = at.get(stage, Counter())
        passed -= left.total()
        steps.append(Step(stage, passed, dict(left.most_common())))
    inside = through & sharded
    steps.append(_step("shards", inside, {"not in a shard": int((through & ~sharded).sum())}))
    left = Counter(
        chosen.reasons[c].split(":")[0] if chosen.tier[c] == OUT else "pending: no scores"
        for c in np.flatnonzero(inside)
        if chosen.tier[c] in (OUT, PENDING)
    )
    kept = inside & ~np.isin(chosen.tier.astype(str), [OUT, PENDING])
    steps.append(_step("selected", kept, dict(left.most_common())))
    return steps


def _step(name: str, clips: npt.NDArray[np.bool_], left: dict[str, int]) -> Step:
    return Step(name, int(clips.sum()), {reason: n for reason, n in left.items() if n})


def _shares(chosen: Selection, statistics: QualityStatistics) -> list[Share]:
    groups, judged = chosen.facts.column("group"), chosen.facts.judged
    counts: dict[str, Counter[str]] = {}
    for group, tier in zip(groups[judged], chosen.tier[judged], strict=True):
        counts.setdefault(group, Counter())[tier] += 1
    names = [*chosen.applied.policy.tiers, OUT]
    return [
        Share(group, statistics.of(group)[0], {t: counts[group][t] for t in names})
        for group in sorted(counts)
    ]


def _notes(facts: Facts, statistics: QualityStatistics) -> list[str]:
    """What the thresholds do not rest on: percentiles of others, floors alone, axes without a measure."""
    judged = facts.judged
    notes = []
    least = statistics.min_clips
    pooled = sorted({g for g in facts.column("group")[judged] if g not in statistics.groups})
    count = max((d.n for d in statistics.pooled.values()), default=0)
    if count < least:
        notes.append(f"thresholds rest on {count} clips, {least} are the least for percentiles: floors alone")
    elif pooled:
        notes.append(f"percentiles of all games together, for want of {least} clips: {', '.join(pooled)}")
    for axis, values in zip(AXES, facts.scores[judged].T, strict=True):
        if missing := int(np.isnan(values).sum()):
            notes.append(
                f"{axis} was not measured on {missing} of {int(judged.sum())} clips, and speaks against none"
            )
    return notes

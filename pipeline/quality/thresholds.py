"""The frozen distribution of quality scores, by game or source: where thresholds come from.

    statistics/quality-v0001.json

Made once, from a corpus's first clips; growth never moves it, and only `wp2 calibrate-quality` makes a new
version. Source: spec/faults.md Q5; DESIGN rule 10.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from pipeline.quality.facts import Facts, ScaleError
from pipeline.stage import digest
from pipeline.statistics import freeze, newest, versions
from pipeline.store import Store
from schemas.policy import (
    AXES,
    PERCENTILES,
    Applied,
    AxisLevels,
    Distribution,
    Policy,
    QualityStatistics,
    threshold,
)

KIND = "quality"


def measure(facts: Facts, min_clips: int, sample: int | None = None) -> QualityStatistics:
    """Percentiles of the scores of all clips that have any.

    sample: most clips of a group, the first by a hash of their ids, so that the choice is the same on every
    machine and growth changes as few of it as can be.
    Raises ScaleError when clips were scored by different scorers.
    """
    chosen = np.flatnonzero(facts.scored)
    scorer = _scorer(facts, chosen)
    groups: dict[str, list[int]] = {}
    names = facts.column("group")
    for clip in chosen:
        groups.setdefault(names[clip], []).append(int(clip))
    if sample is not None:
        ids = facts.column("clip_id")
        groups = {g: sorted(c, key=lambda i: _place(str(ids[i])))[:sample] for g, c in groups.items()}
    large = {g: clips for g, clips in groups.items() if len(clips) >= min_clips}
    everything = [clip for clips in groups.values() for clip in clips]
    return QualityStatistics(
        min_clips=min_clips,
        sample=sample,
        aesthetics_by=scorer,
        pooled=_distributions(facts.scores[everything]),
        groups={g: _distributions(facts.scores[large[g]]) for g in sorted(large)},
        small={g: len(groups[g]) for g in sorted(groups) if g not in large},
    )


def _place(clip_id: str) -> str:
    return hashlib.sha256(f"{KIND}:{clip_id}".encode()).hexdigest()


def _scorer(facts: Facts, clips: npt.NDArray[np.intp]) -> str:
    found = sorted({str(name) for name in facts.column("aesthetics_by")[clips] if name is not None})
    if len(found) > 1:
        raise ScaleError(
            f"aesthetics come from {' and '.join(found)}, which do not compare: run `wp2 curate` on every "
            "source with one setting, then `wp2 calibrate-quality`"
        )
    return found[0] if found else ""


def _distributions(scores: npt.NDArray[np.float64]) -> dict[str, Distribution]:
    out = {}
    for axis, values in zip(AXES, scores.T, strict=True):
        there = values[~np.isnan(values)]
        levels = np.percentile(there, PERCENTILES) if len(there) else []
        held: dict[int, float] = {p: round(float(v), 6) for p, v in zip(PERCENTILES, levels, strict=False)}
        out[str(axis)] = Distribution(n=len(there), percentiles=held)
    return out


def frozen(corpus: Store) -> tuple[int, QualityStatistics] | None:
    """The newest record and its version; None when the corpus has none."""
    record = newest(corpus, KIND, QualityStatistics)
    return None if record is None else (versions(corpus, KIND)[-1], record)


def freeze_first(corpus: Store, facts: Facts, min_clips: int) -> tuple[int, QualityStatistics]:
    """The newest record; made and frozen from these clips where there is none."""
    held = frozen(corpus)
    if held is not None:
        return held
    record = measure(facts, min_clips)
    if not facts.scored.any():
        return 0, record
    return freeze(corpus, KIND, record), record


def check_scorer(facts: Facts, statistics: QualityStatistics) -> None:
    """Raise ScaleError when the clips are scored by another scorer than the thresholds."""
    scorer = _scorer(facts, np.flatnonzero(facts.scored))
    if scorer and statistics.aesthetics_by and scorer != statistics.aesthetics_by:
        raise ScaleError(
            f"aesthetics of the clips come from {scorer}, their thresholds from {statistics.aesthetics_by}: "
            "run `wp2 calibrate-quality CORPUS`"
        )


def policy_digest(policy: Policy) -> str:
    """16 hex digits; the order of the tiers counts."""
    return digest(policy, list(policy.tiers))


def applied(policy: Policy, statistics: QualityStatistics, version: int, groups: list[str]) -> Applied:
    """Every threshold of a policy beside the distribution that it came from."""
    return Applied(
        policy=policy,
        digest=policy_digest(policy),
        thresholds_version=version,
        groups={
            group: {
                str(axis): AxisLevels(
                    of=statistics.of(group)[0],
                    distribution=statistics.of(group)[1][axis],
                    tiers={tier: threshold(policy, statistics, group, tier, axis) for tier in policy.tiers},
                )
                for axis in AXES
            }
            for group in sorted(groups)
        },
    )

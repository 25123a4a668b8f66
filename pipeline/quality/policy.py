"""Judges clips by a policy: a tier each, the reasons why not a better one, and how firm that is.

A clip is judged by the median over its windows on each axis: one bad window does not refuse a clip, half of
them do. Source: spec/faults.md Q5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.quality.facts import Facts
from schemas.policy import AXES, Applied, Policy

MOVED = (0.9, 1.1)
"""Thresholds are moved by a tenth either way to see how many clips depend on where exactly they lie."""

Levels = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moved:
    """Clips that change their tier when one threshold is a tenth lower, and a tenth higher."""

    tier: str
    axis: str
    lower: int
    higher: int


class Judge:
    """One policy over one corpus. rank: int [C], place of each clip's tier in the policy; the number of tiers
    where it reaches none. Clips that are not `Facts.judged` have a rank that means nothing."""

    def __init__(self, facts: Facts, policy: Policy, levels: Applied) -> None:
        self.facts, self.policy, self.applied = facts, policy, levels
        self.tiers = list(policy.tiers)
        self._groups, self._group = np.unique(facts.column("group").astype(str), return_inverse=True)
        self._levels: Levels = np.array(
            [
                [[levels.groups[g][axis].tiers[t].value for axis in AXES] for t in self.tiers]
                for g in self._groups
            ]
        )
        self._flags = self._flagged()
        self.rank = self._ranks(self._levels)

    def _ranks(self, levels: Levels) -> npt.NDArray[np.intp]:
        """levels: [G, K, axes] of groups and tiers. An axis that was not measured does not speak."""
        rank = np.full(len(self.facts), len(self.tiers))
        for tier in reversed(range(len(self.tiers))):
            under = self.facts.scores < levels[self._group, tier]
            rank[~under.any(axis=1)] = tier
        rank[list(self._flags)] = len(self.tiers)
        return rank

    def _flagged(self) -> dict[int, list[str]]:
        """Clips that the rules on flags refuse, with their reasons."""
        limits = {"hud_share": self.policy.max_hud_share, "text_share": self.policy.max_text_share}
        limits["watermark"] = 0.5 if self.policy.refuse_watermark else None
        out: dict[int, list[str]] = {}
        for name, limit in limits.items():
            if limit is None:
                continue
            values = self.facts.column(name).astype(np.float64)
            for clip in np.flatnonzero(values > limit):
                out.setdefault(int(clip), []).append(f"{name}: {values[clip]:.3f} over {limit:g}")
        return out

    def reasons(self, clip: int) -> list[str]:
        """Why a clip is not in the tier above its own, in the order of the axes; flags last."""
        tier = int(self.rank[clip]) - 1
        if tier < 0:
            return []
        held = self.applied.groups[str(self._groups[self._group[clip]])]
        out = []
        for axis, score in zip(AXES, self.facts.scores[clip], strict=True):
            level = held[axis].tiers[self.tiers[tier]]
            if score < level.value:
                out.append(f"{axis}: {score:.3f} under {level.value:.3f} ({level.by})")
        return out + self._flags.get(clip, [])

    def sensitivity(self) -> list[Moved]:
        """Of every threshold, how many clips change their tier when it moves."""
        judged = self.facts.judged
        out = []
        for k, tier in enumerate(self.tiers):
            for a, axis in enumerate(AXES):
                changed = []
                for factor in MOVED:
                    levels = self._levels.copy()
                    levels[:, k, a] *= factor
                    changed.append(int((judged & (self._ranks(levels) != self.rank)).sum()))
                out.append(Moved(tier, str(axis), changed[0], changed[1]))
        return out

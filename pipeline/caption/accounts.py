"""What captions cost: totals, per clip, a budget that ends a run, and what a whole run will cost.

Kept apart from captions: none of it enters a receipt's digest or a shard. Source: spec/faults.md V1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.caption.attempts import Attempt
from schemas.errors import StopRun


class BudgetReached(StopRun):
    """A run has used what it was given. Captions that are there stay; a later run goes on."""


class Prices(BaseModel):
    """What the endpoints cost, in one currency of your choice; 0 where you do not pay for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    million_tokens_in: float = Field(default=0.0, ge=0, description="price of a million prompt tokens")
    million_tokens_out: float = Field(default=0.0, ge=0, description="price of a million reply tokens")
    engine_hour: float = Field(default=0.0, ge=0, description="price of an hour of one engine")


FREE = Prices()


class Budget(BaseModel):
    """The most that one run may use; null: no limit. Requests on their way when it is reached still end."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tokens: int | None = Field(default=None, ge=0, description="prompt and reply tokens")
    money: float | None = Field(default=None, ge=0, description="in the currency of the prices")
    engine_hours: float | None = Field(default=None, ge=0, description="time that engines worked")

    def part(self, of: int) -> Budget:
        """The share of one of several processes that run at once."""
        return Budget(
            tokens=None if self.tokens is None else self.tokens // of,
            money=None if self.money is None else self.money / of,
            engine_hours=None if self.engine_hours is None else self.engine_hours / of,
        )


@dataclass
class Totals:
    """Sums over attempts. retries: requests after the first of a go at a clip. unmetered: requests whose
    tokens the server did not count; what they can have been at most counts for the budget.
    engine_seconds: each request's share of the time of its engine, so that they add up to the time in which
    engines worked; request_seconds: sum of the requests' own times."""

    requests: int = 0
    retries: int = 0
    captions: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unmetered: int = 0
    bound_tokens: int = 0
    engine_seconds: float = 0.0
    request_seconds: float = 0.0

    def add(self, attempt: Attempt) -> None:
        self.requests += 1
        self.retries += attempt.number > 1
        self.captions += bool(attempt.caption)
        self.engine_seconds += attempt.engine_seconds
        self.request_seconds += attempt.seconds
        if attempt.tokens_in is None or attempt.tokens_out is None:
            self.unmetered += 1
            self.bound_tokens += attempt.bound_tokens
        else:
            self.tokens_in += attempt.tokens_in
            self.tokens_out += attempt.tokens_out

    def money(self, prices: Prices) -> float:
        """Unmetered tokens are priced as the dearer kind."""
        dearest = max(prices.million_tokens_in, prices.million_tokens_out)
        tokens = self.tokens_in * prices.million_tokens_in + self.tokens_out * prices.million_tokens_out
        return (tokens + self.bound_tokens * dearest) / 1e6 + self.engine_seconds / 3600 * prices.engine_hour


@dataclass
class Accounts:
    """What one process has used in this run, against its budget."""

    prices: Prices = FREE
    budget: Budget = field(default_factory=Budget)
    total: Totals = field(default_factory=Totals)

    def reached(self) -> str:
        """Which limit is reached, in words; "" when none is."""
        used: list[tuple[str, float | None, float]] = [
            (
                "tokens",
                self.budget.tokens,
                self.total.tokens_in + self.total.tokens_out + self.total.bound_tokens,
            ),
            ("money", self.budget.money, self.total.money(self.prices)),
            ("engine hours", self.budget.engine_hours, self.total.engine_seconds / 3600),
        ]
        return "; ".join(
            f"{n} {u:.6g} of {most:.6g}" for n, most, u in used if most is not None and u >= most
        )

    def require(self) -> None:
        """Raises BudgetReached."""
        if reached := self.reached():
            raise BudgetReached(f"the budget is used up ({reached}): raise it, and run again to go on")


def totals(attempts: Iterable[Attempt]) -> Totals:
    out = Totals()
    for attempt in attempts:
        out.add(attempt)
    return out


def per_clip(attempts: Iterable[Attempt]) -> dict[str, Totals]:
    """Totals by clip id; without canaries, which are no clips."""
    out: dict[str, Totals] = {}
    for attempt in attempts:
        if attempt.clip_id:
            out.setdefault(attempt.clip_id, Totals()).add(attempt)
    return out


@dataclass(frozen=True, slots=True)
class Forecast:
    """mean, sd: of one clip in the sample. total, spread: of a whole run; spread is one standard deviation of
    what it can come to: of its clips, and of the mean, which so small a sample knows only roughly."""

    mean: float
    sd: float
    total: float
    spread: float


def estimate(attempts: Iterable[Attempt], clips: int, prices: Prices = FREE) -> dict[str, Forecast]:
    """What captioning `clips` clips will take, from a measured sample: requests, tokens_in, tokens_out,
    engine_hours and money. The sample must have had as many requests in flight as the run will have: alone, a
    request is charged all of its engine's time. Raises ValueError when it has fewer than two clips.
    """
    sample = list(per_clip(attempts).values())
    if len(sample) < 2:
        raise ValueError(f"an estimate needs a sample of two clips, got {len(sample)}: caption a few first")
    values = {
        "requests": [t.requests for t in sample],
        "tokens_in": [t.tokens_in for t in sample],
        "tokens_out": [t.tokens_out for t in sample],
        "engine_hours": [t.engine_seconds / 3600 for t in sample],
        "money": [t.money(prices) for t in sample],
    }
    return {name: _forecast(np.asarray(v, np.float64), clips) for name, v in values.items()}


def _forecast(sample: np.ndarray, clips: int) -> Forecast:
    mean, sd = float(sample.mean()), float(sample.std(ddof=1))
    spread = sd * math.sqrt(clips + clips**2 / len(sample))
    return Forecast(mean, sd, clips * mean, spread)

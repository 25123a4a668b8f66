"""A measured value with its spread, or the reason why there is none. Source: DESIGN rule 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Estimate(Generic[T]):
    """Either a value with its confidence, or no value and a reason.

    confidence: spread of the value (standard deviation); who makes the estimate says in which unit. Infinite
        when there is no value.
    reason: empty exactly when there is a value.
    """

    value: T | None
    confidence: float
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.reason):
            raise ValueError("an estimate has either a value or a reason")

    @staticmethod
    def unknown(reason: str) -> Estimate[T]:
        return Estimate(None, float("inf"), reason)

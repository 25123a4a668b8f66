"""What a run of a measure found: numbers with intervals, curves and videos. `page.py` writes it.

Source: DESIGN 5 (every number can be traced and opened).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.evaluate.stats import Interval


@dataclass(frozen=True)
class Number:
    """measure over a part of the cases. better: "higher", "lower", or "" where neither is.
    chance: what a world that knows nothing scores, where that is known."""

    part: str
    measure: str
    value: Interval
    better: str = ""
    chance: float | None = None


@dataclass(frozen=True)
class Line:
    """One curve: name, and y with its interval over x."""

    name: str
    x: tuple[float, ...]
    y: tuple[Interval, ...]


@dataclass(frozen=True)
class Figure:
    title: str
    across: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Film:
    """A video beside the page. path: of the file, in the folder of the report."""

    title: str
    path: Path


@dataclass(frozen=True)
class Report:
    """what: the measure's name. settings: all that the numbers depend on. cases: a record a case, with its
    own scores. notes: sentences for the reader."""

    what: str
    world: str
    settings: dict[str, Any]
    numbers: tuple[Number, ...]
    figures: tuple[Figure, ...] = ()
    films: tuple[Film, ...] = ()
    cases: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())

    def value(self, part: str, measure: str) -> Interval:
        """Raises KeyError where it was not measured."""
        for number in self.numbers:
            if (number.part, number.measure) == (part, measure):
                return number.value
        raise KeyError(f"{measure} of {part}")

    def json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "world": self.world,
            "settings": self.settings,
            "numbers": [
                {
                    "part": n.part,
                    "measure": n.measure,
                    "better": n.better,
                    "chance": n.chance,
                    **n.value.row(),
                }
                for n in self.numbers
            ],
            "figures": [
                {
                    "title": f.title,
                    "across": f.across,
                    "lines": [
                        {"name": line.name, "x": list(line.x), "y": [y.row() for y in line.y]}
                        for line in f.lines
                    ],
                }
                for f in self.figures
            ],
            "films": [{"title": f.title, "file": f.path.name} for f in self.films],
            "cases": [_plain(case) for case in self.cases],
            "notes": list(self.notes),
        }


def _plain(value: Any) -> Any:
    """As JSON has it: what is not a number is null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value

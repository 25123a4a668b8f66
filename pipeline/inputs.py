"""A log as inputs per frame of the media file. Source: spec/faults.md W3, W7; DESIGN rule 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.alignment import Alignment, align
from pipeline.sources.keymap import Action, InputUnit, LogPart
from pipeline.sources.sidecar import read_columns
from pipeline.store import Store
from schemas.clip import FrameTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Inputs:
    """values: by log column, float64 [F]: what was pressed from frame k to k+1. Keys 0 or 1, counts their
    sum; without the sign of the key map; NaN where no log row says. alignment: how rows met frames."""

    part: LogPart
    values: dict[str, Floats]
    alignment: Alignment

    def axis(self, action: Action) -> Floats | None:
        """float64 [F], the direction keys held on an axis: -1, 0 or 1 (opposite keys cancel), 0 for what the
        game does not have; None when the key map maps none."""
        if action in self.part.absent:
            return np.zeros(len(self.alignment.nearest))
        held = [i.sign * self.values[i.column] for i in self.part.driving(action)]
        return np.clip(np.sum(held, axis=0), -1.0, 1.0) if held else None

    def turning(self) -> Floats | None:
        """float64 [F], the signed yaw input in one unit: counts or keys, whichever moved in more frames."""
        by_unit: dict[InputUnit, list[Floats]] = {}
        for i in self.part.driving(Action.YAW):
            by_unit.setdefault(i.unit, []).append(i.sign * self.values[i.column])
        totals = [np.sum(columns, axis=0) for columns in by_unit.values()]
        return max(totals, key=lambda t: np.count_nonzero(np.abs(t) > 0)) if totals else None


def read_inputs(source: Store, path: str, part: LogPart, table: FrameTable) -> Inputs:
    """Inputs of a clip from its log. Raises SidecarError when the log cannot be read."""
    columns = read_columns(source, path, part)
    alignment = align(table, part, columns, path)
    values = {
        i.column: (alignment.total if i.unit is InputUnit.COUNT else alignment.held)(columns[i.column])
        for i in part.inputs
    }
    return Inputs(part, values, alignment)

"""Controls for rollouts that are longer than any clip: recorded rows, extended by a named law.

A 60 s clip has 240 latents, a rollout 320. Source: spec/worldplay2.md n.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from schemas.action import JUMP, PERSPECTIVE
from trainer.curriculum import Law

Rows = npt.NDArray[np.float32]


class ControlsError(ValueError):
    """Rows that cannot be made as long as a rollout."""


def back(rows: Rows) -> Rows:
    """The way back from the end of [T, 6] rows to their start, [T - 1, 6]: the last motion first, every sign
    flipped; nobody jumps backwards. Row 0 is no motion, so it has no way back."""
    out = -rows[:0:-1]
    out[:, PERSPECTIVE] = rows[:0:-1, PERSPECTIVE]
    out[:, JUMP] = 0.0
    return out + 0.0  # no negative zeros


def extended(rows: Rows, latents: int, law: Law, others: Callable[[], Iterator[Rows]]) -> Rows:
    """[latents, 6]: recorded rows [T, 6], cut, or extended by a law. others: rows of other clips of the game,
    asked for by JOINED alone; their idle row 0 is left out and the perspective of the first clip kept.

    Raises ControlsError when rows are too short to be extended, or the others run out.
    """
    if len(rows) >= latents:
        return rows[:latents]
    if len(rows) < 2:
        raise ControlsError(f"{len(rows)} action rows cannot be extended to {latents}: at least 2 needed")
    parts, length = [rows], len(rows)
    for part in _ways(rows) if law is Law.OUT_AND_BACK else (more[1:] for more in others()):
        parts.append(part)
        length += len(part)
        if length >= latents:
            break
    else:
        raise ControlsError(f"clips of the game have {length} action rows in all, {latents} are asked for")
    out = np.concatenate(parts)[:latents]
    out[:, PERSPECTIVE] = rows[0, PERSPECTIVE]
    return out


def _ways(rows: Rows) -> Iterator[Rows]:
    """Back, out again, and so on: the camera is at the recorded places at all times."""
    while True:
        yield back(rows)
        yield rows[1:]

"""Small test sets of events, and a world that plays them, for tests of the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from jobs.evaluate.event_cases import EventSet, read_cases
from jobs.evaluate.events import MadeWith
from jobs.evaluate.world import Case, Frames

SIZE = (64, 128)
WITH = MadeWith(seed=0, yaw=3.0, pitch=3.0, identity={})


def records(count: int = 2) -> list[dict[str, Any]]:
    """Half EO, half CI: 5 s of nothing, then 5 s in which it is asked for."""
    return [
        {
            "name": f"case{k}",
            "category": "EO" if k < (count + 1) // 2 else "CI",
            "image": f"start{k}.png",
            "perspective": "fps",
            "action": "none-20,w+left-20",
            "prompt_event": "prompt-20,prompt1-20",
            "prompts": {"prompt": "The scene is a hall.", "prompt1": "The scene is a hall. A door opens."},
            "event": "prompt1",
            "expected": "A door opens.",
        }
        for k in range(count)
    ]


def event_set(folder: Path, count: int = 2, **changed: Any) -> EventSet:
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        cv2.imwrite(str(folder / f"start{k}.png"), np.full((*SIZE, 3), 10 * k, np.uint8))
    held = [record | changed for record in records(count)]
    (folder / "cases.json").write_text(json.dumps({"version": 1, "cases": held}))
    return read_cases(folder / "cases.json")


class Painted:
    """A world in whose second half a circle stands, the redder the more it heeds what it is asked."""

    def __init__(self, red: float = 1.0, dies_at: int = -1) -> None:
        self.name, self.red, self.dies_at, self.played = "painted", red, dies_at, 0

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        self.played += 1
        for chunk in range(case.chunks):
            if chunk == self.dies_at:
                raise RuntimeError("out of memory")
            frames = np.full((13 if chunk == 0 else 16, *SIZE, 3), 0, np.uint8)
            if chunk >= case.chunks // 2:
                frames[..., 0] = int(230 * self.red)
            yield frames

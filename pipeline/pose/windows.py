"""Window and seam rows of a clip, as the pose stage keeps them and the tables show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.stage import Unit
from schemas import SCHEMA_VERSION
from schemas.pose import PoseTrack, Scale
from schemas.stitch import Seam, WindowRow
from schemas.timeline import windows

Rows = dict[str, Any]
"""windows, seams: a list of rows each; schema_version."""


def plain_windows(track: PoseTrack) -> tuple[WindowRow, ...]:
    """Windows over a track that was not made window by window: one world, no seams."""
    known = track.scale is Scale.METRE
    return tuple(
        WindowRow(
            window=i,
            start=span.start,
            stop=span.stop,
            estimator=track.estimator,
            valid_share=float(track.valid[span.slice()].mean()),
            world=0,
            segment=0,
            scale=1.0 if known else None,
            scale_spread=0.0 if known else None,
            scale_kept=False,
            reasons=(),
        )
        for i, span in enumerate(windows(len(track)).spans)
    )


def as_json(rows: Sequence[WindowRow], seams: Sequence[Seam]) -> Rows:
    return {
        "schema_version": SCHEMA_VERSION,
        "windows": [asdict(r) for r in rows],
        "seams": [asdict(s) for s in seams],
    }


def read_windows(unit: Unit) -> Rows:
    """Windows and seams of a clip, from the pose stage's output."""
    rows: Rows = json.loads(unit.corpus.read(unit.receipts["pose"].output("windows.json").path))
    return rows

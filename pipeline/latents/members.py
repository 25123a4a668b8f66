"""What a sample takes of the two stages: local files by member suffix."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from pipeline.latents.stage import MEMBERS as LATENTS
from pipeline.latents.stage import Latents
from pipeline.latents.text import MEMBERS as TEXT
from pipeline.latents.text import Text
from pipeline.stage import Unit

FAMILIES = {Latents.name: LATENTS, Text.name: TEXT}


def members(unit: Unit, family: str, held: ExitStack) -> dict[str, Path]:
    """Files of a family of a unit whose stages have run, there as long as `held` is open."""
    receipt = unit.receipts[family]
    return {
        name: held.enter_context(unit.corpus.local(receipt.output(name).path)) for name in FAMILIES[family]
    }

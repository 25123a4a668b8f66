"""What a sample takes of the two stages: local files by member suffix."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from pipeline.stage import Unit
from pipeline.store import StoreError, sha256_file
from schemas.sample import FAMILIES


def members(unit: Unit, family: str, held: ExitStack) -> dict[str, Path]:
    """Files of a family ("latents" or "text": the stage of that name made them), there as long as `held` is
    open. Raises StoreError when one is not what the receipt says."""
    receipt = unit.receipts[family]
    found: dict[str, Path] = {}
    for name in FAMILIES[family]:
        made = receipt.output(name)
        remedy = f"run `wp2 curate` again with --from {family}"
        if unit.corpus.size(made.path) != made.bytes:
            raise StoreError(f"{made.path} is missing or cut short: {remedy}")
        found[name] = held.enter_context(unit.corpus.local(made.path))
        if sha256_file(found[name]) != made.sha256:
            raise StoreError(f"{made.path} is damaged: {remedy}")
    return found

"""Where tests find footage: $WP2_FOOTAGE, or ../shared beside the repository, or none (then CI fails)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def footage() -> Path:
    """The footage pack, used in place. Outside CI a missing pack skips the tests that need it."""
    folder = Path(os.environ.get("WP2_FOOTAGE", ROOT / "../shared/data/footage"))
    if (folder / "manifest.csv").is_file():
        return folder.resolve()
    if os.environ.get("CI"):
        pytest.fail(f"the footage pack is missing from {folder}: set WP2_FOOTAGE")
    pytest.skip(f"no footage pack at {folder}: set WP2_FOOTAGE")

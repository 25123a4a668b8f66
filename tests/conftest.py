"""Where tests find footage: $WP2_FOOTAGE, or ../shared beside the repository, or none (then CI fails)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

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


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """fsspec options of an S3 server on this machine; the session shares it, so use a bucket of your own."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    server.stop()

"""What a remote cluster is sent: the four packages' Python files and nothing else.

Source: spec/faults.md R1 (uploads that die on .git, data or a virtual environment without saying which).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
from jobs.runner import RunnerError

PACKAGES = ("schemas", "pipeline", "trainer", "jobs")
LIMIT_BYTES = 8 << 20
"""Sixteen times the code of today; more means that something else has got in."""


@contextlib.contextmanager
def package_env(root: Path | None = None, limit: int = LIMIT_BYTES) -> Iterator[dict[str, Any]]:
    """Ray runtime_env with a temporary folder of the packages' .py files.

    Raises RunnerError, before any upload, when they pass `limit`, naming the ten largest.
    """
    root = root or Path(jobs.__file__).parent.parent
    files = sorted(f for p in PACKAGES for f in (root / p).rglob("*.py"))
    sizes = {f.relative_to(root): f.stat().st_size for f in files}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(sizes.items(), key=lambda x: -x[1])[:10]
        names = ", ".join(f"{path} {size >> 10} KiB" for path, size in largest)
        raise RunnerError(f"the code to ship is {total >> 10} KiB, over {limit >> 10} KiB; largest: {names}")
    with tempfile.TemporaryDirectory(prefix="wp2-package-") as folder:
        for path in sizes:
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, target)
        yield {"working_dir": folder}

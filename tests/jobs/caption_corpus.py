"""A corpus of eight short clips of the footage that are ready for captions, and stand-in engines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jobs.config import CurateConfig, parse
from jobs.corpus_run import run_curate
from jobs.runner import InProcess
from pipeline.caption.attempts import Attempt, read_attempts
from pipeline.store import Store

CLIPS = (
    "odd_64x36.mp4",
    "odd_exactly_150f.mp4",
    "odd_fragmented.mp4",
    "odd_h264.mov",
    "event01_door_map01.mp4",
    "event03_kill_zombieman.mp4",
    "event05_pickup_bonus.mp4",
    "event09_pickup_shotgun_e1m1.mp4",
)
ROOT = Path(__file__).parent.parent.parent
# Odometry and the gate of still pictures have their own tests.
CONFIG: dict[str, dict[str, Any]] = {"run": {"cpus": 1, "partition_size": 4}, "observe": {"track": "none"}}

PROGRAM = """#!{python}
import sys
sys.path.insert(0, {root!r})
sys.argv = [sys.argv[0], "--port", sys.argv[sys.argv.index("--port") + 1], "--model", "stand-in"] + {more!r}
from tests.caption_server import main
main()
"""


def config(**sections: dict[str, Any]) -> CurateConfig:
    names = CONFIG.keys() | sections.keys()
    return parse({name: CONFIG.get(name, {}) | sections.get(name, {}) for name in names}, "test")


def make_corpus(footage: Path, folder: Path) -> Path:
    """The clips through every stage but captions, in this process (12 s)."""
    source = folder / "clips"
    source.mkdir()
    for name in CLIPS:
        (source / name).symlink_to(footage / name)
    run_curate(f"folder:{source}", str(folder / "corpus"), config(), pool=InProcess())
    return folder / "corpus"


def stand_in(folder: Path, *more: str) -> Path:
    """A program with vLLM's command line that runs the stand-in server."""
    program = folder / "stand-in-vllm"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT), more=list(more)))
    program.chmod(0o755)
    return program


def attempts(corpus: Path) -> list[Attempt]:
    """Of clips; those of canaries name no clip."""
    return [a for a in read_attempts(Store(str(corpus))) if a.clip_id]


def accepted(corpus: Path) -> Counter[str]:
    """How many captions each clip was given."""
    return Counter(a.clip_id for a in attempts(corpus) if a.caption)

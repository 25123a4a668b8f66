"""`wp2 train` under torchrun: two ranks that are killed and started anew train what one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from jobs.train import Options, train
from jobs.train_config import plain
from tests.jobs.test_train import Heard, alone, small
from tests.jobs.train_corpus import write_corpus
from trainer.metrics import read_rows
from trainer.run_folder import RunFolder

pytestmark = pytest.mark.alone

STEPS = 6


def start(corpus: str, run: Path, config: Path, stage: str, steps: int = STEPS) -> subprocess.Popen[bytes]:
    """Two ranks in a session of their own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "jobs", "train", corpus, "--out", str(run), "--stages", stage, "--steps", str(steps)]
    more = ["--config", str(config), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = (run.parent / "log.txt").open("ab")
    return subprocess.Popen(
        [*launch, *command, *more], stdout=log, stderr=log, env=environment, start_new_session=True
    )


def kill_once_saved(process: subprocess.Popen[bytes], latest: Path) -> None:
    """SIGKILL torchrun and both ranks, which it starts in sessions of their own, as soon as a checkpoint is
    complete."""
    until = time.monotonic() + 240
    while not latest.is_file():
        assert process.poll() is None and time.monotonic() < until, "ended before its first checkpoint"
        time.sleep(0.02)
    parent = psutil.Process(process.pid)
    every = [parent, *parent.children(recursive=True)]
    for one in every:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(every, timeout=30)


@pytest.mark.parametrize(
    "stage", ["3", *(pytest.param(name, marks=pytest.mark.soak) for name in ("1", "2a", "2b"))]
)
def test_two_ranks_killed_and_started_anew_train_what_one_process_does(stage: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = small(alone(stage))
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(plain(config)))
    one, two = tmp_path / "one", tmp_path / "two"
    train(config, Options(corpus, one, stage, steps=STEPS, device="cpu"), Heard().told)
    for expert in ("high", "low") if stage == "3" else ("low",):
        latest = RunFolder(two).checkpoints(stage, expert) / "latest"
        kill_once_saved(start(corpus, two, file, stage), latest)
    ended = start(corpus, two, file, stage)
    assert ended.wait(240) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    for expert in ("high", "low"):
        alike = [read_rows(run / stage / expert / "metrics.jsonl") for run in (one, two)]
        assert [row["step"] for row in alike[1]] == list(range(STEPS))
        for a, b in zip(*alike, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
            assert b["history"] == a["history"]

"""The terminal line of a training run."""

from __future__ import annotations

import pytest

import jobs.train_progress
from jobs.train_progress import Progress, human
from tests.trainer.test_metrics import record
from trainer.curriculum import Objective, Stage


def test_the_time_that_is_left_follows_from_the_steps_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(jobs.train_progress.time, "monotonic", lambda: now[0])
    progress, lines = Progress(), []
    monkeypatch.setattr(progress._console, "print", lambda line, **more: lines.append(line))
    progress.told.begin(Stage("3", Objective.CHUNKS, None, 100, 16, (0,)), "high")
    # The run goes on at step 10, whose first step compiles for an hour; then 20 s a step, a save in them.
    for step, at in ((10, 3600.0), (11, 3620.0), (12, 3640.0)):
        now[0] = at
        progress.told.seen(record(step))
    assert [line.rsplit("; ", 1)[1] for line in lines] == ["? left", "29m20s left", "29m00s left"]
    assert lines[2].startswith("stage 3 high 13/100: loss 1, ")
    assert [human(s) for s in (59.6, 3600, 200_000)] == ["1m00s", "1h00m", "2.3 days"]

"""Settings of a run that cannot be meant are refused in one line, before anything begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.train_config import TrainError, load


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "stages: {2a: {events: 10}}",
            "stages.2a: stage 2a: events is 10.0: a share lies in 0 to 1 (10 % is 0.1)",
        ),
        ("stages: {3: {memory_drop: -0.5}}", "stage 3: memory_drop is -0.5: a share lies in 0 to 1"),
        ("stages: {3: {target: 18}}", "stage 3: a target of 18 latents: whole chunks of 4 needed"),
        ("stages: {2a: {sigma: {per_chunk: true}}}", "stage 2a: frame queries are no chunks"),
        ("save_every: 0", ".yaml: save_every is 0, save_minutes 15.0: at least 1 step"),
        ("save_minutes: -1", "save_every is 100, save_minutes -1.0: at least 1 step, and 0 minutes or more"),
        ("save_minutes: soon", "save_minutes: Input should be a valid number"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"preset: tiny\n{text}\n")
    with pytest.raises(TrainError) as caught:
        load(file, None)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_checkpoints_come_by_minutes_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("preset: a14b\nsave_minutes: 5\n")
    assert (load(None, "a14b").save_minutes, load(file, None).save_minutes) == (15.0, 5.0)

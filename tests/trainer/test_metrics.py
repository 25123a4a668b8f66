"""What is told of a step: means by noise level, and a file that reads as if nothing had been killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.metrics import METRICS, MetricsLog, StepRecord, by_sigma, peak_flops, read_rows


def record(step: int, loss: float = 1.0) -> StepRecord:
    return StepRecord(
        "3",
        "high",
        step,
        loss,
        2,
        {"0.9-0.94": loss},
        0.5,
        1e-4,
        8.0,
        100.0,
        None,
        1.0,
        0.1,
        2.0,
        0.3,
        0.1,
        1,
    )


def test_losses_are_means_of_the_bin_that_holds_their_level() -> None:
    sigma = torch.tensor([[0.0, 0.1], [0.2, 0.9], [0.95, 1.0]], dtype=torch.float64)
    value = torch.tensor([[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]])
    # A level on an edge belongs to the bin that it begins; the last bin has both of its ends.
    assert by_sigma(sigma, value) == {
        "0-0.2": 2.0,
        "0.2-0.4": 5.0,
        "0.9-0.94": 7.0,
        "0.94-0.97": 9.0,
        "0.97-1": 11.0,
    }
    assert by_sigma(torch.empty(0), torch.empty(0)) == {}


def test_rows_behind_the_checkpoint_and_a_line_cut_short_are_gone_after_a_kill(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, 0) as log:
        for step in range(5):
            log.write(record(step, loss=10.0 + step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"stage": "3", "step": 5, "lo')  # SIGKILL in the middle of a line
    with MetricsLog(tmp_path, 3) as log:  # the newest checkpoint holds three steps
        log.write(record(3, loss=20.0))
    rows = read_rows(tmp_path / METRICS)
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 10.0), (1, 11.0), (2, 12.0), (3, 20.0)]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_peak_of_a_device_is_that_of_the_longest_name_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    assert peak_flops(torch.device("cuda")) == 989e12  # and not that of the H20
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nothing")
    assert peak_flops(torch.device("cuda")) is None and peak_flops(torch.device("cpu")) is None

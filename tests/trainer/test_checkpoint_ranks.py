"""Checkpoints between world sizes, and errors that every rank hears of: one launch of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.model_support import noisy_expert
from tests.trainer.state_support import begin, in_eight_bits, noise_moments, run, save
from trainer.checkpoint import Checkpoints
from trainer.parameters import named_parameters
from trainer.state import load_weights

pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[dict[str, Any]]]:
    """The folder, the losses of an unbroken run of one process, and what each of two ranks found."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    state = begin(expert="low")
    run(state, range(2))
    save(state, Checkpoints(folder / "one", say=lambda line: None), 2)
    losses = run(state, range(2, 8))
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", "-m", "tests.trainer.checkpoint_ranks", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, losses, json.loads((folder / "found.json").read_text())


def test_one_process_to_two_ranks(found: tuple[Path, list[float], list[dict[str, Any]]]) -> None:
    _, losses, ranks = found
    assert sum(rank["numel"] for rank in ranks) == sum(p.numel() for p in noisy_expert().parameters())
    for rank in ranks:
        assert rank["two"]["moments"] == 127
        # Both ranks see the same sample, so a mean over ranks is that of one process.
        assert rank["two"]["losses"] == pytest.approx(losses[:3], rel=1e-5)
        assert rank["two"]["round trip"] and rank["two"]["goes on"]


def test_two_ranks_to_one_process(found: tuple[Path, list[float], list[dict[str, Any]]]) -> None:
    folder, losses, _ = found
    saved = Checkpoints(folder / "two", say=lambda line: None).at(5)
    assert sorted(saved.files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    state = begin()
    assert state.load(saved).moments == 127
    plain = noisy_expert()
    load_weights(saved, plain, average=False)
    weights = named_parameters(state.model)
    assert all(torch.equal(p, weights[n]) for n, p in named_parameters(plain).items())
    assert run(state, range(5, 8)) == pytest.approx(losses[3:], rel=1e-5)


def test_eight_bit_moments_of_two_ranks(found: tuple[Path, list[float], list[dict[str, Any]]]) -> None:
    folder, _, ranks = found
    assert [rank["eight"] for rank in ranks] == [True, True]
    state = in_eight_bits(begin(), seed=None)
    state.load(Checkpoints(folder / "eight", say=lambda line: None).at(3))
    quantised = 0
    for name, parameter in named_parameters(state.model).items():
        for key, noise in noise_moments(parameter, 3).items():
            kept = state.optimizer.state[parameter][key]
            values = kept.dequantize() if hasattr(kept, "codes") else kept
            quantised += hasattr(kept, "codes")
            # Steps of the codes are at most 1.4 % of a block's largest value; the blocks are others.
            assert (values - noise).abs().max() <= 0.02 * noise.abs().max(), (name, key)
    assert quantised > 20


def test_frozen_and_newly_trained_parts_on_two_ranks(
    found: tuple[Path, list[float], list[dict[str, Any]]],
) -> None:
    for rank in found[2]:
        assert rank["before"] == {"fresh": 40, "same": True, "thawed": 87, "kept": 40}


def test_averages_change_places_after_a_pass_without_gradients(
    found: tuple[Path, list[float], list[dict[str, Any]]],
) -> None:
    assert [rank["look"] for rank in found[2]] == [True, True]


def test_what_one_rank_finds_every_rank_is_told(
    found: tuple[Path, list[float], list[dict[str, Any]]],
) -> None:
    for rank in found[2]:
        assert rank["failed"].startswith("__1_0.distcp reads otherwise")
        assert "step-00000005/__1_0.distcp is damaged" in rank["damaged"]

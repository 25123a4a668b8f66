"""`wp2 eval` as a user runs it, on random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import pytest
import torch
from typer.testing import CliRunner

from jobs.commands.evaluate import evaluate
from schemas.errors import UserError
from tests.trainer.model_support import noisy_expert
from tests.trainer.tiny_codecs import blobs, fitted
from trainer.config import TINY
from trainer.model.adapters import Contents, Found, Naming
from trainer.weights.transfer import save

PROMPT = "The scene in the video is: a room."


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    torch.set_num_threads(1)
    experts = {name: noisy_expert(name) for name in ("high", "low")}
    save(experts, Found(Naming.NATIVE, Contents.VELOCITY, TINY), folder / "weights")
    (folder / "codec.json").write_text(fitted().model_dump_json())
    (folder / "starts").mkdir()
    for k in range(2):
        cv2.imwrite(str(folder / "starts" / f"s{k}.png"), blobs(1, 90, 160, k)[0])
    return folder


def wp2(given: Path, measure: str, *more: str) -> list[str]:
    asked = [measure, str(given / "weights"), "--codec", f"linear:{given / 'codec.json'}"]
    asked += ["--starts", str(given / "starts"), "--out", str(given / measure)]
    found = CliRunner().invoke(evaluate, [*asked, *more], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output.splitlines()


def quick(*more: str) -> Sequence[str]:
    return ("--prompt", PROMPT, "--steps", "1", "--guidance", "1", "--films", "1", *more)


def test_revisit_and_drift_write_their_page_and_numbers(given: Path) -> None:
    said = wp2(given, "revisit", *quick("--trajectories", "1"))
    assert any("psnr" in line for line in said) and "index.html" in said[-1]
    numbers = json.loads((given / "revisit" / "numbers.json").read_text())
    assert [case["case"] for case in numbers["cases"]] == ["s0-000"]
    assert numbers["settings"]["codec_identity"] and numbers["cases"][0]["pairs"] == 156
    assert (given / "revisit" / "s0-000.mp4").stat().st_size > 1000
    wp2(given, "drift", *quick("--trajectories", "2", "--latents", "8"))
    drifted = json.loads((given / "drift" / "numbers.json").read_text())
    assert {n["measure"] for n in drifted["numbers"]} >= {"sharpness_kept", "motion", "distance"}


@pytest.mark.parametrize(
    ("measure", "more", "what"),
    [
        ("drift", ["--latents", "10"], "multiple of 4"),
        ("drift", ["--prompt", PROMPT, "--latents", "1028"], "--latents"),
        ("revisit", [], "has no prompt"),
        ("revisit", ["--prompt", PROMPT, "--starts", "nowhere"], "neither a corpus nor a folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_weights_are_loaded(
    given: Path, measure: str, more: list[str], what: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        wp2(given, measure, *more)
    assert "\n" not in str(caught.value)

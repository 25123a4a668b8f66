"""`wp2 eval` as a user runs it, on random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import pytest
import torch
from typer.testing import CliRunner

import jobs.commands.evaluate_history  # noqa: F401
from jobs.commands.evaluate import evaluate
from jobs.evaluate.starts import StartOptions, read_starts
from jobs.evaluate.world import Case, ModelWorld, whole
from jobs.model import Opening
from pipeline.corpus import open_corpus
from pipeline.shards.read import read_index
from pipeline.shards.write import write_root
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.rollout import Command, action_rows
from tests.pipeline.shards_corpus import CONFIG, PARTITION, put, sample
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
    told = numbers["settings"]
    assert told["codec_identity"] and numbers["cases"][0]["pairs"] == 156
    assert told["prompts"] == {"s0": PROMPT} and told["perspectives"] == {"s0": "fps"}
    assert len(told["weights_sha256"]) == 64 and told["wp2"]
    assert (given / "revisit" / "s0-000.mp4").stat().st_size > 1000
    wp2(given, "drift", *quick("--trajectories", "2", "--latents", "8"))
    drifted = json.loads((given / "drift" / "numbers.json").read_text())
    assert {n["measure"] for n in drifted["numbers"]} >= {"sharpness_kept", "motion", "distance"}


@pytest.mark.parametrize(
    ("measure", "more", "what"),
    [
        ("drift", ["--latents", "10"], "multiple of 4"),
        ("drift", ["--prompt", PROMPT, "--latents", "1028"], "--latents"),
        ("drift", ["--prompt", PROMPT, "--device", "gpu"], "--device 'gpu': give cpu, cuda or cuda:N"),
        ("drift", ["--prompt", PROMPT, "--device", "cuda:99"], "--device cuda:99: PyTorch sees"),
        ("drift", ["--prompt", PROMPT, "--split", "val"], "--split: .* leave it out"),
        ("control", ["--prompt", PROMPT, "--look", "shear"], "--look does nothing without --focal"),
        ("revisit", ["--prompt", PROMPT, "--loops", "nowhere"], "nowhere"),
        ("revisit", ["--prompt", PROMPT, "--lpips-heads", "x"], "--lpips-heads does nothing without"),
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


@pytest.mark.parametrize(
    "more", [("--yaw", "nan"), ("--guidance", "inf"), ("--steps", "1001"), ("--latents", "4")]
)
def test_numbers_that_make_no_sense_are_refused(given: Path, more: tuple[str, str]) -> None:
    asked = ["drift", str(given / "weights"), "--codec", "x", "--starts", "x", "--out", "x", *more]
    assert CliRunner().invoke(evaluate, asked).exit_code == 2


def test_a_folder_of_pictures_with_two_of_one_name_or_an_odd_text_is_refused(
    given: Path, tmp_path: Path
) -> None:
    picture = (given / "starts/s0.png").read_bytes()
    for name in ("a.png", "a.jpg"):
        (tmp_path / name).write_bytes(picture)
    with pytest.raises(UserError, match="two starts of one name"):
        wp2(given, "drift", *quick("--starts", str(tmp_path)))
    (tmp_path / "a.jpg").unlink()
    (tmp_path / "a.txt").write_bytes("Tür".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt is no text in UTF-8"):
        wp2(given, "drift", *quick("--starts", str(tmp_path)))
    (tmp_path / "a.txt").write_text("A door.")
    with pytest.raises(UserError, match="--prompt: each of 1 starts has its own"):
        wp2(given, "drift", *quick("--starts", str(tmp_path)))


def test_clips_without_a_caption_need_a_prompt(given: Path, footage: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(tmp_path / "corpus"), create=True)
    put(corpus, PARTITION, [sample("clip", footage / "loop04_rewind_map06.mp4", 0)], CONFIG)
    write_root(corpus)
    row = read_index(corpus, ["split"]).to_pylist()[0]
    for options, told in (
        (StartOptions(row["split"]), "clip clip has no caption at its start: give --prompt"),
        (StartOptions(row["split"], perspective=Perspective.FIRST), "--perspective: .* leave it out"),
    ):
        with pytest.raises(UserError, match=told):
            read_starts(corpus.url, 1, TINY.geometry, options)
    (start,) = read_starts(corpus.url, 1, TINY.geometry, StartOptions(row["split"], PROMPT))
    assert start.prompt == PROMPT


def test_weights_of_nan_give_no_numbers(given: Path, tmp_path: Path) -> None:
    experts = {name: noisy_expert(name) for name in ("high", "low")}
    with torch.no_grad():
        experts["high"].patch_embedding.weight.fill_(torch.nan)
    save(experts, Found(Naming.NATIVE, Contents.VELOCITY, TINY), tmp_path / "nan")
    for measure in ("drift", "revisit", "control"):
        asked = [measure, str(tmp_path / "nan"), "--codec", f"linear:{given / 'codec.json'}"]
        asked += ["--starts", str(given / "starts"), "--out", str(tmp_path / "out")]
        with pytest.raises(UserError, match=r"chunk 0 of video s0-000.*: predictions of expert high"):
            CliRunner().invoke(evaluate, [*asked, *quick("--trajectories", "1")], catch_exceptions=False)
    assert not list((tmp_path / "out").glob("*.mp4")) and not (tmp_path / "out/numbers.json").exists()


def test_noise_belongs_to_the_case(given: Path) -> None:
    opening = Opening(f"linear:{given / 'codec.json'}", steps=1, guidance=1.0)
    world = ModelWorld.of(given / "weights", opening, lambda *_: None)
    rows = action_rows([Command(4)], Perspective.FIRST, 3.0, 3.0)
    case = Case("a", blobs(1, 90, 160, 0)[0], Perspective.FIRST, rows, (PROMPT,))
    first, again = whole(world.play(case, 0)), whole(world.play(case, 0))
    other = whole(world.play(replace(case, name="b"), 0))
    shared = whole(world.play(replace(case, name="b", noise="a"), 0))
    assert (first == again).all() and (first == shared).all() and (first != other).any()


def test_history_of_one_expert_asks_for_the_folder_of_both(given: Path) -> None:
    asked = ["history", str(given / "weights/high_noise_model"), "nowhere", "--out", str(given / "h")]
    with pytest.raises(UserError, match="is one expert of 2: give the folder"):
        CliRunner().invoke(evaluate, asked, catch_exceptions=False)

"""`wp2 export`: a run's checkpoints become weights that open, compare and roll out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.frames import frame_pass
from pipeline.picture import Picture
from schemas.errors import UserError
from tests.trainer.model_support import noisy_expert
from tests.trainer.tiny_codecs import fitted
from trainer.checkpoint import Checkpoints
from trainer.curriculum import OptimConfig
from trainer.ema import Ema
from trainer.model.pdd_head import VelocityHead, bank_from_velocity, compact_from_bank
from trainer.model.wan import WanModel
from trainer.optim import make_optimizer
from trainer.run_folder import RunFolder
from trainer.schedule import PddSchedule
from trainer.state import TrainState
from trainer.weights.checkpoint import open_checkpoint
from trainer.weights.tensorfile import read_header, read_tensor
from trainer.weights.transfer import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FEW = {"schedule": asdict(PddSchedule())}
SHIFT = 0.25
"""What a step adds to every weight; the average takes in half."""


def wp2(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and what is said: output, or the line of the error."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, UserError):
        return 1, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def averaged(weight: Tensor) -> Tensor:
    """The average of a weight after `add_checkpoint`."""
    return weight.detach().lerp(weight.detach() + SHIFT, 0.5)


def with_bank(model: WanModel, expert: str) -> WanModel:
    """Heads of few-step training, no two alike."""
    assert isinstance(model.head, VelocityHead)
    bank = bank_from_velocity(model.head, PddSchedule().heads(expert))
    with torch.no_grad():
        bank.bank_weight.mul_(torch.linspace(0.5, 1.5, bank.heads)[:, None, None])
    model.head = bank
    return model


def add_checkpoint(
    run: Path, stage: str, expert: str, step: int, more: Mapping[str, object] | None = None
) -> TrainState:
    """As training leaves one: weights a step beyond their average."""
    model = noisy_expert(expert)
    if more is not None:
        model = with_bank(model, expert)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(SHIFT)
    ema.update(model, step)
    state = TrainState(model, make_optimizer(model.named_parameters(), OptimConfig()), ema)
    place = Checkpoints(RunFolder(run).checkpoints(stage, expert), say=lambda line: None)
    place.save(step, state.tensors(), {"state": state.note(), **(more or {})})
    place.wait()
    return state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("run")
    for expert in ("high", "low"):
        add_checkpoint(path, "1", expert, 50)
        add_checkpoint(path, "3", expert, 100)
        add_checkpoint(path, "3", expert, 200)
        add_checkpoint(path, "4", expert, 10, FEW)
    add_checkpoint(path, "5", "high", 7, FEW)  # "low" is yet to come
    return path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, footage: Path) -> Path:
    """A frame of real footage, a codec, and an input JSON that asks for 8 latents."""
    root = tmp_path_factory.mktemp("scene")

    class First:
        def see(self, index: int, picture: Picture) -> None:
            if index == 0:
                cv2.imwrite(str(root / "first.png"), np.ascontiguousarray(picture.rgb[:, :, ::-1]))

    frame_pass(footage / "loop01_rewind_map02.mp4", [First()])
    entry = {
        "image_path": "first.png",
        "perspective": "fps",
        "action": "none-4,w+left-4",
        "prompt": "The scene in the video is: a stone corridor.",
        "prompt_event": "prompt-8",
    }
    (root / "input.json").write_text(json.dumps([entry]))
    (root / "codec.json").write_text(fitted().model_dump_json())
    return root


def rolls_out(scene: Path, weights: Path, out: Path, *more: str) -> bool:
    given = ["--weights", weights, "--input", scene / "input.json", "--out", out]
    code, text = wp2("rollout", *given, "--codec", f"linear:{scene / 'codec.json'}", *more)
    assert code == 0, text
    return (out / "0000_first.mp4").stat().st_size > 1000


def test_averages_of_both_experts_are_written_and_roll_out(run: Path, scene: Path, tmp_path: Path) -> None:
    code, text = wp2("export", run, "--stage", "3", "--out", tmp_path / "w")
    assert code == 0, text
    assert f"step 200 of {run}/3/high/checkpoints, the newest complete one" in text
    assert "WorldPlay2 BI or AR; names: native; sizes: tiny" in text
    opened = open_checkpoint(tmp_path / "w")
    assert [e.name for e in opened.experts] == ["high", "low"]
    for expert in opened.experts:
        own = noisy_expert(expert.name).state_dict()
        got = load(expert).state_dict()
        assert all(torch.equal(got[n], averaged(own[n]).bfloat16().float()) for n in own)
    assert rolls_out(scene, tmp_path / "w", tmp_path / "video", "--steps", "2")


def test_raw_and_an_earlier_step_are_had_when_asked_for(run: Path, tmp_path: Path) -> None:
    code, text = wp2("export", run, "--stage", "3", "--step", "100", "--raw", "--out", tmp_path)
    assert code == 0 and f"step 100 of {run}/3/low/checkpoints, as asked" in text
    for expert in open_checkpoint(tmp_path).experts:
        own = noisy_expert(expert.name).state_dict()
        got = load(expert).state_dict()
        assert all(torch.equal(got[n], (own[n] + SHIFT).bfloat16().float()) for n in own)


def test_few_step_heads_become_compact_and_roll_out(run: Path, scene: Path, tmp_path: Path) -> None:
    # Stage 5 has one expert yet, so the last stage that has both is 4.
    code, text = wp2("export", run, "--out", tmp_path / "w")
    assert code == 0 and f"step 10 of {run}/4/high/checkpoints" in text
    assert "WorldPlay2 Fast (4 steps); names: native" in text
    for expert in open_checkpoint(tmp_path / "w").experts:
        bank = with_bank(noisy_expert(expert.name), expert.name).head
        with torch.no_grad():
            for parameter in bank.parameters():
                parameter.copy_(averaged(parameter))
        fused = compact_from_bank(bank, PddSchedule().blocks_of(expert.name)).state_dict()  # type: ignore[arg-type]
        for name in ("block_weight", "block_bias", "modulation"):
            got = read_tensor(expert.entries[f"head.{name}"])
            assert torch.equal(got, fused[name].bfloat16()), name
    assert rolls_out(scene, tmp_path / "w", tmp_path / "video")


def test_diffusers_has_the_base_and_the_rest_beside_it(run: Path, tmp_path: Path) -> None:
    code, text = wp2("export", run, "--stage", "3", "--layout", "diffusers", "--out", tmp_path)
    assert code == 0, text
    assert "Wan2.2 image-to-video, the base without actions and memory; names: diffusers" in text
    assert "without its actions and memory, which lie in worldplay2_additions.safetensors" in text
    beside = read_header(tmp_path / "transformer" / "worldplay2_additions.safetensors")
    own = noisy_expert("high").state_dict()
    base = open_checkpoint(tmp_path).experts[0].entries
    assert len(base) + len(beside) == len(own)
    name = "blocks.1.img_action_mlp.2.weight"
    assert torch.equal(read_tensor(beside[name]), averaged(own["blocks.1.action_mlp.2.weight"]).bfloat16())


def test_what_cannot_be_exported_ends_in_one_line(run: Path, tmp_path: Path) -> None:
    asks: dict[str, list[str | Path]] = {
        "no layout is named 'x'": [run, "--layout", "x"],
        "has few-step heads, and diffusers has no place for them": [run, "--layout", "diffusers"],
        "no complete checkpoint of step 5: there are 100, 200": [run, "--stage", "3", "--step", "5"],
        "5/low/checkpoints has no complete checkpoint: train that expert": [run, "--stage", "5"],
        "has no stage '2a' with checkpoints": [run, "--stage", "2a"],
        "has no stage with a complete checkpoint of every expert": [tmp_path / "none"],
    }
    for says, given in asks.items():
        code, text = wp2("export", *given, "--out", tmp_path / "out")
        assert (code, says in text, "\n" in text) == (1, True, False), text
    assert not (tmp_path / "out").exists()
    assert wp2("export", run, "--stage", "1", "--out", tmp_path / "twice")[0] == 0
    code, text = wp2("export", run, "--stage", "1", "--layout", "diffusers", "--out", tmp_path / "twice")
    assert code == 1 and "is there already: remove it, or choose another folder" in text


def test_another_schedule_or_other_experts_are_refused(run: Path, tmp_path: Path) -> None:
    for stage, high, low in (
        ("4", {"schedule": asdict(PddSchedule(shift=5.0, boundary=None))}, FEW),
        ("6", {}, FEW),
    ):
        add_checkpoint(tmp_path, stage, "high", 1, high)
        add_checkpoint(tmp_path, stage, "low", 1, low)
        code, text = wp2("export", tmp_path, "--stage", stage, "--out", tmp_path / "out")
        assert code == 1 and "train with that one to export" in text, text
    add_checkpoint(tmp_path, "7", "high", 1)
    add_checkpoint(tmp_path, "7", "low", 1, FEW)
    code, text = wp2("export", tmp_path, "--stage", "7", "--out", tmp_path / "out")
    assert code == 1 and "the experts are of different kinds: high is tiny, WorldPlay2 BI or AR" in text


def test_a_damaged_checkpoint_is_named_before_anything_is_written(tmp_path: Path) -> None:
    for step in (1, 2):
        for expert in ("high", "low"):
            add_checkpoint(tmp_path, "3", expert, step)
    path = tmp_path / "3" / "low" / "checkpoints" / "step-00000002" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, text = wp2("export", tmp_path, "--out", tmp_path / "out")
    assert code == 1 and f"{path} is damaged" in text and "give --step 1 to go on" in text
    assert not (tmp_path / "out").exists()
    assert wp2("export", tmp_path, "--step", "1", "--out", tmp_path / "out")[0] == 0

"""`wp2 weights` and `wp2 rollout`, as a user types them: real footage in, video out."""

from __future__ import annotations

import json
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.frames import frame_pass
from pipeline.picture import Picture
from schemas.errors import UserError
from tests.trainer.model_support import noisy_expert
from tests.trainer.tiny_codecs import fitted, tiny_vae
from trainer.config import TINY
from trainer.model.adapters import FILE, Contents, Found, Naming
from trainer.model.pdd_head import VelocityHead, bank_from_velocity, compact_from_bank
from trainer.schedule import PddSchedule
from trainer.weights.transfer import save

CLIP = "loop01_rewind_map02.mp4"
FRAMES = 61  # of 16 latents


def wp2(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and what is said: output, or the line of the error."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, UserError):
        return 1, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, footage: Path) -> Path:
    """Weights of both kinds, a codec, a frame of real footage and an input JSON that asks for it."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("rollout")
    models = {name: noisy_expert(name) for name in ("high", "low")}
    save(models, Found(Naming.NATIVE, Contents.VELOCITY, TINY), root / "ar")
    for name, model in models.items():
        assert isinstance(model.head, VelocityHead)
        bank = bank_from_velocity(model.head, PddSchedule().heads(name))
        model.head = compact_from_bank(bank, PddSchedule().blocks_of(name))
    save(models, Found(Naming.NATIVE, Contents.COMPACT, TINY, 2), root / "fast")
    (root / "codec.json").write_text(fitted().model_dump_json())

    class First:
        def see(self, index: int, picture: Picture) -> None:
            if index == 0:
                cv2.imwrite(str(root / "first.png"), np.ascontiguousarray(picture.rgb[:, :, ::-1]))

    frame_pass(footage / CLIP, [First()])
    entry = {
        "image_path": "first.png",
        "perspective": "fps",
        "action": "none-4,w+left-8,wa+up+space-4",
        "prompt": "The scene in the video is: a stone corridor.",
        "prompt_door": "The scene in the video is: a stone corridor. The event is: a door opens.",
        "prompt_event": "prompt-8,prompt_door-8",
    }
    (root / "input.json").write_text(json.dumps([entry]))
    return root


def pictures(path: Path) -> np.ndarray:
    with av.open(str(path)) as video:
        assert video.streams.video[0].average_rate == 16
        return np.stack([f.to_ndarray(format="rgb24") for f in video.decode(video=0)])


# --- weights ----------------------------------------------------------------------------------------------


def test_inspect_says_what_weights_are(place: Path) -> None:
    code, text = wp2("weights", "inspect", place / "ar")
    assert code == 0
    assert "WorldPlay2 BI or AR; names: native; sizes: tiny" in text
    assert "width 64, 2 layers, 4 heads" in text
    assert "high: 127 tensors, 292,144 parameters, 584,288 bytes in 1 file; 127 bfloat16" in text
    assert "together 1,168,576 bytes" in text
    assert "WorldPlay2 Fast (4 steps)" in wp2("weights", "inspect", place / "fast")[1]


def test_convert_and_diff_agree(place: Path, tmp_path: Path) -> None:
    one = place / "ar" / "high_noise_model" / FILE
    code, text = wp2("weights", "convert", one, tmp_path / "copy")
    assert code == 0 and "single: 127 tensors" in text
    assert (tmp_path / "copy" / FILE).read_bytes() == one.read_bytes()
    code, text = wp2("weights", "diff", one, tmp_path / "copy")
    assert (code, text) == (0, "single: equal; 127 tensors compared, 0 changed\n")
    code, text = wp2("weights", "diff", place / "ar", place / "fast")
    assert code == 1
    assert "only left: 2 (head.head.bias, head.head.weight)" in text
    code, text = wp2("weights", "diff", one, place / "ar" / "low_noise_model")
    assert code == 1 and "single: different" in text and "blocks.0" in text


def test_wrong_weights_end_in_one_line(place: Path, tmp_path: Path) -> None:
    assert wp2("weights", "inspect", tmp_path / "none")[0] == 1
    assert "holds neither" in wp2("weights", "inspect", tmp_path)[1]
    assert "no place for" in wp2("weights", "convert", place / "ar", tmp_path / "o", "--to", "diffusers")[1]
    assert "no layout is named" in wp2("weights", "convert", place / "ar", tmp_path / "o", "--to", "x")[1]


# --- rollout ----------------------------------------------------------------------------------------------


def rollout(place: Path, out: Path, weights: str = "ar", *more: str | Path) -> tuple[int, str]:
    given = ["--weights", place / weights, "--input", place / "input.json", "--out", out]
    codec = [] if "--codec" in more else ["--codec", f"linear:{place / 'codec.json'}"]
    return wp2("rollout", *given, *codec, *more)


def test_a_rollout_makes_a_video_and_one_with_its_controls(place: Path, tmp_path: Path) -> None:
    code, text = rollout(place, tmp_path, "ar", "--steps", "3")
    assert code == 0
    assert "61 frames (3.8 s), 4 chunks in" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0000_first.actions.mp4", "0000_first.mp4"]
    plain, shown = pictures(tmp_path / "0000_first.mp4"), pictures(tmp_path / "0000_first.actions.mp4")
    assert plain.shape == (FRAMES, 64, 128, 3)
    assert shown.shape == (FRAMES, 256, 512, 3)
    # W lights with the first frame of latent 4, A and the space bar with that of latent 12.
    keys = {"w": (slice(202, 222), slice(36, 54)), "a": (slice(226, 242), slice(14, 32))}
    keys["space"] = (slice(226, 242), slice(214, 240))
    lit = {n: [bool(f[at].mean(axis=(0, 1))[0] > 135) for f in shown] for n, at in keys.items()}
    assert {n: (v.index(True), all(v[v.index(True) :])) for n, v in lit.items()} == {
        "w": (13, True),
        "a": (45, True),
        "space": (45, True),
    }


def test_few_step_weights_need_no_settings_and_repeat_bit_by_bit(place: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert rollout(place, tmp_path / folder, "fast")[0] == 0
    first, again = ((tmp_path / f / "0000_first.mp4").read_bytes() for f in "ab")
    assert first == again
    assert rollout(place, tmp_path / "c", "fast", "--seed", "1")[0] == 0
    assert (tmp_path / "c" / "0000_first.mp4").read_bytes() != first


def test_a_vae_from_a_folder_is_used_as_one_from_the_release(place: Path, tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    entry = json.loads((place / "input.json").read_text())[0]
    entry |= {"action": "w-4", "prompt_event": "prompt-4", "image_path": str(place / "first.png")}
    (tmp_path / "one.json").write_text(json.dumps([entry]))
    code, text = wp2(
        "rollout",
        *("--weights", place / "fast", "--input", tmp_path / "one.json", "--out", tmp_path),
        *("--codec", f"wan:{tmp_path / 'vae'}", "--size", "64x64"),
    )
    assert code == 0, text
    assert pictures(tmp_path / "0000_first.mp4").shape == (13, 64, 64, 3)


def test_wrong_asks_end_in_one_line_before_weights_are_loaded(place: Path, tmp_path: Path) -> None:
    asks: dict[str, list[str | Path]] = {
        "multiples of 64": ["--size", "100x100"],
        "give HEIGHTxWIDTH": ["--size", "large"],
        "kinds are linear, wan": ["--codec", "vae"],
        "needs a path": ["--codec", "linear"],
        "is no fitted codec": ["--codec", f"linear:{place / 'input.json'}"],
        "umt5 needs a path": ["--text", "umt5"],
    }
    for says, more in asks.items():
        code, text = rollout(place, tmp_path / "out", "ar", *more)
        assert (code, says in text) == (1, True), text
        assert "\n" not in text
    assert "leave --steps and --guidance out" in rollout(place, tmp_path / "o", "fast", "--steps", "8")[1]
    assert "one expert of 2" in rollout(place, tmp_path / "o", "ar/high_noise_model")[1]
    for change, says in (
        ({"image_path": "none.png"}, "no picture that can be read"),
        ({"action": "w-1028", "prompt_event": "prompt-1028"}, "at most 1024: ask for a shorter video"),
        ({"prompt": "word " * 300}, "has more than 256 tokens"),
    ):
        entry = json.loads((place / "input.json").read_text())[0] | {"image_path": str(place / "first.png")}
        (tmp_path / "in.json").write_text(json.dumps([entry | change]))
        given = ["--weights", place / "ar", "--input", tmp_path / "in.json", "--out", tmp_path / "out"]
        code, text = wp2("rollout", *given, "--codec", f"linear:{place / 'codec.json'}")
        assert (code, says in text) == (1, True), text
    assert not (tmp_path / "out").exists()

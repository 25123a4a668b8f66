"""WBench's navigation cases: read by their vocabulary, played, and laid out for its scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import jobs.commands.evaluate_events  # noqa: F401
from jobs.commands.evaluate import evaluate
from jobs.evaluate.wbench import PlayWith, command_of, play, read_wbench
from jobs.evaluate.world import Case, EvaluationError, Frames, ModelWorld
from pipeline.frames import frame_pass
from schemas.action import AXES
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.rollout import Command
from tests.trainer.model_support import noisy_expert
from tests.trainer.tiny_codecs import fitted
from trainer.config import TINY
from trainer.model.adapters import FILE, Contents, Found, Naming
from trainer.model.pdd_head import bank_from_velocity, compact_from_bank
from trainer.schedule import PddSchedule
from trainer.weights.transfer import save

WITH = PlayWith(seed=0, yaw=3.0, pitch=1.0)


def turn(kind: str, action: str) -> dict[str, Any]:
    return {"turn": 1, "type": kind, "action": action, "prompt": ""}


def case(name: Any, *turns: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """As the public data set has them, with the keys that only the scorer reads."""
    held = {
        "id": name,
        "description": "x",
        "environment_prompt": "A street\nin the rain.",
        "character_prompt": "A red robot.",
        "perspective_prompt": "Seen from behind.",
        "settings": {
            "scene": {"environment": "urban"},
            "style": "realistic",
            "perspective": "third_person",
            "initial_image": f"images/case_{name}.png",
        },
        "interactions": list(turns),
        "eval_dimensions": {"consistency": True},
    }
    settings = held["settings"] | changed.pop("settings", {})
    return held | changed | {"settings": settings}


def data_of(folder: Path, *cases: dict[str, Any]) -> Path:
    (folder / "cases").mkdir(parents=True)
    (folder / "images").mkdir()
    for held in cases:
        (folder / f"cases/case_{held['id']}.json").write_text(json.dumps(held, ensure_ascii=False))
        cv2.imwrite(str(folder / f"images/case_{held['id']}.png"), np.full((90, 160, 3), 60, np.uint8))
    return folder


class Plain:
    """Every frame the brightness of its chunk. dies_in: the case and chunk in which it ends."""

    name = "plain"

    def __init__(self, dies_in: tuple[str, int] = ("", -1)) -> None:
        self.played: list[str] = []
        self.dies_in = dies_in

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        self.played.append(case.name)
        for chunk in range(case.chunks):
            if (case.name, chunk) == self.dies_in:
                raise RuntimeError("out of memory")
            yield np.full((13 if chunk == 0 else 16, 64, 128, 3), 10 * chunk, np.uint8)


def test_turns_become_rows_prompts_and_places_of_four_seconds(tmp_path: Path) -> None:
    turns = (turn("navigation", "W+A"), turn("navigation", "→"), turn("event_edit", "Snow begins to fall."))
    data = data_of(
        tmp_path / "data",
        case("e_5", *turns, turn("navigation", "W+up")),
        case(
            "ps_3",
            turn("navigation", "S"),
            turn("perspective_switch", "tp_to_fp"),
            turn("navigation", "stop"),
        ),
        case(7, turn("subject_action", "The robot waves.")),
    )
    found = read_wbench(data)
    assert found.of == 3 and [c.name for c in found.cases] == ["e_5", "ps_3"]
    first, second = found.cases
    played = first.case(3.0, 1.0)
    assert played.rows.shape == (64, len(AXES)) and not played.rows[0].any()
    assert played.rows[1:16].tolist() == [[0, 0, 1, -1, 0, 0]] * 15
    assert played.rows[16:32].tolist() == [[0, 3, 0, 0, 0, 0]] * 16
    assert not played.rows[32:48].any()
    assert played.rows[48:].tolist() == [[1, 0, 1, 0, 0, 0]] * 16
    plain = "The scene in the video is: A street in the rain. The character is: A red robot."
    assert (
        played.prompts == (plain,) * 8 + (f"{plain} The event is: Snow begins to fall.",) * 4 + (plain,) * 4
    )
    assert first.turn_frames == (0, 61, 125, 189, 253)
    rows = second.case(3.0, 1.0).rows
    assert rows[:, AXES.index("perspective")].tolist() == [0] * 16 + [1] * 32
    assert second.prompts[1] == "The scene in the video is: A street in the rain."
    assert second.views == (Perspective.THIRD, Perspective.FIRST, Perspective.FIRST)


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("W", Command(16, forward=1)),
        ("S + D", Command(16, forward=-1, lateral=1)),
        ("left", Command(16, yaw=-1)),
        ("↓", Command(16, pitch=-1)),
        ("W+right+up", Command(16, forward=1, yaw=1, pitch=1)),
        ("cam_left", Command(16, yaw=-1)),
        ("stop", Command(16)),
    ],
)
def test_keys_have_the_sign_of_the_model_s_own_axes(action: str, command: Command) -> None:
    assert command_of(action, "test") == command


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (
            case(1, turn("navigation", "Q")),
            "case_1.json: turn 0: key 'Q' of 'Q' is none of W, S, A, D, right",
        ),
        (case(1, turn("navigation", "W+S")), "turn 0: 'W[+]S' holds two keys of forward"),
        (case(1, turn("navigation", "W"), turn("dance", "x")), "interactions.1.type.*'dance'"),
        (
            case(1, turn("navigation", "W"), turn("perspective_switch", "up")),
            "turn 1: switch 'up' is none of",
        ),
        (case(1, turn("navigation", "W"), settings={"perspective": "isometric"}), "'isometric'"),
        (case(1, turn("navigation", "W"), settings={"initial_image": "gone.png"}), "gone.png is missing"),
        (case("../1", turn("navigation", "W")), "makes no file name"),
        (case(1, turn("navigation", "W"), environment_prompt="", character_prompt=""), "says anything"),
        (case(1, turn("navigation", "W"), environment_prompt="a\u200bb"), r"environment_prompt: U\+200B"),
        (case(1, turn("subject_action", "x")), "none of 1 cases has a navigation turn"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, held: dict[str, Any], told: str) -> None:
    file = tmp_path / "cases/case_1.json"
    file.parent.mkdir()
    file.write_text(json.dumps(held))
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images/case_1.png"), np.zeros((9, 16, 3), np.uint8))
    with pytest.raises(EvaluationError, match=told):
        read_wbench(tmp_path)


def test_videos_lie_where_the_scorer_looks_and_whole_ones_are_kept(tmp_path: Path) -> None:
    two = [turn("navigation", "W"), turn("navigation", "left")]
    cases = read_wbench(data_of(tmp_path / "data", *(case(k, *two) for k in (1, 2, 3)))).cases
    out = tmp_path / "work_dirs/mine"
    with pytest.raises(RuntimeError):
        play(Plain(("2", 5)), cases, out, WITH, lambda *_: None)
    assert [p.name for p in (out / "videos").glob("case*")] == ["case_1_combined.mp4"]
    whole = (out / "videos/case_1_combined.mp4").read_bytes()
    world = Plain()
    done = play(world, cases, out, WITH, lambda *_: None)
    assert (done.made, done.kept, world.played) == (2, 1, ["2", "3"])
    assert (out / "videos/case_1_combined.mp4").read_bytes() == whole
    decoded = frame_pass(out / "videos/case_3_combined.mp4")
    assert len(decoded) == 2 * 64 - 3 and decoded.report.stream.rates[0] == 16
    turns = json.loads((out / "turns.json").read_text())
    assert turns == {"fps": 16, "cases": {str(k): {"turn_frames": [0, 61, 125]} for k in (1, 2, 3)}}
    (out / "videos/case_2_combined.mp4").write_bytes(whole[: len(whole) // 2])  # as a copy that was cut off
    assert play(Plain(), cases, out, WITH, lambda *_: None).made == 1
    with pytest.raises(EvaluationError, match=r"made.json: yaw was 3.0 and is now 6.0"):
        play(Plain(), cases, out, PlayWith(0, 6.0, 1.0), lambda *_: None)


def test_processes_can_share_the_cases(tmp_path: Path) -> None:
    one = [turn("navigation", "W")]
    cases = read_wbench(data_of(tmp_path / "data", *(case(k, *one) for k in range(5)))).cases
    worlds = [Plain(), Plain()]
    for k, world in enumerate(worlds):
        play(world, cases, tmp_path / "out", PlayWith(0, 3.0, 1.0, part=(k, 2)), lambda *_: None)
    assert [w.played for w in worlds] == [["0", "2", "4"], ["1", "3"]]
    assert len(json.loads((tmp_path / "out/turns.json").read_text())["cases"]) == 5


def test_the_command_plays_cases_with_a_model_and_reads_no_weights_where_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    models = {name: noisy_expert(name) for name in ("high", "low")}
    for name, model in models.items():
        bank = bank_from_velocity(model.head, PddSchedule().heads(name))
        model.head = compact_from_bank(bank, PddSchedule().blocks_of(name))
    save(models, Found(Naming.NATIVE, Contents.COMPACT, TINY, 2), tmp_path / "fast")
    (tmp_path / "codec.json").write_text(fitted().model_dump_json())
    data = data_of(
        tmp_path / "data", case(1, turn("navigation", "W")), case(2, turn("event_edit", "It snows."))
    )
    call = ["wbench", tmp_path / "fast", "--data", data, "--codec", f"linear:{tmp_path / 'codec.json'}"]
    call += ["--out", tmp_path / "work_dirs/fast"]
    wrong = [*call, "--codec", f"linear:{data / 'cases/case_1.json'}"]
    with pytest.raises(UserError, match="is no fitted codec"):
        CliRunner().invoke(evaluate, [str(a) for a in wrong], catch_exceptions=False)
    assert not (tmp_path / "work_dirs/fast/made.json").exists(), "pinned to what cannot be run"
    done = CliRunner().invoke(evaluate, [str(a) for a in call], catch_exceptions=False)
    assert "1 navigation cases of 2" in done.output and "1 videos made, 0 were there" in done.output
    video = tmp_path / "work_dirs/fast/videos/case_1_combined.mp4"
    assert len(frame_pass(video)) == 61
    monkeypatch.delattr(ModelWorld, "loaded")
    done = CliRunner().invoke(evaluate, [str(a) for a in call], catch_exceptions=False)
    assert "0 videos made, 1 were there" in done.output
    weights = tmp_path / "fast/high_noise_model" / FILE
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(EvaluationError, match=r"made.json: weights was [0-9a-f]{64} and is now"):
        CliRunner().invoke(evaluate, [str(a) for a in call], catch_exceptions=False)

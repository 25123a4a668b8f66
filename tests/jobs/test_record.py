"""The recorder: its video and logs agree with each other and with the game."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import yaml

pytest.importorskip("vizdoom", reason="recording needs the demo extra")

from jobs.record import RecordError, RecordingSummary, camera, record
from jobs.record.engine import DEGREES_PER_COUNT, KEY_TURN, KEY_TURN_SLOW, WAD_FOLDER, Engine, Input
from jobs.record.recorder import _record_one
from jobs.record.routes import walk_map
from jobs.record.takes import Job
from jobs.record.wad import read_map

SMALL = (320, 180)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(table: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in table])


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.array([frame.to_ndarray(format="gray") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RecordingSummary]]:
    """Four short recordings: mouse and keys, first and third person."""
    folder = tmp_path_factory.mktemp("recordings")
    return folder, record(
        folder, seed=5, navigation=4, loops=0, events=0, seconds=6, size=SMALL, third_person_share=0.5
    )


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecordingSummary]:
    folder = tmp_path_factory.mktemp("loops")
    return folder, record(
        folder, seed=3, navigation=0, loops=1, events=0, seconds=8, size=SMALL, third_person_share=0
    )[0]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, seed=9, navigation=1, loops=0, events=1, seconds=8, size=SMALL)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")
    )
    assert len(first) == 2 * 6 + 1
    assert first == second


def test_another_seed_gives_another_recording(
    made: tuple[Path, list[RecordingSummary]], tmp_path: Path
) -> None:
    (other,) = record(tmp_path, seed=6, navigation=1, loops=0, events=0, seconds=2, size=SMALL)
    assert decode(tmp_path / f"{other.name}.mp4").tobytes() not in {
        decode(made[0] / f"{s.name}.mp4")[:70].tobytes() for s in made[1]
    }


def test_every_log_has_one_row_a_decoded_frame(made: tuple[Path, list[RecordingSummary]]) -> None:
    folder, summaries = made
    for summary in summaries:
        frames = len(decode(folder / f"{summary.name}.mp4"))
        assert frames == summary.frames == 6 * 35
        for log in ("input", "poses", "truth"):
            table = rows(folder / f"{summary.name}.{log}.csv")
            assert [int(row["frame"]) for row in table] == list(range(frames))


def test_mouse_counts_explain_every_turn(made: tuple[Path, list[RecordingSummary]]) -> None:
    folder, summaries = made
    mouse = [s for s in summaries if s.game.endswith("mouse")]
    assert mouse
    for summary in mouse:
        held = rows(folder / f"{summary.name}.input.csv")[:-1]
        truth = rows(folder / f"{summary.name}.truth.csv")[:-1]
        for counts, turn in (("mouse_counts_x", "d_yaw_right_deg"), ("mouse_counts_y", "d_pitch_up_deg")):
            error = column(held, counts) * DEGREES_PER_COUNT - column(truth, turn)
            assert np.abs(error).max() < 1e-3
        assert np.abs(column(held, "mouse_counts_x")).max() > 5


def test_turn_keys_explain_every_turn(made: tuple[Path, list[RecordingSummary]]) -> None:
    folder, summaries = made
    keys = [s for s in summaries if s.game.endswith("keys")]
    assert keys
    for summary in keys:
        held = rows(folder / f"{summary.name}.input.csv")[:-1]
        turn = column(rows(folder / f"{summary.name}.truth.csv")[:-1], "d_yaw_right_deg")
        side = column(held, "TURN_RIGHT") - column(held, "TURN_LEFT")
        pressed = 0
        for t, direction in enumerate(side):
            pressed = pressed + 1 if direction else 0
            rate = KEY_TURN_SLOW if pressed <= 5 else KEY_TURN
            assert turn[t] == pytest.approx(direction * rate, abs=1e-3)
        assert np.abs(side).sum() > 5
        assert not column(held, "mouse_counts_x").any()


def test_poses_turn_and_move_with_the_truth(made: tuple[Path, list[RecordingSummary]]) -> None:
    folder, summaries = made
    for summary in summaries:
        pose = rows(folder / f"{summary.name}.poses.csv")
        truth = rows(folder / f"{summary.name}.truth.csv")
        right = -np.diff(np.unwrap(column(pose, "yaw_deg"), period=360.0))
        assert np.abs(right - column(truth[:-1], "d_yaw_right_deg")).max() < 1e-3
        up = -np.diff(np.unwrap(column(pose, "pitch_deg"), period=360.0))
        assert np.abs(up - column(truth[:-1], "d_pitch_up_deg")).max() < 1e-3
        away = np.hypot(
            column(pose, "x") - column(truth, "POSITION_X"), column(pose, "y") - column(truth, "POSITION_Y")
        )
        if summary.perspective == "fps":
            assert away.max() < 1e-3
        else:
            assert 20.0 < np.median(away) <= 90.0 + 1e-6


def test_a_walk_moves_and_covers_ground(made: tuple[Path, list[RecordingSummary]]) -> None:
    for summary in made[1]:
        assert summary.moving_share > 0.3
        assert summary.path_units > 600.0
        assert summary.near_wall_share < 0.5


def test_a_loop_ends_where_it_began_and_shows_the_same_picture(loop: tuple[Path, RecordingSummary]) -> None:
    folder, summary = loop
    assert summary.closure_units is not None and summary.closure_units < 1.0
    assert summary.closure_deg is not None and summary.closure_deg < 0.5
    block = json.loads((folder / f"{summary.name}.truth.json").read_text())["loop"]
    assert 0 < block["return_start"] < block["return_end"] < summary.frames
    assert block["farthest_units"] > 200.0
    frames = decode(folder / f"{summary.name}.mp4").astype(np.float64)
    same = np.abs(frames[block["return_end"]] - frames[0]).mean()
    elsewhere = np.abs(frames[block["return_start"]] - frames[0]).mean()
    assert same < 0.35 * elsewhere


def test_the_third_person_camera_puts_things_where_the_engine_draws_them() -> None:
    geometry = read_map(WAD_FOLDER / "freedoom2.wad", "MAP17")
    miss: dict[str, list[float]] = {"camera": [], "eye": []}
    engine = Engine("freedoom2.wad", "MAP17", seed=5, monsters=False, third_person=True, size=(640, 360))
    engine._game.set_labels_buffer_enabled(True)  # the engine's own boxes: an independent witness
    rng = np.random.default_rng(0)
    with engine:
        walk = walk_map(geometry, [], doors=False)
        nodes = np.flatnonzero(
            walk.clearance[walk.walkable] < 80.0
        )  # near walls, so that some stop the camera
        for node in rng.choice(nodes, 150):
            x, y = walk.centre(np.array(node))
            engine.command(f"warp {x:.0f} {y:.0f}")
            engine.step(Input(mouse_x=int(rng.integers(-1200, 1200))))
            engine.step(Input())
            state, _ = engine.look()
            sector = int(walk.sector[tuple(walk.cell_of(state.position))])
            views = {
                "camera": camera.third_person(state, geometry, sector),
                "eye": camera.first_person(state),
            }
            for box in engine._game.get_state().labels:
                whole = box.x > 1 and box.x + box.width < 639
                if box.object_name == "DoomPlayer" or not whole:
                    continue
                for name, (x, y, _, yaw, _, _) in views.items():
                    angle = np.radians(yaw)
                    dx, dy = box.object_position_x - x, box.object_position_y - y
                    depth = dx * np.cos(angle) + dy * np.sin(angle)
                    if 60.0 < depth < 600.0:
                        column_ = 320.0 + 240.0 * (dx * np.sin(angle) - dy * np.cos(angle)) / depth
                        miss[name].append(abs(column_ - (box.x + box.width / 2)))
    assert len(miss["camera"]) > 100
    assert np.median(miss["camera"]) < 1.0  # pixels; the first person's own miss is 0.4
    assert np.median(miss["eye"]) > 5.0


def test_third_person_shows_the_player() -> None:
    pictures = []
    for third_person in (False, True):
        with Engine(
            "freedoom2.wad", "MAP01", seed=1, monsters=False, third_person=third_person, size=SMALL
        ) as engine:
            pictures.append(engine.look()[1].astype(int))
    red, green, blue = pictures[1][80:170, 120:200].reshape(-1, 3).T
    armour = ((green > red + 30) & (green > blue + 30)).mean()
    assert armour > 0.05
    assert np.abs(pictures[0] - pictures[1]).mean() > 5.0


@pytest.mark.soak  # 16 s
def test_an_event_recording_holds_its_event(tmp_path: Path) -> None:
    wanted = ("door_open", "monster_killed", "object_removed")
    made = record(
        tmp_path, seed=2, navigation=0, loops=0, events=3, seconds=10, size=SMALL, third_person_share=0
    )
    for summary, kind in zip(made, wanted, strict=True):
        lines = (tmp_path / f"{summary.name}.events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        assert kind in {event["type"] for event in events}
        for event in events:
            assert 0 <= event["start"] <= event["end"] < summary.frames
            assert event["object"]


def test_an_event_that_a_map_cannot_have_is_played_on_another(tmp_path: Path) -> None:
    """MAP10 has no door."""
    name = "doom_keys_event06"
    job = Job(
        f"{name}_map10", "doom_keys", "event", 6, "freedoom2.wad", "MAP10", "keys", False, 300, (0, 1, 144)
    )
    made = _record_one(tmp_path, job, SMALL, None)
    assert made.name.startswith(name) and not made.name.endswith("map10")
    assert {p.name.split(".")[0] for p in tmp_path.iterdir()} == {made.name}
    truth = json.loads((tmp_path / f"{made.name}.truth.json").read_text())
    assert truth["map"]["level"].lower() == made.name.rsplit("_", 1)[1]


def test_the_key_map_names_each_recording_once(made: tuple[Path, list[RecordingSummary]]) -> None:
    folder, summaries = made
    games = yaml.safe_load((folder / "games.yaml").read_text())["games"]
    for summary in summaries:
        owners = [
            game
            for game in games
            for pattern in game["videos"]
            if folder / f"{summary.name}.mp4" in folder.glob(pattern)
        ]
        assert [game["game"] for game in owners] == [summary.game]
        assert owners[0]["perspective"] == summary.perspective
        header = rows(folder / owners[0]["log"]["file"].format(stem=summary.name))[0]
        assert {entry["column"] for entry in owners[0]["log"]["inputs"]} <= set(header)


def test_without_vizdoom_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['vizdoom'] = None; import jobs.record"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "pip install 'wp2[demo]'" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"navigation": 0}, "nothing to record"),
        ({"size": (333, 77)}, "not one that ViZDoom renders"),
        ({"seconds": 0.5}, "at least 2 s"),
        ({"third_person_share": 2.0}, "share from 0 to 1"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {"seed": 1, "navigation": 1, "loops": 0, "events": 0, "seconds": 2.0}
    with pytest.raises(RecordError, match=says):
        record(tmp_path, **(arguments | change))  # type: ignore[arg-type]

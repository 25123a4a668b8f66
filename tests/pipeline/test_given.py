"""Logged cameras against the truth of the pack, in every convention. Source: faults P7, P8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import label, pack_map, small_source, table, truth
from scipy.spatial.transform import Rotation

from pipeline.pose.given import camera_to_world
from pipeline.pose.stage import PoseConfig, turns
from pipeline.sources import SourceConfig
from pipeline.sources.keymap import PosePart
from pipeline.store import Store
from schemas.pose import PoseTrack, Scale, turn

# Every clip with a truth table; their largest error is 1e-13 degrees (nav04), rounding of float64.
CLIPS = [
    "bad01_jitter", "bad03_hud", "bad04_menu", "event01_door_map01", "event03_kill_zombieman",
    "event05_pickup_bonus", "event07_fight_defend_center", "event09_pickup_shotgun_e1m1",
    "loop01_rewind_map02",
    "loop03_turn180_deathmatch_offpath", "loop04_rewind_map06", "nav01_mouse_map01", "nav02_mouse_map02",
    "nav04_mouse_mywayhome", "nav05_keys_deathmatch", "nav06_keys_map05", "nav08_runkeys_map03",
    "nav10_lowsens_map04", "nav11_lowsens_e1m2", "nav12_miniworld_fourrooms", "nonloop01_oneway_drop_e1m1",
    "odd_long_5min", "odd_short_140f", "q_ref_crf18",
]  # fmt: skip
TOLERANCE_DEG = 1e-9


def pack_track(footage: Path, folder: Path, clip: str) -> tuple[PoseTrack, Any]:
    rows, frames = truth(footage, clip)
    done = label(Store(str(footage)), Store(str(folder / "corpus")), f"{clip}.mp4", pack_map(folder), frames)
    assert done.pose.facts["valid_share"] == 1.0, done.pose.reasons
    return done.track, rows


@pytest.mark.parametrize("clip", CLIPS)
def test_the_turn_between_frames_is_the_truth(footage: Path, tmp_path: Path, clip: str) -> None:
    track, rows = pack_track(footage, tmp_path, clip)
    want = rows[["d_yaw_right_deg", "d_pitch_up_deg"]].to_numpy()[:-1]
    assert np.abs(turns(track)[:-1] - want).max() < TOLERANCE_DEG


# Steps in which one direction has been held for half a second: none goes the other way; those that stand
# still (nav02: 24 % of 72 steps to the right, nav12: 8 % of 196 forward) lean on a wall.
@pytest.mark.parametrize(
    "clip", ["nav01_mouse_map01", "nav02_mouse_map02", "nav06_keys_map05", "nav12_miniworld_fourrooms"]
)
def test_the_camera_moves_the_way_the_keys_say(footage: Path, tmp_path: Path, clip: str) -> None:
    track, rows = pack_track(footage, tmp_path, clip)
    motion = np.diff(track.translation, axis=0)
    for held, opposite, axis in (("MOVE_FORWARD", "MOVE_BACKWARD", 2), ("MOVE_RIGHT", "MOVE_LEFT", 0)):
        pressed = (rows[held] > 0) & (rows[opposite] == 0)
        steady = pressed.rolling(18).sum().to_numpy()[:-1] == 18
        along = np.einsum("ni,ni->n", motion, track.rotation[:-1, :, axis])[steady]
        if len(along):
            assert not (along < -0.005).any() and (along > 0.005).mean() > 0.7


def test_scale_follows_the_key_map(footage: Path, tmp_path: Path) -> None:
    track, rows = pack_track(footage, tmp_path, "nav05_keys_deathmatch")
    assert track.scale is Scale.METRE
    assert track.translation[7] == pytest.approx(
        rows.loc[7, ["CAMERA_POSITION_X", "CAMERA_POSITION_Y", "CAMERA_POSITION_Z"]].to_numpy(float) / 32
    )
    maze, _ = pack_track(footage, tmp_path, "nav12_miniworld_fourrooms")
    assert maze.scale is Scale.UNKNOWN and maze.up == (0.0, 1.0, 0.0)


def part(**more: Any) -> PosePart:
    base = {
        "file": "run.csv",
        "columns": {"x": "x", "y": "y", "z": "z", "yaw": "yaw", "pitch": "pitch", "roll": "roll"},
        "world": {"up": "z", "handed": "right"},
        "yaw_positive": "left",
        "pitch_positive": "up",
    }
    return PosePart.model_validate({**base, **more})


def columns(**given: list[float]) -> dict[str, np.ndarray]:
    n = len(next(iter(given.values())))
    named = {name: np.zeros(n) for name in ("x", "y", "z", "yaw", "pitch", "roll")}
    return {**named, **{k: np.asarray(v, float) for k, v in given.items()}}


def test_camera_at_1_2_3_looking_along_x_steps_forward_then_turns_left() -> None:
    """The smallest trigger of P7."""
    r, t = camera_to_world(columns(x=[1, 2, 2], y=[2, 2, 2], z=[3, 3, 3], yaw=[0, 0, 10]), part())
    assert r[0].T @ (t[1] - t[0]) == pytest.approx([0, 0, 1])  # forward is +z of the camera
    assert r[0] @ [1, 0, 0] == pytest.approx([0, -1, 0])  # facing east, south is on the right
    assert r[0] @ [0, 1, 0] == pytest.approx([0, 0, -1])  # y is down
    assert turn(r[:-1], r[1:], (0.0, 0.0, 1.0)) == pytest.approx(np.array([[0, 0], [-10, 0]]))
    assert np.linalg.inv(np.linalg.inv(r[2])) == pytest.approx(r[2])


@pytest.mark.parametrize(
    ("more", "ahead", "right"),
    [
        ({"world": {"up": "z", "handed": "right"}}, "x", "-y"),  # ViZDoom, Quake
        ({"world": {"up": "y", "handed": "right"}}, "x", "z"),  # MiniWorld
        ({"world": {"up": "y", "handed": "right"}, "yaw_zero": "z"}, "z", "-x"),  # Minecraft
        ({"world": {"up": "y", "handed": "left"}, "yaw_zero": "z"}, "z", "x"),  # Unity
        ({"world": {"up": "z", "handed": "left"}}, "x", "y"),  # Unreal
    ],
)
def test_a_step_to_the_right_of_yaw_0_goes_to_the_right_in_every_world(
    more: dict[str, Any], ahead: str, right: str
) -> None:
    def axis(name: str) -> dict[str, list[float]]:
        return {name[-1]: [0, -1 if name[0] == "-" else 1]}

    for signs in ({}, {"yaw_positive": "right"}, {"pitch_positive": "down"}):
        p = part(**more, **signs)
        for name, along in ((ahead, 2), (right, 0)):
            r, t = camera_to_world(columns(**axis(name)), p)
            assert r[0].T @ (t[1] - t[0]) == pytest.approx(np.eye(3)[along])
            assert np.linalg.det(r[0]) == pytest.approx(1)
        r, _ = camera_to_world(columns(yaw=[0, 10, 10], pitch=[0, 0, 5]), p)
        up = (0.0, 1.0, 0.0) if p.world.up == "y" else (0.0, 0.0, 1.0)
        yaw = 10 if p.yaw_positive == "right" else -10
        pitch = 5 if p.pitch_positive == "up" else -5
        assert turn(r[:-1], r[1:], up) == pytest.approx(np.array([[yaw, 0], [0, pitch]]))


@pytest.mark.parametrize("handed", ["right", "left"])
def test_a_head_that_leans_right_dips_its_right_side(handed: str) -> None:
    r, _ = camera_to_world(columns(roll=[30]), part(world={"up": "z", "handed": handed}))
    assert (r[0] @ [1, 0, 0])[2] == pytest.approx(-0.5)
    r, _ = camera_to_world(columns(roll=[30]), part(roll_positive="left"))
    assert (r[0] @ [1, 0, 0])[2] == pytest.approx(0.5)


@pytest.mark.parametrize("direction", ["c2w", "w2c"])
@pytest.mark.parametrize("camera", ["opencv", "opengl"])
def test_a_quaternion_says_the_same_in_every_stated_convention(direction: str, camera: str) -> None:
    angles = columns(x=[1, 2], y=[2, 2], z=[3, 4], yaw=[20, -35], pitch=[5, 60], roll=[3, -8])
    rotation, translation = camera_to_world(angles, part())
    written = rotation * np.array([1, -1, -1]) if camera == "opengl" else rotation
    position = translation
    if direction == "w2c":
        written = written.transpose(0, 2, 1)
        position = -np.einsum("nij,nj->ni", written, translation)
    q = Rotation.from_matrix(written).as_quat(scalar_first=True) * 2.0  # not of unit length
    log = dict(
        zip(("x", "y", "z", "qw", "qx", "qy", "qz"), np.concatenate((position, q), axis=1).T, strict=True)
    )
    p = PosePart.model_validate(
        {
            "file": "run.csv",
            "columns": {name: name for name in log},
            "world": {"up": "z", "handed": "right"},
            "quaternion": {"direction": direction, "camera": camera},
        }
    )
    r, t = camera_to_world(log, p)
    assert r == pytest.approx(rotation) and t == pytest.approx(translation)


POSE_LOG = {"x": range(40), "y": [0] * 40, "z": [0] * 40, "yaw": [-179, 179, -178, 178] * 10}
POSE_ENTRY = {
    "poses": {
        "file": "run.csv",
        "columns": {"x": "x", "y": "y", "z": "z", "yaw": "yaw"},
        "world": {"up": "z", "handed": "right"},
        "yaw_positive": "right",
    }
}


def test_frames_without_a_row_are_invalid_with_a_reason_and_never_filled(tmp_path: Path) -> None:
    short = {k: [*v][:30] for k, v in POSE_LOG.items()}
    short["yaw"][5] = np.nan
    source = small_source(tmp_path, short, POSE_ENTRY)
    done = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(40, 30))
    track = done.track
    assert np.flatnonzero(~track.valid).tolist() == [5, *range(30, 40)]
    assert np.isnan(track.rotation[5]).all() and np.isnan(track.translation[35]).all()
    assert done.pose.facts["valid_share"] == 0.725
    assert turns(track)[:3, 0] == pytest.approx([-2, 3, -4])


def test_a_halved_clip_takes_the_rows_of_its_own_frames(tmp_path: Path) -> None:
    source = small_source(tmp_path, POSE_LOG, POSE_ENTRY)
    frames = table(20, 30, source_index=np.arange(0, 40, 2))
    track = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), frames).track
    assert track.translation[:, 0].tolist() == list(range(0, 40, 2))


def test_a_pose_log_with_a_clock_is_met_by_time(tmp_path: Path) -> None:
    log = {**POSE_LOG, "t": [100 + k / 60 for k in range(40)]}
    entry = {"poses": {**POSE_ENTRY["poses"], "time": "t", "clock_start": 100}}
    source = small_source(tmp_path, log, entry)
    track = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(25, 30)).track
    assert track.translation[:20, 0].tolist() == list(range(0, 40, 2))
    assert track.valid[20] and track.translation[20, 0] == 39  # exactly half a frame away: inside
    assert not track.valid[21:].any()


def test_a_pose_log_that_cannot_be_read_fails_the_clip_with_its_reason(footage: Path, tmp_path: Path) -> None:
    source = small_source(tmp_path, {"x": [0], "y": [0], "z": ["here"], "yaw": [0]}, POSE_ENTRY)
    done = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(1, 30))
    assert done.pose.reasons == ("bad_sidecar: run.csv row 0, column 'z': 'here' is not a number",)
    for log, says in (
        ({"x": [0], "y": [0], "z": [0], "yaw": [1e300]}, "run.csv row 0, column 'yaw': 1e+300 is too large"),
        ({"x": [], "y": [], "z": [], "yaw": []}, "run.csv has no rows"),
    ):
        small_source(tmp_path, log, POSE_ENTRY)
        done = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(1, 30))
        assert done.pose.reasons[0].startswith(f"bad_sidecar: {says}")
    (tmp_path / "run.csv").unlink()
    done = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(1, 30))
    assert done.pose.reasons[0].startswith("bad_sidecar: run.csv is missing from the source")


def test_without_a_pose_log_or_when_told_so_every_row_is_unknown(footage: Path, tmp_path: Path) -> None:
    _, frames = truth(footage, "odd_short_140f")
    source, corpus = Store(str(footage)), Store(str(tmp_path / "corpus"))
    for poses, estimators in ((False, ("given", "none")), (True, ("none",)), (False, ("given",))):
        config = pack_map(tmp_path, poses)
        pose = PoseConfig.model_validate({"estimators": estimators})
        done = label(source, corpus, "odd_short_140f.mp4", config, frames, pose)
        assert done.pose.facts["estimator"] == "none" and not done.track.valid.any()


def test_a_turn_of_more_than_90_degrees_in_a_frame_is_flagged(tmp_path: Path) -> None:
    source = small_source(tmp_path, {**POSE_LOG, "yaw": [0] * 20 + [120] * 20}, POSE_ENTRY)
    done = label(source, Store(str(tmp_path / "corpus")), "run.mp4", SourceConfig(), table(40, 30))
    assert done.pose.facts["ambiguous_steps"] == 1


def test_poses_have_the_same_bytes_again(footage: Path, tmp_path: Path) -> None:
    _, frames = truth(footage, "odd_short_140f")
    source, config = Store(str(footage)), pack_map(tmp_path)
    a, b = (label(source, Store(str(tmp_path / c)), "odd_short_140f.mp4", config, frames) for c in "ab")
    assert a.file("pose", "poses.parquet") == b.file("pose", "poses.parquet")

"""Rotation rates: near the truth of the pack, blind to what is no answer to an input, silent where not sure.

Source: spec/faults.md C2, C5, C7, W3, W7; DESIGN rules 4 and 10.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from recordings import PACK_MAP, label, pack_map, table, truth
from scipy.spatial.transform import Rotation

from pipeline.actions import ActionsConfig
from pipeline.alignment import Alignment
from pipeline.frames import frame_pass
from pipeline.inputs import Inputs, read_inputs
from pipeline.latent_turns import Chosen, agreement, choose
from pipeline.pose.focal import find_turns, pool
from pipeline.pose.given import Given
from pipeline.pose.stage import PoseConfig
from pipeline.pose.tracks import Tracker, Tracks
from pipeline.pose.vo import solve
from pipeline.rotation import Recording, calibrate, recording
from pipeline.rotation_inputs import drive
from pipeline.rotation_masks import Mark, marks
from pipeline.sources.gameplay import entry_of
from pipeline.sources.keymap import Action, Input, InputUnit, LogPart, parse
from pipeline.statistics import freeze, newest
from pipeline.store import Store
from schemas import timeline
from schemas.action import YAW, InputRate, RampLevel, RateStatus, RotationRates, Witness
from schemas.pose import PoseTrack, Scale

MOUSE = (
    Input(column="dx", action=Action.YAW, unit=InputUnit.COUNT),
    Input(column="dy", action=Action.PITCH, unit=InputUnit.COUNT),
)
KEYS = (
    Input(column="LEFT", action=Action.YAW, sign=-1),
    Input(column="RIGHT", action=Action.YAW, sign=1),
    Input(column="SPEED", action=Action.RUN),
)
NAVIGATION = [
    "nav01_mouse_map01", "nav02_mouse_map02", "nav04_mouse_mywayhome", "nav05_keys_deathmatch",
    "nav06_keys_map05", "nav08_runkeys_map03", "nav10_lowsens_map04", "nav11_lowsens_e1m2",
    "nav12_miniworld_fourrooms",
]  # fmt: skip
INCOMPLETE = [
    "event01_door_map01", "event07_fight_defend_center", "loop01_rewind_map02",
    "loop03_turn180_deathmatch_offpath", "loop04_rewind_map06", "nonloop01_oneway_drop_e1m1",
]  # fmt: skip


def odometry(turned: np.ndarray, seed: int) -> np.ndarray:
    """[F, 2] degrees with the errors that `vo` has: noise of 0.05, 2 % wild steps, 5 % missing, 3 % too much
    in a fifth of the steps."""
    rng = np.random.default_rng(seed)
    out = turned * np.where(rng.random(len(turned)) < 0.2, 1.03, 1.0)[:, None]
    out += rng.normal(0, 0.05, out.shape)
    out += np.where(rng.random(len(out)) < 0.02, rng.normal(0, 8.0, len(out)), 0.0)[:, None]
    out[rng.random(len(out)) < 0.05] = np.nan
    return out


def from_pack(footage: Path, clip: str, seed: int) -> tuple[Recording, pd.DataFrame]:
    rows, frames = truth(footage, clip)
    entry = parse(PACK_MAP.read_text(), PACK_MAP.name).match(f"{clip}.mp4")
    assert entry is not None and entry.log is not None
    inputs = read_inputs(Store(str(footage)), f"{clip}.truth.csv", entry.log, frames)
    turned = odometry(rows[["d_yaw_right_deg", "d_pitch_up_deg"]].to_numpy(), seed)
    return Recording(clip, entry.game, inputs, frames.seconds, turned, frames.repeat), rows


def made(
    values: dict[str, np.ndarray],
    yaw: np.ndarray,
    inputs: tuple[Input, ...],
    fps: int = 30,
    clip: str = "a",
    game: str = "toy",
    pitch: np.ndarray | None = None,
    repeat: np.ndarray | None = None,
) -> Recording:
    """A recording with these log columns and this yaw a step."""
    f = len(yaw)
    row = np.arange(f)
    part = LogPart(file="{stem}.csv", inputs=inputs)
    logged = Inputs(part, values, Alignment(row, row, row + 1, f, 0, 0.0))
    turned = np.stack([yaw, np.zeros(f) if pitch is None else pitch], axis=1)
    turned[-1] = np.nan
    still = np.zeros(f, bool) if repeat is None else repeat
    return Recording(clip, game, logged, row / fps, turned, still)


def held(f: int, seed: int, shortest: int = 12, longest: int = 40) -> np.ndarray:
    """Keys of a player: -1, 0 or 1 for some steps each."""
    rng = np.random.default_rng(seed)
    spans = [np.full(rng.integers(shortest, longest), rng.integers(-1, 2)) for _ in range(f // shortest + 1)]
    return np.concatenate(([0.0] * 5, *spans))[:f].astype(float)


def hand(f: int, seed: int) -> np.ndarray:
    """Counts of a jerky hand: strokes with pauses, 0.4 correlated from step to step."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 12, f + 1)
    stroke = (np.sin(np.arange(f) / 9 + seed) > -0.3) * (noise[1:] + 0.5 * noise[:-1])
    return np.rint(stroke)


def by_keys(keys: np.ndarray, **more: np.ndarray) -> dict[str, np.ndarray]:
    none = np.zeros(len(keys))
    return {"LEFT": (keys < 0) * 1.0, "RIGHT": (keys > 0) * 1.0, "SPEED": none, **more}


def only(rates: RotationRates, name: str, game: str = "toy") -> InputRate:
    return rates.rates[game][name]


def marks_of(one: Recording) -> np.ndarray:
    driven = drive(one.inputs, Action.YAW, one.seconds)
    return marks(driven, one.turned[:, 0], one.repeat)


# --- the pack ---------------------------------------------------------------------------------------------


def test_rates_of_the_pack_come_out_of_noisy_yaw_and_incomplete_logs(footage: Path) -> None:
    games = json.loads((footage / "games.json").read_text())
    clips = [from_pack(footage, clip, seed)[0] for seed, clip in enumerate(NAVIGATION + INCOMPLETE)]
    rates = calibrate(clips)
    for game, keys in (
        ("fdoom_keys", ("TURN_LEFT", "TURN_RIGHT")),
        ("fdoom_runkeys", ("TURN_LEFT+run", "TURN_RIGHT+run")),
    ):
        said = games[game]
        for key in keys:
            rate = only(rates, key, game)
            onset, steady = rate.ramp
            assert rate.status is RateStatus.OK and rate.unit == "deg_per_s" and not rate.ramp_restarts
            assert rate.value == steady.value and steady.value == pytest.approx(
                said["deg_per_key_frame_steady"] * said["fps"], rel=0.02
            )
            assert onset.value == pytest.approx(said["deg_per_key_frame_first5"] * said["fps"], rel=0.02)
            assert steady.from_s * said["fps"] == pytest.approx(5, abs=0.05)  # LAYOUT.md: the first 5 frames
            assert min(onset.n, steady.n) > 100 and rate.spread < 0.02
    for key in ("TURN_LEFT", "TURN_RIGHT"):
        rate = only(rates, key, "miniworld_t4")
        assert len(rate.levels) == 1 and rate.value == pytest.approx(4.0 * 30, rel=0.02)
    for game in ("fdoom_mouse", "fdoom_lowsens"):
        rate = only(rates, "mouse_counts_x", game)
        assert rate.status is RateStatus.OK and rate.unit == "deg_per_count"
        assert rate.value == pytest.approx(games[game]["deg_per_count"], rel=0.03)
    # A key that nobody pressed in a game has no rate, and the clips behind a rate are named.
    assert only(rates, "TURN_LEFT", "fdoom_mouse").status is RateStatus.UNCALIBRATED
    assert [r.clip_id for r in only(rates, "TURN_LEFT", "fdoom_keys").recordings] == [
        "loop03_turn180_deathmatch_offpath", "nav05_keys_deathmatch", "nav06_keys_map05",
        "nonloop01_oneway_drop_e1m1",
    ]  # fmt: skip
    assert calibrate(reversed(clips)) == rates


@pytest.mark.soak  # 20 s; test_motion_end_to_end holds the same through wp2 curate
def test_rates_come_out_of_the_pictures_and_the_log_alone(footage: Path) -> None:
    clip = "nav05_keys_deathmatch"
    one, _ = from_pack(footage, clip, 0)
    tracker = Tracker()
    frame_pass(footage / f"{clip}.mp4", [tracker])
    whole = tracker.tracks()
    tracks = Tracks(whole.at[:400], whole.linked[:400], whole.repeat[:400], whole.width, whole.height)
    camera = pool([find_turns(tracks)]).camera
    assert camera is not None
    steps = solve(tracks, camera)
    turned = np.full(one.turned.shape, np.nan)
    known = np.flatnonzero(steps.valid)
    turned[known] = np.stack([steps.yaw_deg, steps.pitch_deg], axis=1)[known]
    rates = calibrate([replace(one, turned=turned)])
    onset, steady = only(rates, "TURN_LEFT", "fdoom_keys").levels
    assert steady.value == pytest.approx(3.516 * 35, rel=0.02)
    assert onset.value == pytest.approx(1.758 * 35, rel=0.03)  # 40 steps of 8 presses
    assert steady.from_s == pytest.approx(5 / 35, abs=1e-4)


def test_turning_that_no_log_holds_is_masked_step_by_step_and_honest_steps_stay(footage: Path) -> None:
    for seed, clip in enumerate(INCOMPLETE):
        one, rows = from_pack(footage, clip, seed)
        pressed = drive(one.inputs, Action.YAW, one.seconds).used > 0
        unlogged = (rows.d_yaw_right_deg.abs() > 0.3).to_numpy() & ~pressed & np.isfinite(one.turned[:, 0])
        found = marks_of(one)
        assert unlogged.sum() > 40 and np.mean(found[unlogged] == Mark.NOT_LOGGED) > 0.9, clip
        assert not np.any(found[unlogged] == Mark.USED)
    for seed, clip in enumerate(NAVIGATION):
        one, _ = from_pack(footage, clip, seed)
        pressed = drive(one.inputs, Action.YAW, one.seconds).used > 0
        assert np.mean(marks_of(one)[pressed & np.isfinite(one.turned[:, 0])] == Mark.USED) > 0.97, clip


def test_the_stages_outputs_of_a_clip_calibrate_its_game(footage: Path, tmp_path: Path) -> None:
    _, frames = truth(footage, "nav12_miniworld_fourrooms")
    source, config = Store(str(footage)), pack_map(tmp_path)
    done = label(source, Store(str(tmp_path / "corpus")), "nav12_miniworld_fourrooms.mp4", config, frames)
    entry = entry_of(done.unit, config)
    assert entry.log is not None
    inputs = read_inputs(source, "nav12_miniworld_fourrooms.truth.csv", entry.log, frames)
    rates = calibrate([recording(done.unit.clip, frames, inputs, done.track)])
    assert rates.rate("miniworld_t4", "TURN_LEFT") == pytest.approx(120.0, rel=1e-4)
    again = label(
        source, Store(str(tmp_path / "again")), "nav12_miniworld_fourrooms.mp4", config, frames,
        pose=PoseConfig(estimators=("none",)), actions=ActionsConfig(rates=rates),
    )  # fmt: skip
    assert again.rows.witness is Witness.LOG
    assert again.rows.rows[:, YAW] == pytest.approx(done.rows.rows[:, YAW], abs=0.01)
    assert again.actions.facts["yaw_latents_from_log"] == len(again.rows.rows) - 1
    assert done.actions.facts["yaw_latents_from_log"] == 0


# --- C2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [0.3, 0.5, 0.7])
def test_idle_frames_and_cut_spikes_do_not_move_the_rate(idle: float) -> None:
    rng = np.random.default_rng(7)
    turning = np.repeat(rng.random(1000) >= idle, 20).astype(float)
    yaw = 2.0 * turning + rng.normal(0, 0.05, 20_000)
    spikes = rng.random(20_000) < 0.02
    yaw[spikes] = rng.uniform(-80, 80, spikes.sum())
    rate = only(calibrate([made(by_keys(turning), yaw, KEYS)]), "RIGHT")
    assert rate.status is RateStatus.OK and rate.value == pytest.approx(60.0, rel=0.005)
    assert (
        abs(np.median(yaw) * 30 - 60) > 0.5 and np.abs(yaw[turning > 0]).mean() * 30 > 75
    )  # C2's statistics


# --- C5 ---------------------------------------------------------------------------------------------------


def test_menu_cutscene_flash_and_an_honest_180() -> None:
    counts = hand(900, 3)
    counts[500:508] = 150  # the honest 180: 22.5 degrees a step
    yaw = 0.15 * counts + np.random.default_rng(5).normal(0, 0.05, 900)
    menu, pan, flash = slice(200, 240), slice(320, 350), 420
    counts[menu] = np.rint(hand(40, 4) + 9)
    yaw[menu] = np.random.default_rng(6).normal(0, 0.01, 40)
    counts[pan], yaw[pan] = 0, 2.5
    yaw[flash] = np.nan
    one = made({"dx": counts, "dy": np.zeros(900)}, yaw, MOUSE)
    found = marks_of(one)
    moved = np.abs(counts[menu]) > 5
    assert np.mean(found[menu][moved] == Mark.NO_RESPONSE) > 0.8
    assert (found[pan] == Mark.NOT_LOGGED).all() and found[flash] == Mark.NO_POSE
    assert (found[500:508] == Mark.USED).all()
    rate = only(calibrate([one]), "dx")
    assert rate.status is RateStatus.OK and rate.value == pytest.approx(0.15, rel=0.005)
    reasons = rate.recordings[0].not_used
    assert reasons["no_response"] > 20 and reasons["not_logged"] >= 30 and reasons["no_pose"] == 1


# --- C7 ---------------------------------------------------------------------------------------------------


def at(fps: int, scale: float, clip: str, game: str = "toy", invert: bool = False) -> Recording:
    """The same hand on the same mouse for 40 s, and the same keys, seen at another rate and pointer scale."""
    f = 40 * fps
    counts = np.rint(hand(f, 1) * 30 / fps)
    rng = np.random.default_rng(fps)
    values = {"dx": counts, "dy": np.rint(hand(f, 2) * 30 / fps)}
    yaw = 0.1 * scale * counts + rng.normal(0, 0.03, f)
    pitch = (-1 if invert else 1) * 0.1 * scale * values["dy"] + rng.normal(0, 0.03, f)
    return made(values, yaw, MOUSE, fps, clip, game, pitch)


def test_keys_at_30_and_60_fps_have_one_rate_in_degrees_per_second() -> None:
    clips = []
    for fps in (30, 60):
        keys = np.repeat(held(1200, 2), fps // 30)
        yaw = keys * 60 / fps + np.random.default_rng(fps).normal(0, 0.03, len(keys))
        clips.append(made(by_keys(keys), yaw, KEYS, fps, clip=str(fps)))
    alone = [only(calibrate([one]), "RIGHT").value for one in clips]
    both = only(calibrate(clips), "RIGHT")
    assert alone == pytest.approx([60, 60], rel=0.02) and both.value == pytest.approx(60, rel=0.01)
    assert both.spread < 0.02 and len(both.levels) == 1


def test_pointer_scales_under_one_name_are_two_modes_and_never_an_average() -> None:
    mixed = only(calibrate([at(30, 1.0, "a"), at(60, 1.5, "b")]), "dx")
    assert mixed.status is RateStatus.TWO_MODES and mixed.value is None
    assert mixed.modes == pytest.approx((0.1, 0.15), rel=0.02)
    assert [r.value for r in mixed.recordings] == pytest.approx([0.1, 0.15], rel=0.02)
    # 15 % apart, which no single step can tell.
    near = only(calibrate([at(30, 1.0, "a"), at(30, 1.15, "b")]), "dx")
    assert near.status is RateStatus.TWO_MODES and near.modes == pytest.approx((0.1, 0.115), rel=0.02)
    apart = calibrate([at(30, 1.0, "a", "one"), at(60, 1.5, "b", "two")])
    assert apart.rate("one", "dx") == pytest.approx(0.1, rel=0.02)
    assert apart.rate("two", "dx") == pytest.approx(0.15, rel=0.02)


def test_a_sensitivity_changed_in_the_middle_of_a_recording_is_two_modes() -> None:
    counts = hand(1200, 8)
    factor = np.where(np.arange(1200) < 800, 0.15, 0.05)
    yaw = factor * counts + np.random.default_rng(1).normal(0, 0.05, 1200)
    rate = only(calibrate([made({"dx": counts, "dy": np.zeros(1200)}, yaw, MOUSE)]), "dx")
    assert rate.status is RateStatus.TWO_MODES and rate.modes == pytest.approx((0.05, 0.15), rel=0.05)
    # A scope that is used in a tenth of the time is not a second sensitivity.
    yaw = np.where(np.arange(1200) < 1080, 0.15, 0.05) * counts + np.random.default_rng(1).normal(
        0, 0.05, 1200
    )
    rate = only(calibrate([made({"dx": counts, "dy": np.zeros(1200)}, yaw, MOUSE)]), "dx")
    assert rate.status is RateStatus.OK and rate.value == pytest.approx(0.15, rel=0.01)


def test_an_inverted_axis_contradicts_the_key_map_and_the_other_axis_stays() -> None:
    rates = calibrate([at(30, 1.0, "a", invert=True)])
    assert only(rates, "dy").status is RateStatus.SIGN_CONTRADICTED and only(rates, "dy").value is None
    assert only(rates, "dy").modes == pytest.approx((-0.1,), rel=0.02)
    assert only(rates, "dx").value == pytest.approx(0.1, rel=0.02)
    keys = held(1500, 5)
    yaw = 2 * np.abs(keys) + np.random.default_rng(0).normal(0, 0.05, 1500)  # both keys turn right
    rates = calibrate([made(by_keys(keys), yaw, KEYS)])
    assert only(rates, "LEFT").status is RateStatus.SIGN_CONTRADICTED
    assert only(rates, "RIGHT").value == pytest.approx(60, rel=0.01)


# --- W3, W7 -----------------------------------------------------------------------------------------------


def test_repeats_and_lost_frames_are_neither_stops_nor_outliers() -> None:
    keys = np.ones(400)
    keys[:5] = 0
    yaw = 2 * keys
    repeat = np.zeros(400, bool)
    for k in range(60, 380, 20):  # frame k is shown again, and the next picture catches up
        repeat[k] = True
        yaw[k - 1], yaw[k] = 0.0, 4.0
    found = marks_of(made(by_keys(keys), yaw, KEYS, repeat=repeat))
    for k in range(60, 380, 20):
        assert found[k - 1] == found[k] == Mark.REPEAT
    assert np.abs(yaw[found == Mark.USED] - 2).max() == 0


def test_a_log_shifted_by_lost_frames_speaks_only_where_it_fits() -> None:
    counts = hand(1200, 6)
    seen = np.concatenate((counts[:600], counts[598:-2]))  # two pictures repeated at 600
    yaw = 0.15 * seen + np.random.default_rng(2).normal(0, 0.05, 1200)
    one = made({"dx": counts, "dy": np.zeros(1200)}, yaw, MOUSE)
    found = marks_of(one)
    moving = np.abs(counts) > 0
    assert (found[:600][moving[:600]] == Mark.USED).all()
    assert (found[602:][moving[602:]] == Mark.LAGGED).mean() > 0.95
    assert only(calibrate([one]), "dx").value == pytest.approx(0.15, rel=0.01)
    off = np.concatenate(([0.0], counts[:-1])) * 0.15 + np.random.default_rng(2).normal(0, 0.05, 1200)
    rate = only(calibrate([made({"dx": counts, "dy": np.zeros(1200)}, off, MOUSE)]), "dx")
    assert rate.status is RateStatus.UNCALIBRATED and rate.recordings[0].not_used["lagged"] > 650


def test_two_inputs_at_once_and_turns_of_more_than_a_right_angle_do_not_speak() -> None:
    keys, counts = held(600, 4), hand(600, 4)
    yaw = 2.0 * keys + 0.1 * counts
    yaw[100] = 120.0
    one = made(by_keys(keys, dx=counts), yaw, (*KEYS, MOUSE[0]))
    found = marks_of(one)
    both = (np.abs(keys) > 0) & (np.abs(counts) > 0) & np.isfinite(one.turned[:, 0])
    both[100] = False
    assert both.sum() > 100 and (found[both] == Mark.SHARED).all() and found[100] == Mark.AMBIGUOUS
    opposite = made({"LEFT": np.ones(60), "RIGHT": np.ones(60), "SPEED": np.zeros(60)}, np.zeros(60), KEYS)
    assert (marks_of(opposite)[:-1] == Mark.SHARED).all()


def test_a_log_at_another_phase_than_the_picture_does_not_dilute_the_gain() -> None:
    counts = hand(1500, 9)
    late = 0.6 * counts + 0.4 * np.concatenate(([0], counts[:-1]))
    yaw = 0.15 * late + np.random.default_rng(3).normal(0, 0.05, 1500)
    plain = (counts @ yaw) / (counts @ counts)
    rate = only(calibrate([made({"dx": counts, "dy": np.zeros(1500)}, yaw, MOUSE)]), "dx")
    assert plain < 0.97 * 0.15 and rate.value == pytest.approx(0.15, rel=0.01)


# --- ramps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ramp_frames", [0, 3, 9])
@pytest.mark.parametrize("restarts", [True, False])
def test_the_ramp_of_a_key_is_found_in_length_and_height(ramp_frames: int, restarts: bool) -> None:
    keys = held(3000, 11)
    age = np.zeros(3000)
    for t in range(1, 3000):
        goes_on = keys[t] == keys[t - 1] if restarts else keys[t - 1] != 0
        age[t] = age[t - 1] + 1 if keys[t] != 0 and goes_on else 0
    yaw = keys * np.where(age < ramp_frames, 1.0, 3.0) + np.random.default_rng(4).normal(0, 0.08, 3000)
    rate = only(calibrate([made(by_keys(keys), yaw, KEYS)]), "LEFT")
    assert rate.value == pytest.approx(90, rel=0.01)
    assert [level.from_s * 30 for level in rate.levels] == pytest.approx(
        [0, ramp_frames][: len(rate.levels)], abs=0.1
    )
    assert len(rate.levels) == (2 if ramp_frames else 1)
    if ramp_frames:
        assert rate.levels[0].value == pytest.approx(30, rel=0.02) and rate.ramp_restarts == restarts


def test_running_turns_are_an_input_of_their_own() -> None:
    keys, run = held(2000, 13), (np.arange(2000) % 400 < 200) * 1.0
    yaw = keys * np.where(run > 0, 4.0, 2.0) + np.random.default_rng(4).normal(0, 0.05, 2000)
    rates = calibrate([made(by_keys(keys, SPEED=run), yaw, KEYS)])
    assert rates.rate("toy", "LEFT") == pytest.approx(60, rel=0.01)
    assert rates.rate("toy", "LEFT+run") == pytest.approx(120, rel=0.01)


# --- the record -------------------------------------------------------------------------------------------


def test_too_few_steps_are_uncalibrated_without_a_value() -> None:
    keys = np.zeros(300)
    keys[10:35] = 1
    few = only(calibrate([made(by_keys(keys), 2 * keys, KEYS)]), "RIGHT")
    assert few.status is RateStatus.UNCALIBRATED and few.value is None and few.n == 25
    noisy = keys.copy()
    noisy[10:60] = 1
    yaw = 0.2 * noisy + np.random.default_rng(1).normal(0, 0.3, 300)
    assert only(calibrate([made(by_keys(noisy), yaw, KEYS)]), "RIGHT").status is RateStatus.UNCALIBRATED
    with np.errstate(all="raise"):  # a mouse that never turns the camera
        still = only(calibrate([made({"dx": hand(300, 1), "dy": np.zeros(300)}, np.zeros(300), MOUSE)]), "dx")
    assert still.status is RateStatus.UNCALIBRATED and still.value is None
    with pytest.raises(ValueError, match="exactly when"):
        InputRate(value=0.0, status=RateStatus.UNCALIBRATED)


def test_a_frozen_record_comes_back_as_it_was_and_a_plain_number_is_a_stated_rate(tmp_path: Path) -> None:
    keys = held(900, 1)
    rates = calibrate([made(by_keys(keys), 2.0 * keys, KEYS), at(30, 1.0, "m", "mouse")])
    store = Store(str(tmp_path))
    assert [freeze(store, "rotation", rates), freeze(store, "rotation", RotationRates())] == [1, 2]
    held_back = RotationRates.model_validate_json((tmp_path / "statistics/rotation-v0001.json").read_text())
    assert held_back == rates and newest(store, "rotation", RotationRates) == RotationRates()
    rows = {(r["game"], r["input"]): r for r in rates.rows()}
    assert rows["toy", "RIGHT"]["value"] == pytest.approx(60) and rows["toy", "RIGHT"]["status"] == "ok"
    assert {"game", "input", "value", "unit", "n", "mad", "status"} <= set(rows["mouse", "dx"])
    stated = RotationRates(rates={"toy": {"dx": 0.15}})
    assert stated.rate("toy", "dx") == 0.15 and stated.rows()[0]["estimator"] == "stated"


# --- turns of latents -------------------------------------------------------------------------------------


def track_of(yaw: np.ndarray, estimator: str = "vo") -> PoseTrack:
    """Poses whose steps turn by these degrees; a NaN step makes the frame after it unknown."""
    heading = np.concatenate(([0.0], np.cumsum(np.where(np.isnan(yaw), 0.0, yaw))[:-1]))
    rotation = Rotation.from_euler("y", heading[:, None], degrees=True).as_matrix()
    valid = np.concatenate(([True], ~np.isnan(yaw[:-1])))
    rotation[~valid] = np.nan
    place = np.where(valid[:, None], np.zeros((len(yaw), 3)), np.nan)
    return PoseTrack(rotation, place, valid, Scale.UNKNOWN, estimator, up=(0.0, -1.0, 0.0))


def turn_of(
    one: Recording, fps: Any, yaw: np.ndarray | None, rates: dict[str, InputRate], by: str = "vo"
) -> tuple[Chosen, Sequence[Any]]:
    f = len(one.seconds)
    frames = table(f, fps)
    ends = timeline.latent_ends(timeline.grid(frames.pts, frames.time_base).frames)
    blind = np.full(f, np.nan)
    track = track_of(blind if yaw is None else yaw, by)
    if yaw is None:
        none = np.zeros(f, bool)
        track = PoseTrack(np.full((f, 3, 3), np.nan), np.full((f, 3), np.nan), none, Scale.UNKNOWN, "none")
    return choose(one.inputs, Action.YAW, frames, ends, track, rates), ends


@pytest.mark.parametrize("clip", ["nav05_keys_deathmatch", "nav08_runkeys_map03", "nav02_mouse_map02"])
def test_a_calibrated_log_turns_the_camera_as_the_game_did_and_better_than_odometry(
    footage: Path, clip: str
) -> None:
    one, rows = from_pack(footage, clip, 3)
    rates = calibrate([one]).rates[one.game]
    fps = Fraction(json.loads((footage / f"{clip}.truth.json").read_text())["fps"])
    chosen, ends = turn_of(one, fps, one.turned[:, 0], rates)
    want = np.array([rows.d_yaw_right_deg[a:b].sum() for a, b in pairwise(ends)])
    assert chosen.from_log.all() and chosen.turns.known.all()
    # The largest turn is 60 degrees a latent: 1 % of it, and half a step of the ramp's first frame.
    assert np.abs(chosen.turns.degrees - want).max() < 0.9
    wrong = np.abs(chosen.poses.degrees - want)
    assert np.median(np.abs(chosen.turns.degrees - want)) < 0.6 * np.nanmedian(wrong)
    facts = agreement(chosen, "yaw")
    assert facts["yaw_log_pose_correlation"] > 0.9 and facts["yaw_log_pose_median_deg"] < 0.5
    assert facts["yaw_latents_contradicted"] == 0 and facts["yaw_latents_compared"] > 60


def test_latents_that_answer_to_something_else_come_from_poses_or_are_unknown() -> None:
    keys = held(600, 21)
    yaw = 2.0 * keys
    keys[300:345], yaw[300:345] = 1.0, 0.0  # a menu
    keys[400:430], yaw[400:430] = 0.0, 2.5  # a cutscene
    one = made(by_keys(keys), yaw, KEYS)
    rates = {"LEFT": InputRate(value=60.0), "RIGHT": InputRate(value=60.0)}
    chosen, ends = turn_of(one, 30, yaw, rates)
    inside = np.array([(a >= 300 and b <= 345) or (a >= 400 and b <= 430) for a, b in pairwise(ends)])
    want = np.array([yaw[a:b].sum() for a, b in pairwise(ends)])
    assert inside.sum() >= 6 and chosen.contradicted[inside].all() and not chosen.from_log[inside].any()
    assert chosen.turns.degrees == pytest.approx(want, abs=1e-6)
    assert chosen.from_log.mean() > 0.8
    part = one.inputs.part.model_copy(update={"complete": False})
    hidden = Recording(
        "a", "toy", Inputs(part, one.inputs.values, one.inputs.alignment), one.seconds, one.turned, one.repeat
    )
    gone = yaw.copy()
    gone[100:120] = np.nan
    chosen, _ = turn_of(hidden, 30, gone, rates)
    dark = np.array([a <= 120 and b >= 100 for a, b in pairwise(ends)])
    assert {r for r, d in zip(chosen.turns.reasons, dark & ~chosen.poses.known, strict=True) if d} == {
        "input_not_logged"
    }
    assert chosen.turns.known[~dark].all()
    chosen, _ = turn_of(hidden, 30, None, rates)
    assert not chosen.turns.known.any() and set(chosen.turns.reasons) == {"input_not_logged"}


def test_an_axis_that_a_game_does_not_have_is_zero_whatever_the_log_lacks() -> None:
    one = made(by_keys(held(300, 1)), np.zeros(300), KEYS)
    part = one.inputs.part.model_copy(update={"complete": False, "absent": (Action.PITCH,)})
    inputs = Inputs(part, one.inputs.values, one.inputs.alignment)
    frames = table(300, 30)
    ends = timeline.latent_ends(timeline.grid(frames.pts, frames.time_base).frames)
    none = PoseTrack(
        np.full((300, 3, 3), np.nan), np.full((300, 3), np.nan), np.zeros(300, bool), Scale.UNKNOWN, "none"
    )
    for track in (none, track_of(np.full(300, 0.1))):
        chosen = choose(inputs, Action.PITCH, frames, ends, track, {})
        assert chosen.from_log.all() and not chosen.turns.degrees.any()


def test_engine_poses_win_over_a_log_and_a_log_fills_what_they_lack() -> None:
    keys = held(600, 22)
    yaw = 2.02 * keys
    yaw[200:230] = np.nan
    rates = {"LEFT": InputRate(value=60.0), "RIGHT": InputRate(value=60.0)}
    one = made(by_keys(keys), yaw, KEYS)
    chosen, _ = turn_of(one, 30, yaw, rates, Given.name)
    assert (chosen.from_log == ~chosen.poses.known).all() and 2 <= chosen.from_log.sum() <= 6
    assert chosen.turns.known.all()


def test_a_press_that_the_clip_does_not_show_has_no_turn_until_its_ramp_is_over() -> None:
    keys = np.ones(200)
    ramp = (RampLevel(from_s=0, value=30.0), RampLevel(from_s=0.5, value=90.0))
    rates = {"RIGHT": InputRate(value=90.0, ramp=ramp)}
    chosen, ends = turn_of(made(by_keys(keys), 3 * keys, KEYS), 30, None, rates)
    early = np.array([a < 15 for a in ends[:-1]])
    assert np.isnan(chosen.turns.degrees[early]).all()
    lasts = np.diff(ends)[~early]
    assert chosen.turns.degrees[~early] == pytest.approx(3.0 * lasts)
    assert set(np.array(chosen.turns.reasons)[early]) == {"uncalibrated"}

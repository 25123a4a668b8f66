"""Logs and poses to the 6-vector per latent: against an oracle, and the lag, clock and length faults.

Source: spec/worldplay2.md a.6; spec/faults.md W3, W5, W7, P8, C7.
"""

from __future__ import annotations

import io
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from recordings import PACK_MAP, Labelled, label, pack_map, small_source, table, truth

from pipeline import lag
from pipeline.actions import ActionsConfig
from pipeline.sources import SourceConfig, discover
from pipeline.store import Store
from schemas.action import FORWARD, JUMP, LATERAL, PERSPECTIVE, PITCH, YAW, RotationRates, Witness
from schemas.clip import FrameTable

NAVIGATION = [
    "nav01_mouse_map01", "nav02_mouse_map02", "nav04_mouse_mywayhome", "nav05_keys_deathmatch",
    "nav06_keys_map05", "nav08_runkeys_map03", "nav10_lowsens_map04", "nav11_lowsens_e1m2",
    "nav12_miniworld_fourrooms",
]  # fmt: skip


def pack_labels(footage: Path, folder: Path, clip: str, **more: Any) -> tuple[Labelled, pd.DataFrame]:
    rows, frames = truth(footage, clip)
    config = pack_map(folder, more.pop("poses", True))
    done = label(Store(str(footage)), Store(str(folder / "corpus")), f"{clip}.mp4", config, frames, **more)
    assert done.actions.reasons == ()
    return done, rows


def oracle(rows: pd.DataFrame, positive: str, negative: str, start: int, stop: int) -> int:
    """The direction held longest over rows [start, stop); on a tie, that of the last row."""
    net = [int(rows[positive][t] > 0) - int(rows[negative][t] > 0) for t in range(start, stop)]
    counts = {v: net.count(v) for v in (-1, 0, 1)}
    best = [v for v in counts if counts[v] == max(counts.values())]
    return best[0] if len(best) == 1 else net[-1]


# --- the pack ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", NAVIGATION)
def test_latents_of_navigation_clips_agree_with_the_log_and_the_truth(
    footage: Path, tmp_path: Path, clip: str
) -> None:
    done, rows = pack_labels(footage, tmp_path, clip)
    got, ends = done.rows, done.ends
    assert got.witness is Witness.POSES and got.reasons == {}
    turned = rows[["d_yaw_right_deg", "d_pitch_up_deg"]].to_numpy()
    for k in range(1, len(ends)):
        a, b = int(ends[k - 1]), int(ends[k])
        assert got.rows[k, FORWARD] == oracle(rows, "MOVE_FORWARD", "MOVE_BACKWARD", a, b)
        assert got.rows[k, LATERAL] == oracle(rows, "MOVE_RIGHT", "MOVE_LEFT", a, b)
        yaw, pitch = turned[a:b].sum(axis=0)
        assert got.rows[k, YAW] == pytest.approx(yaw, abs=2e-5)  # float32; the worst is 2e-6 (loop03)
        assert got.rows[k, PITCH] == pytest.approx(pitch, abs=2e-5)
        if "JUMP" in rows:
            assert got.rows[k, JUMP] == (rows.JUMP[a:b] > 0).any()
    assert not got.rows[0, :PERSPECTIVE].any() and (got.rows[:, PERSPECTIVE] == 1).all()
    # Two thirds of the latents or more hold a direction or turn: the labels are not all idle.
    assert (np.abs(got.rows[:, [FORWARD, LATERAL, YAW]]) > 0).any(axis=1).mean() > 0.6


def test_without_poses_and_rates_turning_is_unknown_and_never_zero(footage: Path, tmp_path: Path) -> None:
    for clip, yaw, pitch in (
        ("nav05_keys_deathmatch", "uncalibrated", "uncalibrated"),
        ("event01_door_map01", "input_not_logged", "input_not_logged"),
    ):
        done, rows = pack_labels(footage, tmp_path, clip, poses=False)
        got = done.rows
        assert got.witness is Witness.NONE and np.isnan(got.rows[1:, [PITCH, YAW]]).all()
        assert got.reasons == {"yaw": ((1, len(got.rows), yaw),), "pitch": ((1, len(got.rows), pitch),)}
        assert rows.d_yaw_right_deg.abs().max() > 0
        assert done.actions.facts["witness"] == "none"
        assert done.actions.facts["unknown_yaw_share"] == pytest.approx(1 - 1 / len(got.rows), abs=1e-6)


def test_a_calibrated_log_gives_the_true_turn_and_an_incomplete_one_gives_none(
    footage: Path, tmp_path: Path
) -> None:
    rates = RotationRates(
        rates={
            "fdoom_mouse": {"mouse_counts_x": 0.15, "mouse_counts_y": 0.15},
            "miniworld_t4": {"TURN_LEFT": 120.0},
        }
    )
    config = ActionsConfig(rates=rates)
    done, rows = pack_labels(footage, tmp_path, "nav01_mouse_map01", poses=False, actions=config)
    got, ends = done.rows, done.ends
    want = [rows.d_yaw_right_deg[a:b].sum() for a, b in pairwise(ends)]
    assert got.witness is Witness.LOG and got.reasons == {}
    # The engine turns by whole steps of 360/65536 degrees: 9 frames of rounding.
    assert got.rows[1:, YAW] == pytest.approx(want, abs=9 * 0.0055)
    done, _ = pack_labels(footage, tmp_path, "loop01_rewind_map02", poses=False, actions=config)
    assert done.rows.reasons["yaw"] == ((1, len(done.rows.rows), "input_not_logged"),)
    # Only the left key of this game has a rate: latents in which the right one was used stay unknown.
    done, rows = pack_labels(footage, tmp_path, "nav12_miniworld_fourrooms", poses=False, actions=config)
    got, ends = done.rows, done.ends
    for k in range(1, len(ends)):
        a, b = int(ends[k - 1]), int(ends[k])
        if rows.TURN_RIGHT[a:b].any():
            assert np.isnan(got.rows[k, YAW])
        else:
            assert got.rows[k, YAW] == pytest.approx(rows.d_yaw_right_deg[a:b].sum(), abs=1e-4)
    assert {reason for _, _, reason in got.reasons["yaw"]} == {"uncalibrated"}


@pytest.mark.parametrize("clip", [*NAVIGATION, "loop01_rewind_map02", "loop04_rewind_map06", "bad01_jitter"])
def test_the_camera_answers_in_the_frame_that_the_log_says(footage: Path, tmp_path: Path, clip: str) -> None:
    done, _ = pack_labels(footage, tmp_path, clip)
    facts = done.actions.facts
    assert facts["lag_measured"] and facts["lag_frames"] == 0
    # 0.95 or more where the log holds every turn (nav08 0.952: the keys of that game speed up).
    assert facts["lag_score"] > (0.6 if clip.startswith("loop") else 0.95)


@pytest.mark.parametrize("clip", ["nav01_mouse_map01", "nav05_keys_deathmatch"])
@pytest.mark.parametrize("late", [1, -1])
def test_a_log_of_the_pack_that_is_a_frame_off_is_told(
    footage: Path, tmp_path: Path, clip: str, late: int
) -> None:
    rows, frames = truth(footage, clip)
    buttons = [c for c in rows if c in ("TURN_LEFT", "TURN_RIGHT", "mouse_counts_x")]
    rows[buttons] = np.roll(rows[buttons].to_numpy(), late, axis=0)
    (tmp_path / f"{clip}.mp4").touch()
    rows.to_csv(tmp_path / f"{clip}.truth.csv", index=False)
    source, corpus = Store(str(tmp_path)), Store(str(tmp_path / "corpus"))
    done = label(source, corpus, f"{clip}.mp4", pack_map(tmp_path), frames)
    assert done.actions.facts["lag_frames"] == -late  # a log that is late sees the camera answer early


def test_every_column_that_is_not_mapped_can_go(footage: Path, tmp_path: Path) -> None:
    """Logs of all recordings, with and without their other columns: the same digests and the same bytes."""
    bare = tmp_path / "bare"
    bare.mkdir()
    config = SourceConfig(key_map=str(PACK_MAP))
    listing = discover("gameplay", Store(str(footage)), config)
    clips = [f for f in listing.found if f.log == f"{Path(f.path).stem}.truth.csv"]
    assert len(clips) == 24
    for found in clips:
        part = listing.key_map.games[found.entry].log
        assert part is not None
        rows = pd.read_csv(footage / found.log, usecols=list(part.columns))
        rows.to_csv(bare / found.log, index=False)
        (bare / found.path).touch()
    for found in clips:
        _, frames = truth(footage, Path(found.path).stem)
        corpora = [Store(str(tmp_path / name)) for name in ("a", "b")]
        sources = [Store(str(footage)), Store(str(bare))]
        one, two = (label(s, c, found.path, config, frames) for s, c in zip(sources, corpora, strict=True))
        assert one.unit.clip.log == two.unit.clip.log
        assert one.actions.content == two.actions.content
        for name in ("actions.npz", "inputs.parquet"):
            assert one.file("actions", name) == two.file("actions", name)


def test_a_clip_with_a_late_start_takes_its_actions_from_frame_0(footage: Path, tmp_path: Path) -> None:
    """odd_start1p5.mkv is nav02 from frame 0; its first PTS of 1.5 s is normalised before it gets here."""
    rows, _ = truth(footage, "nav02_mouse_map02")
    config = SourceConfig(key_map=str(PACK_MAP))
    corpus = Store(str(tmp_path / "corpus"))
    done = label(Store(str(footage)), corpus, "odd_start1p5.mkv", config, table(210, 35))
    whole = label(Store(str(footage)), corpus, "nav02_mouse_map02.mp4", config, table(len(rows), 35))
    t = len(done.rows.rows)
    assert np.array_equal(done.rows.rows[:, FORWARD:], whole.rows.rows[:t, FORWARD:])
    assert done.actions.facts["log_extra_rows"] == len(rows) - 210


def test_a_clip_of_variable_rate_meets_its_log_by_time(footage: Path, tmp_path: Path) -> None:
    """As in odd_vfr.mp4: nav02 with every fifth frame dropped, each frame at its own time."""
    rows, _ = truth(footage, "nav02_mouse_map02")
    kept = np.flatnonzero(np.arange(280) % 5 != 4)
    frames = table(len(kept), 35)
    frames = FrameTable(
        Fraction(1, 17920), kept * 512, frames.source_index, frames.pixels, frames.ok, frames.repeat
    )
    config = SourceConfig(key_map=str(PACK_MAP))
    done = label(Store(str(footage)), Store(str(tmp_path / "corpus")), "odd_vfr.mp4", config, frames)
    assert done.actions.facts["log_gap_frames"] == 0
    counts = inputs(done)["input.mouse_counts_x"]
    # A frame that stands for two frames' time carries both rows' counts.
    assert counts[:3].tolist() == rows.mouse_counts_x[:3].tolist()
    assert counts.sum() == rows.mouse_counts_x[: kept[-1] + 1].sum()
    assert counts[3] == rows.mouse_counts_x[3:5].sum()


# --- synthetic logs ---------------------------------------------------------------------------------------

KEYS = [
    {"column": "W", "action": "forward"},
    {"column": "S", "action": "forward", "sign": -1},
    {"column": "J", "action": "jump"},
    {"column": "R", "action": "yaw"},
    {"column": "MX", "action": "yaw", "unit": "count"},
]
POSES = {
    "file": "run.csv",
    "columns": {"x": "x", "y": "y", "z": "z", "yaw": "yaw"},
    "world": {"up": "z", "handed": "right"},
    "yaw_positive": "right",
}


def toy_log(rows: int, **columns: Any) -> dict[str, Any]:
    return {**{name: np.zeros(rows) for name in ("W", "S", "J", "R", "MX", "x", "y", "z", "yaw")}, **columns}


def toy(
    folder: Path, log: dict[str, Any], frames: FrameTable, poses: bool = False, rates: Any = None, **part: Any
) -> Labelled:
    entry: dict[str, Any] = {"log": {"file": "run.csv", "inputs": KEYS, **part}}
    if poses:
        entry["poses"] = POSES
    source = small_source(folder, log, entry)
    actions = ActionsConfig(rates=RotationRates(rates={"toy": rates or {}}))
    return label(source, Store(str(folder / "corpus")), "run.mp4", SourceConfig(), frames, actions=actions)


def inputs(done: Labelled) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(done.file("actions", "inputs.parquet")))


def pressed(rows: int, *where: int) -> np.ndarray:
    out = np.zeros(rows)
    out[list(where)] = 1
    return out


@pytest.mark.parametrize(
    ("shift", "row", "want"), [(0, "next", 0), (1, "next", -1), (-1, "next", 1), (1, "previous", 0)]
)
def test_a_single_press_is_met_in_its_frame_and_a_shifted_log_is_seen(
    tmp_path: Path, shift: int, row: str, want: int
) -> None:
    """W3: yaw turns by 3 degrees between frames 40 and 41; one press, logged at row 40 + shift."""
    yaw = np.where(np.arange(60) > 40, 3.0, 0.0)
    log = toy_log(60, R=pressed(60, 40 + shift), W=pressed(60, 40 + shift), yaw=yaw)
    done = toy(tmp_path, log, table(60, 16), poses=True, row=row)
    assert done.actions.facts["lag_frames"] == want and done.actions.facts["lag_score"] == 1.0
    ends = done.ends
    k = int(np.searchsorted(ends, 40, side="right"))  # the latent whose steps hold step 40
    assert done.rows.rows[k, YAW] == pytest.approx(3.0)
    assert np.count_nonzero(done.rows.rows[:, YAW]) == 1
    if want == 0:
        assert np.flatnonzero(inputs(done)["input.R"] == 1).tolist() == [40]


def test_lag_needs_both_sides_to_change_and_skips_unknown_frames() -> None:
    turn = np.zeros(50)
    assert lag.scan(np.ones(50), turn) is None
    turn[[10, 20, 30]] = 5.0
    keys = np.roll((turn > 0).astype(float), -2)
    keys[5] = np.nan
    found = lag.scan(keys, turn)
    assert found is not None and (found.frames, len(found.scores)) == (2, 7)
    beat = np.arange(50) % 2.0
    tie = lag.scan(beat, beat)
    assert tie is not None and tie.frames == 0 and tie.scores[1] == pytest.approx(tie.score)


def test_the_direction_held_longest_wins_and_a_tie_goes_to_the_last_row(tmp_path: Path) -> None:
    w, s = pressed(60, *range(0, 3), 4, 5), pressed(60, 3, 6, 7)
    w[12:16], s[12:16] = 1, 1  # both at once cancel
    done = toy(tmp_path, toy_log(60, W=w, S=s, J=pressed(60, 9)), table(60, 16))
    # Latents are 4 frames at 16 fps, ends 0 4 8 12 16: rows 0-3, 4-7, 8-11, 12-15.
    assert done.rows.rows[:5, FORWARD].tolist() == [0, 1, -1, 0, 0]
    assert done.rows.rows[:5, JUMP].tolist() == [0, 0, 0, 1, 0]


def test_time_and_not_rows_decides_what_was_held_longest(tmp_path: Path) -> None:
    frames = table(200, 32)
    pts = np.cumsum([0, *([512, 512, 512, 1536] * 50)])[:200]  # every fourth frame lasts three times as long
    slow = FrameTable(frames.time_base, pts, frames.source_index, frames.pixels, frames.ok, frames.repeat)
    done = toy(tmp_path, toy_log(200, W=pressed(200, *range(3, 200, 4))), slow)
    ticks = np.diff(pts, append=pts[-1] + 512)
    for k in range(1, len(done.ends)):
        a, b = int(done.ends[k - 1]), int(done.ends[k])
        held = ticks[a:b][np.arange(a, b) % 4 == 3].sum()
        if 2 * held != ticks[a:b].sum():
            assert done.rows.rows[k, FORWARD] == (2 * held > ticks[a:b].sum())


@pytest.mark.parametrize(("rows", "gap", "extra"), [(49, 12, 0), (61, 0, 0), (76, 0, 15)])
def test_a_log_of_another_length_leaves_a_stated_gap_and_is_never_stretched(
    tmp_path: Path, rows: int, gap: int, extra: int
) -> None:
    """W7: 61 frames, and a log 12 rows shorter, equal, or 15 longer."""
    done = toy(tmp_path, toy_log(rows, W=np.ones(rows)), table(61, 16))
    facts = done.actions.facts
    assert (facts["log_rows"], facts["log_gap_frames"], facts["log_extra_rows"]) == (rows, gap, extra)
    got = done.rows
    covered = done.ends[1:] <= rows
    assert np.array_equal(np.isnan(got.rows[1:, FORWARD]), ~covered)
    assert (got.rows[1:, FORWARD][covered] == 1).all()
    if gap:
        assert [r for _, _, r in got.reasons["forward"]] == ["log_gap"]
        assert got.reasons["jump"] == got.reasons["forward"]


def test_the_anchor_of_row_0_is_stated(tmp_path: Path) -> None:
    log = toy_log(48, W=pressed(48, 0, 1, 2, 3))
    late = toy(tmp_path, log, table(60, 16), first_frame=12)
    assert (
        late.rows.rows[:, FORWARD][[4, 5]].tolist() == [1, 0] and late.actions.facts["log_gap_frames"] == 12
    )
    assert late.rows.reasons["forward"][0][2] == "log_gap" and late.rows.reasons["forward"][0][0] == 1
    early = toy(tmp_path, toy_log(80, W=pressed(80, 20, 21, 22, 23)), table(60, 16), first_frame=-20)
    assert (
        early.rows.rows[:, FORWARD][[1, 2]].tolist() == [1, 0] and early.actions.facts["log_extra_rows"] == 20
    )


def test_a_log_that_meets_no_frame_rejects_the_clip(tmp_path: Path) -> None:
    done = toy(tmp_path, toy_log(10), table(60, 16), first_frame=100)
    assert done.actions.status == "rejected"
    assert done.actions.reasons[0] == "log_mismatch: no row of the log meets a frame (10 rows, 60 frames)"


@pytest.mark.parametrize(
    ("fps", "log_fps", "drift"),
    [(Fraction(30000, 1001), 30, -1.8), (Fraction(30), 29, 60.0), (Fraction(21), 25, -201.6)],
)
def test_a_log_on_another_clock_is_met_within_half_a_frame_and_its_drift_told(
    tmp_path: Path, fps: Fraction, log_fps: int, drift: float
) -> None:
    """W5: a minute of video at 29.97 with a 30 Hz log, at 30 with 29 Hz, declared 25 but delivering 21."""
    frames, rows = int(60 * fps), 60 * log_fps
    times = np.arange(rows) / log_fps
    done = toy(
        tmp_path, toy_log(rows, W=(times // 1) % 2, MX=np.ones(rows), t=times), table(frames, fps), time="t"
    )
    seen = inputs(done)
    shown = np.arange(frames) / float(fps)
    known = seen["input.W"].notna().to_numpy()
    assert known[:-2].all()
    # The key changes on every whole second: what is seen differs from the truth for half a frame around it.
    apart = np.abs(shown - np.rint(shown)) > 0.5 / min(float(fps), log_fps) + 1e-6
    want = (shown // 1) % 2
    assert np.array_equal(seen["input.W"].to_numpy()[known & apart], want[known & apart])
    assert abs(seen["input.MX"].sum() - rows) <= 2  # no count is lost and none is used twice
    assert done.actions.facts["drift_frames"] == pytest.approx(drift, abs=abs(drift) * 0.01 + 0.01)


@pytest.mark.parametrize(("late", "known"), [(0.02, 60), (0.0201, 59)])
def test_a_row_exactly_half_a_frame_away_is_inside(tmp_path: Path, late: float, known: int) -> None:
    """At 25 fps half a frame is 0.02 s. Beyond it row k is nearer to frame k+1, and frame 0 has no row."""
    log = toy_log(60, t=np.arange(60) * 0.04 + late, W=np.ones(60))
    seen = inputs(toy(tmp_path, log, table(60, 25), time="t"))
    assert seen["input.W"].notna().sum() == known


def test_a_clock_that_restarts_is_refused(tmp_path: Path) -> None:
    log = toy_log(60, t=np.concatenate((np.arange(30), np.arange(30))) / 16)
    done = toy(tmp_path, log, table(60, 16), time="t")
    assert done.actions.reasons[0].startswith("bad_sidecar: run.csv row 30: the clock runs backwards")


def test_a_clock_too_far_from_the_video_is_refused_and_a_log_without_rows_too(tmp_path: Path) -> None:
    since_1970 = 1.7e9 + np.arange(60) / 35
    done = toy(tmp_path, toy_log(60, t=since_1970), table(60, 35), time="t")
    assert done.actions.reasons[0].startswith(
        "bad_sidecar: run.csv: its clock is 1.7e+09 s away from frame 0"
    )
    seen = inputs(toy(tmp_path, toy_log(60, t=since_1970), table(60, 35), time="t", clock_start=1.7e9))
    assert seen["input.W"].notna().all()
    for more in ({}, {"time": "t"}):
        done = toy(tmp_path, toy_log(0, t=np.zeros(0)), table(60, 16), **more)
        assert done.actions.reasons == ("bad_sidecar: run.csv has no rows",)


def test_the_largest_counts_add_up_to_finite_float32(tmp_path: Path) -> None:
    frames = table(60, 30, source_index=np.arange(0, 120, 2))
    seen = inputs(toy(tmp_path, toy_log(120, MX=np.full(120, 1e30)), frames))
    assert np.isfinite(seen["input.MX"]).all()


def test_a_halved_clip_adds_counts_and_loses_no_press(tmp_path: Path) -> None:
    frames = table(60, 30, source_index=np.arange(0, 120, 2))
    log = toy_log(120, MX=np.arange(120), J=pressed(120, 41))
    seen = inputs(toy(tmp_path, log, frames))
    assert seen["input.MX"][:3].tolist() == [1, 5, 9]
    assert seen["input.J"].to_numpy().nonzero()[0].tolist() == [20]


def test_a_repeated_picture_while_something_is_pressed_is_counted(tmp_path: Path) -> None:
    frames = table(60, 16)
    repeat = np.zeros(60, bool)
    repeat[[21, 40]] = True
    frames = FrameTable(frames.time_base, frames.pts, frames.source_index, frames.pixels, frames.ok, repeat)
    done = toy(tmp_path, toy_log(60, W=pressed(60, 19, 20, 21)), frames)
    assert done.actions.facts["repeats_while_moving"] == 1


def test_a_pose_gap_is_unknown_and_a_fast_turn_keeps_its_sense(tmp_path: Path) -> None:
    yaw = np.concatenate(
        (np.zeros(20), np.cumsum(np.full(8, 60.0)), np.full(33, 480.0))
    )  # 960 degrees a second
    fast = toy(tmp_path, toy_log(61, yaw=yaw), table(61, 16), poses=True)
    assert fast.ends[5:8].tolist() == [20, 24, 28]
    assert fast.rows.rows[5:8, YAW] == pytest.approx([60, 240, 180])
    yaw[48] = np.nan
    gap = toy(tmp_path, toy_log(61, yaw=yaw), table(61, 16), poses=True)
    assert gap.rows.reasons["yaw"] == gap.rows.reasons["pitch"] == ((12, 14, "pose_gap"),)


def test_rates_are_per_second_for_keys_and_per_count_for_mice(tmp_path: Path) -> None:
    """C7: the same 60 degrees a second at 30 and at 60 fps (halved) give the same rows."""
    seen = []
    for frames, rows in ((table(90, 30), 90), (table(90, 30, np.arange(0, 180, 2)), 180)):
        log = toy_log(rows, R=np.ones(rows))
        seen.append(toy(tmp_path, log, frames, rates={"R": 60.0, "MX": 0.1}).rows.rows)
    assert np.array_equal(seen[0], seen[1], equal_nan=True)
    assert seen[0][1:, YAW].mean() == pytest.approx(15.0, rel=0.02)


def test_a_video_without_a_log_or_perspective_says_so(footage: Path, tmp_path: Path) -> None:
    config = SourceConfig(key_map=str(PACK_MAP))
    corpus = Store(str(tmp_path / "corpus"))
    done = label(Store(str(footage)), corpus, "cosmos_test_video_30s.mp4", config, table(720, 24))
    t = len(done.rows.rows)
    assert done.rows.reasons == {
        "pitch": ((1, t, "no_poses"),), "yaw": ((1, t, "no_poses"),), "forward": ((1, t, "no_log"),),
        "lateral": ((1, t, "no_log"),), "jump": ((1, t, "no_log"),), "perspective": ((0, t, "not_mapped"),),
    }  # fmt: skip
    assert list(inputs(done).columns) == ["frame"]


def test_an_axis_that_is_not_mapped_is_unknown_and_one_that_is_absent_is_zero(tmp_path: Path) -> None:
    done = toy(tmp_path, toy_log(60), table(60, 16), absent=["pitch"], rates={"R": 1.0, "MX": 1.0})
    assert done.rows.reasons == {"lateral": ((1, 12, "not_mapped"),)}
    assert (done.rows.rows[:, PITCH] == 0).all()


def test_a_clip_without_a_whole_chunk_is_rejected(tmp_path: Path) -> None:
    done = toy(tmp_path, toy_log(12), table(12, 16))
    assert done.actions.reasons == ("too_short: no whole chunk on the 16 fps grid",)


def test_a_json_lines_log_reads_as_its_csv_twin(tmp_path: Path) -> None:
    log = pd.DataFrame(toy_log(60, W=pressed(60, 4, 5, 6), MX=np.arange(60.0)))
    csv = toy(tmp_path, log.to_dict("list"), table(60, 16))
    small_source(tmp_path, {"x": [0]}, {"log": {"file": "{stem}.jsonl", "inputs": KEYS}})
    log.to_json(tmp_path / "run.jsonl", orient="records", lines=True)
    corpus = Store(str(tmp_path / "corpus"))
    lines = label(Store(str(tmp_path)), corpus, "run.mp4", SourceConfig(), table(60, 16))
    assert lines.file("actions", "actions.npz") == csv.file("actions", "actions.npz")
    assert np.array_equal(lines.rows.rows, csv.rows.rows, equal_nan=True)

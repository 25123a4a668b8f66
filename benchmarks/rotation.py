"""How near the rotation rates of the footage pack come to `games.json`, from measured yaw and logs alone.

    python benchmarks/rotation.py [--yaw FOLDER] [--seed 0] [--footage ../shared/data/footage]

FOLDER holds one <clip>.npz for each clip with `yaw` [S] (degrees a step, right positive), `ok` [S] and, where
pitch is measured, `pitch` [S]; without it the yaw is the truth with the errors of odometry: 0.05 degrees
Gaussian, 2 % outliers, 5 % missing, and 3 % too much in a fifth of the frames. Prints table `rotation` with
the error of every value against games.json. Bars: keys 2 % (goal 0.5 %), mouse 3 % (goal 1 %).
"""

from __future__ import annotations

import argparse
import json
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from pipeline.inputs import read_inputs
from pipeline.rotation import Recording, calibrate
from pipeline.sources.keymap import parse
from pipeline.store import Store
from schemas.clip import FrameTable

KEY_MAP = Path(__file__).parents[1] / "tests/footage.yaml"
CLIPS = (
    "nav01_mouse_map01", "nav02_mouse_map02", "nav04_mouse_mywayhome", "bad03_hud", "bad04_menu",
    "event01_door_map01", "event07_fight_defend_center", "loop01_rewind_map02",
    "nav05_keys_deathmatch", "nav06_keys_map05", "loop03_turn180_deathmatch_offpath",
    "nonloop01_oneway_drop_e1m1", "nav08_runkeys_map03", "loop04_rewind_map06",
    "nav10_lowsens_map04", "nav11_lowsens_e1m2", "nav12_miniworld_fourrooms",
)  # fmt: skip


def table_of(frames: int, fps: Fraction) -> FrameTable:
    index = np.arange(frames, dtype=np.int64)
    none = np.zeros(frames, bool)
    return FrameTable(1 / (fps * 512), index * 512, index, index.astype(np.uint64), ~none, none)


def degraded(truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[F, 2] degrees a step, with the errors of visual odometry."""
    f = len(truth)
    too_much = np.where(rng.random(f) < 0.2, 1.03, 1.0)[:, None]
    out = truth * too_much + rng.normal(0, 0.05, (f, 2))
    out += np.where(rng.random(f) < 0.02, rng.normal(0, 8.0, f), 0.0)[:, None]
    out[rng.random(f) < 0.05] = np.nan
    return out


def recording(footage: Path, clip: str, yaw: Path | None, rng: np.random.Generator) -> Recording:
    about = json.loads((footage / f"{clip}.truth.json").read_text())
    rows = pd.read_csv(footage / f"{clip}.truth.csv")
    entry = parse(KEY_MAP.read_text(), KEY_MAP.name).match(f"{clip}.mp4")
    assert entry is not None and entry.log is not None, clip
    frames = table_of(len(rows), Fraction(about["fps"]))
    inputs = read_inputs(Store(str(footage)), f"{clip}.truth.csv", entry.log, frames)
    if yaw is None:
        turned = degraded(rows[["d_yaw_right_deg", "d_pitch_up_deg"]].to_numpy(), rng)
    else:
        measured = np.load(yaw / f"{clip}.npz")
        turned = np.full((len(rows), 2), np.nan)
        ok = np.flatnonzero(measured["ok"])
        turned[ok, 0] = measured["yaw"][ok]
        if "pitch" in measured:
            turned[ok, 1] = measured["pitch"][ok]
    return Recording(clip, entry.game, inputs, frames.seconds, turned, frames.repeat)


def true_values(game: dict[str, float], unit: str) -> tuple[float, float]:
    """(onset, steady) in the unit of the rate."""
    if unit == "deg_per_count":
        return (game.get("deg_per_count", np.nan),) * 2
    steady = game.get("deg_per_key_frame_steady", np.nan)
    return game.get("deg_per_key_frame_first5", steady) * game.get("fps", np.nan), steady * game.get(
        "fps", np.nan
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--yaw", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--footage", type=Path, default=Path(__file__).parents[2] / "shared/data/footage")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    games = json.loads((args.footage / "games.json").read_text())
    clips = [c for c in CLIPS if args.yaw is None or (args.yaw / f"{c}.npz").is_file()]
    made = [recording(args.footage, clip, args.yaw, rng) for clip in clips]
    start = time.process_time()
    rates = calibrate(made)
    spent = time.process_time() - start
    names = (
        "game",
        "input",
        "status",
        "value",
        "error %",
        "n",
        "onset",
        "error %",
        "n",
        "ramp s",
        "spread %",
    )
    line = "{:14} {:15} {:17} {:>9} {:>7} {:>5} {:>8} {:>7} {:>4} {:>6} {:>8}"
    print(line.format(*names))
    for row in rates.rows():
        known = row["value"] is not None
        onset, steady = true_values(games[row["game"]], row["unit"])
        value = row["value"] if known else float("nan")
        first = (row["onset"] or value) if known else float("nan")
        print(line.format(
            row["game"], row["input"], row["status"], f"{value:.5g}", f"{100 * (value / steady - 1):+.2f}",
            row["n"], f"{first:.5g}", f"{100 * (first / onset - 1):+.2f}", row["onset_n"],
            f"{row['onset_s']:.3f}", f"{100 * row['spread']:.1f}",
        ))  # fmt: skip
    for game, inputs in rates.rates.items():
        for name, rate in inputs.items():
            for one in rate.recordings:
                print(f"{game} {name} {one.clip_id}: {one.value} of {one.n}; not used {one.not_used}")
    frames = sum(len(r.seconds) for r in made)
    print(f"{len(made)} clips, {frames} frames, {spent:.2f} CPU s, {1e6 * spent / frames:.0f} us a frame")


if __name__ == "__main__":
    main()

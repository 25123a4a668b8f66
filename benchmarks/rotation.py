"""How near the rotation rates of the footage pack come to `games.json`, and whose turns are better.

    python -m benchmarks.rotation [--cache FOLDER] [--truth] [clip ...]

From visual odometry and logs alone, with the focal length calibrated from the pictures; FOLDER keeps the
tracks, to solve again without decoding. --truth: without odometry, the truth with its errors instead (0.05
degrees Gaussian, 2 % outliers, 5 % missing, and 3 % too much in a fifth of the frames). Bars: keys, onset
and steady, 2 % (goal 0.5 %); mouse 3 % (goal 1 %). The second table compares both witnesses of yaw with the
engine's, latent by latent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
from scipy.spatial.transform import Rotation

from benchmarks.vo import track
from pipeline.inputs import read_inputs
from pipeline.latent_turns import agreement, choose
from pipeline.pose.focal import find_turns, pool
from pipeline.pose.vo import solve
from pipeline.rotation import Recording, calibrate
from pipeline.sources.keymap import Action, parse
from pipeline.store import Store
from schemas import timeline
from schemas.action import RotationRates
from schemas.clip import FrameTable
from schemas.pose import PoseTrack, Scale

KEY_MAP = Path(__file__).parents[1] / "tests/footage.yaml"
CLIPS = (
    "nav01_mouse_map01", "nav02_mouse_map02", "nav04_mouse_mywayhome", "bad03_hud",
    "event01_door_map01", "event07_fight_defend_center", "loop01_rewind_map02",
    "nav05_keys_deathmatch", "nav06_keys_map05", "loop03_turn180_deathmatch_offpath",
    "nonloop01_oneway_drop_e1m1", "nav08_runkeys_map03", "loop04_rewind_map06",
    "nav10_lowsens_map04", "nav11_lowsens_e1m2", "nav12_miniworld_fourrooms",
)  # fmt: skip


def table_of(rows: int, fps: Fraction) -> FrameTable:
    index = np.arange(rows, dtype=np.int64)
    none = np.zeros(rows, bool)
    return FrameTable(1 / (fps * 512), index * 512, index, index.astype(np.uint64), ~none, none)


def degraded(truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[F, 2] degrees a step: the truth's yaw with the errors of visual odometry, pitch not known."""
    f = len(truth)
    yaw = truth * np.where(rng.random(f) < 0.2, 1.03, 1.0) + rng.normal(0, 0.05, f)
    yaw += np.where(rng.random(f) < 0.02, rng.normal(0, 8.0, f), 0.0)
    yaw[rng.random(f) < 0.05] = np.nan
    return np.stack([yaw, np.full(f, np.nan)], axis=1)


def by_odometry(footage: Path, games: dict[str, str], cache: Path | None) -> dict[str, np.ndarray]:
    """[F, 2] degrees a step of every clip, with one camera a game and shape of picture."""
    followed = {clip: track(footage / f"{clip}.mp4", cache)[0] for clip in games}
    alike: dict[tuple[str, float], list[str]] = defaultdict(list)
    for clip, tracks in followed.items():
        alike[games[clip], tracks.width / tracks.height].append(clip)
    out = {}
    for (game, _), clips in alike.items():
        camera = pool([find_turns(followed[clip]) for clip in clips]).camera
        if camera is None:
            raise SystemExit(f"{game}: no turn on the spot to calibrate a camera from")
        print(f"{game}: {camera} from {len(clips)} clips", flush=True)
        for clip in clips:
            steps = solve(followed[clip], camera)
            out[clip] = np.full((len(followed[clip]), 2), np.nan)
            known = np.flatnonzero(steps.valid)
            out[clip][known] = np.stack([steps.yaw_deg, steps.pitch_deg], axis=1)[known]
    return out


def placed(turned: np.ndarray) -> PoseTrack:
    """Poses whose yaw turns by these steps; the frame after an unknown step is unknown, and counts as 0."""
    known = np.isfinite(turned[:-1, 0])
    heading = np.concatenate(([0.0], np.cumsum(np.where(known, turned[:-1, 0], 0.0))))
    rotation = Rotation.from_euler("y", heading[:, None], degrees=True).as_matrix()
    valid = np.concatenate(([True], known))
    rotation[~valid] = np.nan
    place = np.where(valid[:, None], np.zeros((len(turned), 3)), np.nan)
    return PoseTrack(rotation, place, valid, Scale.UNKNOWN, "vo", up=(0.0, -1.0, 0.0))


def true_values(game: dict[str, float], unit: str) -> tuple[float, float]:
    """(onset, steady) in the unit of the rate."""
    if unit == "deg_per_count":
        return (game.get("deg_per_count", np.nan),) * 2
    steady = game.get("deg_per_key_frame_steady", np.nan)
    fps = game.get("fps", np.nan)
    return game.get("deg_per_key_frame_first5", steady) * fps, steady * fps


def show_rates(rates: RotationRates, games: dict[str, dict[str, float]]) -> None:
    print("\n| game | input | status | value | error % | n | onset | error % | n | ramp s | spread % |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rates.rows():
        if not row["n"]:
            continue
        onset, steady = true_values(games[row["game"]], row["unit"])
        value = np.nan if row["value"] is None else row["value"]
        first = row["onset"] or value
        cells = (
            row["game"], row["input"], row["status"], f"{value:.5g}", f"{100 * (value / steady - 1):+.2f}",
            row["n"], f"{first:.5g}", f"{100 * (first / onset - 1):+.2f}", row["onset_n"],
            f"{row['onset_s']:.3f}", f"{100 * row['spread']:.1f}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    print("\nsteps that were not used:")
    for inputs in rates.rates.values():
        for name, rate in inputs.items():
            for one in rate.recordings:
                print(f"  {one.clip_id} {name}: {one.value} of {one.n}; {one.not_used}")


def error(got: np.ndarray, want: np.ndarray) -> str:
    off = np.abs(got - want)[np.isfinite(got)]
    if not len(off):
        return "-"
    return f"{np.median(off):.3f} / {np.percentile(off, 95):.2f} / {off.max():.1f}"


Made = dict[str, tuple[Recording, PoseTrack, FrameTable]]


def show_witnesses(made: Made, rates: RotationRates, footage: Path) -> None:
    print(
        "\n| clip | latents | from log | contradicted "
        "| log: median / p95 / max deg | poses | chosen | correlation |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for clip, (one, poses, frames) in made.items():
        ends = timeline.latent_ends(timeline.grid(frames.pts, frames.time_base).frames)
        yaw = pd.read_csv(footage / f"{clip}.truth.csv").d_yaw_right_deg
        want = np.array([yaw[a:b].sum() for a, b in pairwise(ends)])
        chosen = choose(one.inputs, Action.YAW, frames, ends, poses, rates.rates[one.game])
        facts = agreement(chosen, "yaw")
        cells = (
            clip, len(want), facts["yaw_latents_from_log"], facts["yaw_latents_contradicted"],
            error(chosen.log.degrees, want), error(chosen.poses.degrees, want),
            error(chosen.turns.degrees, want), facts["yaw_log_pose_correlation"],
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--footage", type=Path, default=Path(__file__).parents[2] / "shared/data/footage")
    parser.add_argument("clips", nargs="*", default=CLIPS)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    games = json.loads((args.footage / "games.json").read_text())
    key_map = parse(KEY_MAP.read_text(), KEY_MAP.name)
    entries = {c: key_map.match(f"{c}.mp4") for c in args.clips}
    truth = {c: pd.read_csv(args.footage / f"{c}.truth.csv").d_yaw_right_deg.to_numpy() for c in args.clips}
    if args.truth:
        turned = {c: degraded(truth[c], rng) for c in args.clips}
    else:
        turned = by_odometry(args.footage, {c: e.game for c, e in entries.items()}, args.cache)
    made = {}
    for clip, entry in entries.items():
        turned[clip][-1] = np.nan
        about = json.loads((args.footage / f"{clip}.truth.json").read_text())
        frames = table_of(len(truth[clip]), Fraction(about["fps"]))
        inputs = read_inputs(Store(str(args.footage)), f"{clip}.truth.csv", entry.log, frames)
        one = Recording(clip, entry.game, inputs, frames.seconds, turned[clip], frames.repeat)
        made[clip] = (one, placed(turned[clip]), frames)
    start = time.process_time()
    rates = calibrate(one for one, _, _ in made.values())
    spent = time.process_time() - start
    show_rates(rates, games)
    show_witnesses(made, rates, args.footage)
    frames_of = sum(len(t) for t in truth.values())
    print(f"\ncalibration: {spent:.2f} CPU s, {1e6 * spent / frames_of:.0f} us a frame")


if __name__ == "__main__":
    main()

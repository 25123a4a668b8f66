"""Visual odometry on the footage pack's navigation clips against the engine's truth: tables of docs/vo.md.

Focal length and kind of camera are calibrated from the pictures, pooled by game and shape of picture; the
truth is only compared with. Times are CPU milliseconds a frame on one core.

    python -m benchmarks.vo [--footage ../shared/data/footage] [--cache FOLDER] [clip ...]
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pandas as pd

from pipeline.frames import frame_pass
from pipeline.pose.focal import Calibration, Turns, find_turns, pool
from pipeline.pose.tracks import Tracker, Tracks
from pipeline.pose.vo import Steps, solve

CLIPS = ("nav01", "nav02", "nav04", "nav05", "nav06", "nav08", "nav10", "nav11", "nav12")
SPAN = 300


@dataclass(frozen=True)
class Truth:
    game: str
    yaw: np.ndarray
    pitch: np.ndarray
    fx: float


@dataclass(frozen=True)
class Run:
    name: str
    tracks: Tracks
    decode_ms: float
    track_ms: float
    turns: Turns


class Timed:
    """An observer with its own clock."""

    def __init__(self) -> None:
        self.tracker, self.seconds = Tracker(), 0.0

    def see(self, index: int, picture: object) -> None:
        started = time.process_time()
        self.tracker.see(index, picture)  # type: ignore[arg-type]
        self.seconds += time.process_time() - started


def read_truth(path: Path) -> Truth:
    rows = pd.read_csv(path.with_suffix(".truth.csv"))
    about = pd.read_json(path.with_suffix(".truth.json"), typ="series")
    camera = about.get("intrinsics_at_pitch0", about)
    return Truth(
        about["game"],
        rows["d_yaw_right_deg"].to_numpy()[:-1],
        rows["d_pitch_up_deg"].to_numpy()[:-1],
        float(camera["fx"]),
    )


def track(path: Path, cache: Path | None) -> tuple[Tracks, float, float]:
    stored = cache / f"{path.stem}.npz" if cache else None
    if stored and stored.exists():
        data = np.load(stored)
        tracks = Tracks(data["at"], data["linked"], data["repeat"], int(data["width"]), int(data["height"]))
        return tracks, float(data["decode_ms"]), float(data["track_ms"])
    observer = Timed()
    started = time.process_time()
    frame_pass(path, [observer])
    total = time.process_time() - started
    tracks = observer.tracker.tracks()
    track_ms = 1e3 * observer.seconds / len(tracks)
    decode_ms = 1e3 * total / len(tracks) - track_ms
    if stored:
        about = {"width": tracks.width, "height": tracks.height, "decode_ms": decode_ms, "track_ms": track_ms}
        np.savez_compressed(stored, at=tracks.at, linked=tracks.linked, repeat=tracks.repeat, **about)
    return tracks, decode_ms, track_ms


def row(run: Run, truth: Truth, steps: Steps, solve_ms: float) -> str:
    valid = steps.valid
    yaw, pitch = steps.yaw_deg, steps.pitch_deg
    error = np.abs(yaw - truth.yaw)[valid]
    spans = []
    for i in range(0, len(yaw), SPAN):
        ok = valid[i : i + SPAN]
        true, got = truth.yaw[i : i + SPAN][ok], yaw[i : i + SPAN][ok]
        spans.append(abs(got.sum() - true.sum()) / np.abs(true).sum())
    looked = valid & (np.abs(truth.pitch) > 0.2)
    gain = float(np.median(pitch[looked] / truth.pitch[looked])) if looked.sum() > 20 else float("nan")
    pitch_error = np.abs(pitch - truth.pitch)[valid]
    total = run.track_ms + solve_ms
    cells = (
        run.name,
        f"{len(yaw) + 1}",
        f"{100 * valid.mean():.1f}",
        f"{np.corrcoef(yaw[valid], truth.yaw[valid])[0, 1]:.4f}",
        f"{np.median(error):.3f}",
        f"{np.percentile(error, 95):.3f}",
        f"{100 * (error > 2).mean():.2f}",
        f"{100 * np.median(spans):.2f}",
        f"{np.median(pitch_error):.3f}",
        "-" if np.isnan(gain) else f"{gain:.2f}",
        f"{run.decode_ms:.1f} / {run.track_ms:.1f} / {solve_ms:.1f}",
        f"{total / run.decode_ms:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


def focal_row(game: str, calibration: Calibration, width: int, fx: float) -> str:
    if calibration.focal is None:
        return f"| {game} | {calibration.reason} | {fx:.1f} | - | {calibration.n} | - | - |"
    got = calibration.focal * width
    look = f"{calibration.look}" if calibration.look_known else f"{calibration.look} (not decided)"
    error = 100 * (got / fx - 1)
    mad = 100 * calibration.mad
    return f"| {game} | {got:.1f} | {fx:.1f} | {error:+.2f} | {calibration.n} | {mad:.2f} | {look} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("WP2_FOOTAGE", "../shared/data/footage")
    parser.add_argument("--footage", type=Path, default=Path(default))
    parser.add_argument("--cache", type=Path, help="folder for tracks, to solve again without decoding")
    parser.add_argument("clips", nargs="*", default=CLIPS)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    runs, truths = [], {}
    games: dict[tuple[str, float], list[Run]] = defaultdict(list)
    for name in args.clips:
        path = next(iter(sorted(args.footage.glob(f"{name}*.mp4"))))
        tracks, decode_ms, track_ms = track(path, args.cache)
        run = Run(path.stem, tracks, decode_ms, track_ms, find_turns(tracks))
        truths[run.name] = read_truth(path)
        runs.append(run)
        games[truths[run.name].game, tracks.width / tracks.height].append(run)
    cameras = {}
    print("| game | fx px | true | error % | turns | MAD % | looking up |")
    print("|---|---|---|---|---|---|---|")
    for (game, _), members in games.items():
        calibration = pool([r.turns for r in members])
        print(focal_row(game, calibration, members[0].tracks.width, truths[members[0].name].fx), flush=True)
        cameras |= {r.name: calibration.camera for r in members}
    print()
    print(
        "| clip | frames | valid % | yaw corr. | median err | p95 | > 2 deg % | 300-frame sum % "
        "| pitch median err | pitch gain | ms decode / track / solve | ratio to decoding |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        camera = cameras[run.name]
        if camera is None:
            print(f"| {run.name} | {len(run.tracks)} | 0 (uncalibrated) |", flush=True)
            continue
        started = time.process_time()
        steps = solve(run.tracks, camera)
        solve_ms = 1e3 * (time.process_time() - started) / len(run.tracks)
        print(row(run, truths[run.name], steps, solve_ms), flush=True)


if __name__ == "__main__":
    main()

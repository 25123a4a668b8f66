"""Scale of a stitched 60 s clip against the truth, in worlds whose path is known.

    python -m benchmarks.stitch [--seeds 100]

A clip is 1,800 frames in windows of 150 that share 10; the last one is back-aligned. The camera walks curves
at a step of one with changes of speed. Each window sees the path through a similarity of its own and adds its
own Gaussian noise to every position (per component: `step / noise` is 3 when sigma is a third of a step) and
0.3 degrees to every orientation; a share of frames is thrown far off. The floor is what any estimator must
show that knows nothing but the shared frames (Cramer-Rao bound, straight path).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from pipeline.pose.align import KEEP, align_scale
from pipeline.pose.stitch import stitch
from schemas.pose import PoseTrack, Scale
from schemas.stitch import SeamVerdict, Stitched, WindowTrack
from schemas.timeline import OVERLAP, WINDOW, windows

Floats = npt.NDArray[np.float64]
FRAMES = 1800
RATIOS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class World:
    """The true path. rotation: float64 [F, 3, 3]; translation: float64 [F, 3]; still: bool [F]."""

    rotation: Floats
    translation: Floats
    still: npt.NDArray[np.bool_]


def walk(rng: np.random.Generator, frames: int, still: tuple[tuple[int, int], ...] = ()) -> World:
    """Curves at a mean step of one; the speed changes every 40 frames by up to a third. In `still` spans the
    camera stays in place and only turns."""
    yaw = np.cumsum(np.repeat(rng.normal(0, 2.0, -(-frames // 25)), 25)[:frames])
    pitch = 10 * np.sin(np.arange(frames) / 60)
    rotation = Rotation.from_euler("yx", np.stack([yaw, pitch], axis=1), degrees=True).as_matrix()
    speed = np.repeat(rng.uniform(0.67, 1.33, -(-frames // 40)), 40)[:frames]
    stands = np.zeros(frames, np.bool_)
    for start, stop in still:
        stands[start:stop] = True
    ahead = np.stack([np.sin(np.radians(yaw)), np.zeros(frames), np.cos(np.radians(yaw))], axis=1)
    steps = ahead * (speed * ~stands)[:, None]
    return World(rotation, np.concatenate([np.zeros((1, 3)), np.cumsum(steps[:-1], axis=0)]), stands)


def see(
    world: World,
    rng: np.random.Generator,
    noise: float,
    outliers: float = 0.0,
    overlap: int = OVERLAP,
    similarity: bool = True,
    turn_noise_deg: float = 0.3,
    kind: Scale = Scale.UNKNOWN,
) -> tuple[list[WindowTrack], list[float]]:
    """The windows of a world, and the true unit of each: world lengths per length in its track."""
    tracks, units = [], []
    for index, span in enumerate(windows(len(world.still), WINDOW, overlap).spans):
        unit = math.exp(rng.uniform(-1, 1)) if similarity else 1.0
        turn = Rotation.random(rng=rng).as_matrix() if similarity else np.eye(3)
        n = len(span)
        wobble = Rotation.from_rotvec(rng.normal(0, turn_noise_deg, (n, 3)), degrees=True).as_matrix()
        seen = world.translation[span.slice()] + rng.normal(0, noise, (n, 3))
        rotation = world.rotation[span.slice()] @ wobble
        thrown = rng.random(n) < outliers
        seen[thrown] += rng.normal(0, 20, (int(thrown.sum()), 3))
        rotation[thrown] = rotation[thrown] @ Rotation.random(int(thrown.sum()), rng=rng).as_matrix()
        offset = rng.normal(0, 10, 3) if similarity else np.zeros(3)
        track = PoseTrack(
            turn @ rotation, seen @ turn.T / unit + offset, np.ones(n, np.bool_), kind, "synthetic"
        )
        tracks.append(WindowTrack(index, span, track))
        units.append(unit)
    return tracks, units


def total_error(stitched: Stitched, units: list[float]) -> float | None:
    """Relative error of the last window's scale to the first's; None when a break lies between them."""
    rows = stitched.windows
    if rows[0].segment != rows[-1].segment or rows[-1].scale is None:
        return None
    return rows[-1].scale / (units[-1] / units[0]) - 1


def drifts(overlap: int, outliers: float, seeds: int) -> None:
    joins = len(windows(FRAMES, WINDOW, overlap).spans) - 1
    print(f"\noverlap {overlap}, {outliers:.0%} of the frames thrown off, {seeds} clips of {joins} joins")
    print(f"{'step/noise':>10} {'unbroken':>9} {'declared':>9} {'bias %':>8} {'median %':>9} {'p95 %':>8} "
          f"{'stated %':>9} {'floor p95 %':>12}")  # fmt: skip
    for ratio in RATIOS:
        errors, declared, stated = [], 0, []
        for seed in range(seeds):
            rng = np.random.default_rng([seed, int(10 * ratio), overlap])
            tracks, units = see(walk(rng, FRAMES), rng, 1 / ratio, outliers, overlap)
            out = stitch(tracks, FRAMES)
            declared += sum(s.verdict is not SeamVerdict.JOINED for s in out.seams)
            error = total_error(out, units)
            if error is not None:
                errors.append(error)
                stated.append(out.windows[-1].scale_spread or 0.0)
        size = np.abs(errors) if errors else np.array([np.nan])
        bias = float(np.median(errors)) if errors else math.nan
        each = math.sqrt(2 / (overlap * (overlap**2 - 1) / 12)) / ratio
        row = (f"{ratio:>10} {len(errors) / seeds:>9.0%} {declared / seeds / joins:>9.1%} {100 * bias:>8.2f} "
               f"{100 * np.median(size):>9.2f} {100 * np.percentile(size, 95):>8.2f} "
               f"{100 * np.median(stated or [math.nan]):>9.2f} "
               f"{196 * each * math.sqrt(joins):>12.2f}")  # fmt: skip
        print(row, flush=True)


def pure_noise(count: int) -> None:
    rng = np.random.default_rng(1)
    every, valid = np.broadcast_to(np.eye(3), (OVERLAP, 3, 3)), np.ones(OVERLAP, np.bool_)
    passed = 0
    for _ in range(count):
        a, b = (
            PoseTrack(every, rng.normal(size=(OVERLAP, 3)), valid, Scale.UNKNOWN, "noise") for _ in range(2)
        )
        passed += align_scale(a, b, np.eye(3), (0, 0), was_open=True).estimate.value is not None
    print(f"\noverlaps of pure noise that pass the gate of {KEEP}: {passed} of {count}")


def still_overlaps(seeds: int) -> None:
    """Every second overlap shows a turn on the spot or nothing at all; the others show a walk."""
    print(f"\nclips with still overlaps, 10% of the frames thrown off, {seeds} clips")
    print(f"{'step/noise':>10} {'still: declared':>16} {'still: guessed':>15} {'walked: joined':>15} "
          f"{'rotation p95 deg':>17}")  # fmt: skip
    spans = windows(FRAMES).spans
    for ratio in (3.0, 10.0, 100.0, 1e4):
        counts = {"declared": 0, "guessed": 0, "joined": 0, "walked": 0}
        turned = []
        for seed in range(seeds):
            rng = np.random.default_rng([seed, int(ratio)])
            stands = tuple((b.start - 1, a.stop + 1) for a, b in pairwise(spans))[::2]
            world = walk(rng, FRAMES, stands)
            out = stitch(see(world, rng, 1 / ratio, 0.1)[0], FRAMES)
            for seam in out.seams:
                known = seam.scale is not None
                if world.still[seam.start : seam.stop].all():
                    counts["guessed" if known else "declared"] += 1
                else:
                    counts["walked"] += 1
                    counts["joined"] += known
                turned.append(seam.rotation_deg)
        print(f"{ratio:>10g} {counts['declared']:>16} {counts['guessed']:>15} "
              f"{counts['joined'] / counts['walked']:>15.1%} "
              f"{np.percentile([t for t in turned if t is not None], 95):>17.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    args = parser.parse_args()
    for overlap, outliers in ((10, 0.0), (10, 0.1), (10, 0.2), (20, 0.0), (30, 0.0), (40, 0.0)):
        drifts(overlap, outliers, args.seeds)
    still_overlaps(args.seeds)
    pure_noise(40_000)


if __name__ == "__main__":
    main()

"""The visual axes: the matrix of docs/quality.md, and what they cost.

    python -m benchmarks.quality matrix [--footage ../shared/data/footage]
    python -m benchmarks.quality cost [--frames 300] [--rounds 5]

matrix: scores of every quality clip, then of the play. cost: CPU seconds of a pass at 1280x720 (made here:
H.264, 3 B-frames) without observers, with each part of the analysis, and with the measures of the axes in
plain numpy on every frame. All sides run on one thread, interleaved. Bar: quality 0.25 of null decoding.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from benchmarks.frames import SOURCE, make, own
from pipeline.clips.signals import watch
from pipeline.frames import frame_pass
from pipeline.loops import Views
from pipeline.picture import Picture, native_planes
from pipeline.pose.tracks import Tracker
from pipeline.quality.axes import AXES, RAWS, score
from pipeline.quality.hashes import Hashes
from pipeline.quality.looks import Look, Looks

LADDERS = (
    "q_ref_crf18",
    "q_blur_s1",
    "q_blur_s4",
    "q_upscaled_from160",
    "q_compress_crf28",
    "q_compress_crf38",
    "q_compress_crf51",
    "q_noise_10",
    "q_noise_50",
    "q_dark_035",
    "q_lowcontrast",
    "q_over_x8",
    "q_letterbox60",
)
Floats = npt.NDArray[np.float64]


def look(path: Path) -> Looks:
    observer = Look()
    frame_pass(path, [observer])
    return observer.looks()


def matrix(footage: Path) -> None:
    play = sorted(p.stem for kind in ("nav", "loop", "nonloop", "bad") for p in footage.glob(f"{kind}*.mp4"))
    print("| clip | " + " | ".join(AXES) + " | " + " | ".join(RAWS) + " | hud | text | mark | bars |")
    print("|---|" + "---|" * (len(AXES) + len(RAWS) + 4))
    for name in (*LADDERS, *play, "vipe_cosmos-example", "cosmos_test_video_30s"):
        looks = look(footage / f"{name}.mp4")
        axes, flags, crop = score(looks, 0, looks.frames), looks.flags, looks.crop
        scores = [f"{getattr(axes, axis):.2f}" for axis in AXES]
        raws = ["-" if axes.raws[raw] is None else f"{axes.raws[raw]:.3f}" for raw in RAWS]
        shares = [f"{flags.hud_share:.3f}", f"{flags.text_share:.3f}", "yes" if flags.watermark else "no"]
        bars = f"{crop.top} {crop.bottom} {crop.left} {crop.right}"
        cells = [name, *scores, *raws, *(shares if flags.known else ["?"] * 3), bars]
        print("| " + " | ".join(cells) + " |", flush=True)


class Plain:
    """The raw measures of every frame in plain numpy, whole pictures, no cells, no overlay."""

    def see(self, index: int, picture: Picture) -> None:
        luma, u, v = (plane.astype(np.float64) for plane in native_planes(picture.limited))
        work = luma[: luma.shape[0] // 2 * 2, : luma.shape[1] // 2 * 2]
        work = (work[::2, ::2] + work[1::2, ::2] + work[::2, 1::2] + work[1::2, 1::2]) / 4
        fine, coarse = slopes(blurred(work, 1.2)), slopes(blurred(work, 2.4))
        strong = fine > np.percentile(fine, 90)
        ratio = np.minimum(fine[strong] / np.maximum(coarse[strong], 1e-3), 2)
        residuals = [laplace(plane) for plane in (luma, u, v)]
        noise = [np.percentile(blocks(r), 10) for r in residuals]
        sides = [np.bincount(np.arange(s.shape[1]) % 8, s.sum(axis=0)) for s in (steps(luma), steps(luma.T))]
        levels = np.percentile(luma, (2, 98))
        _ = ratio.mean(), noise, sides, levels, (luma > 233).mean(), u.std(), v.std()


def blurred(picture: Floats, sigma: float) -> Floats:
    reach = int(3 * sigma)
    offsets = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    for axis in (0, 1):
        shifted = (np.roll(picture, k, axis) * w for k, w in zip(offsets, kernel, strict=True))
        picture = sum(shifted, np.zeros_like(picture)) / kernel.sum()
    return picture


def slopes(picture: Floats) -> Floats:
    down, across = np.gradient(picture)
    return np.asarray(np.hypot(down, across))


def laplace(plane: Floats) -> Floats:
    down = plane[:-2] - 2 * plane[1:-1] + plane[2:]
    return np.abs(down[:, :-2] - 2 * down[:, 1:-1] + down[:, 2:]) / 6


def blocks(values: Floats) -> Floats:
    rows, columns = values.shape[0] // 8, values.shape[1] // 8
    return np.asarray(values[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).mean(axis=(1, 3)))


def steps(luma: Floats) -> npt.NDArray[np.bool_]:
    rows = luma.shape[0] // 8
    jump = np.diff(luma[: rows * 8], axis=1).reshape(rows, 8, -1)
    step, size = np.abs(jump.mean(axis=1)), np.abs(jump).mean(axis=1)
    found = (step[:, 1:-1] >= 2.5) & (step[:, 1:-1] > 2 * np.maximum(size[:, :-2], size[:, 2:]))
    return np.asarray(found)


PARTS: dict[str, Callable[[Path], object]] = {
    "null decoding": lambda path: frame_pass(path, []),
    "axes and flags": look,
    "hashes of copies": lambda path: frame_pass(path, [Hashes()]),
    "views of loops": lambda path: frame_pass(path, [Views()]),
    "cuts, menus, stills (the pass over recordings)": watch,
    "tracks for vo": lambda path: frame_pass(path, [Tracker()]),
    "the axes in plain numpy, every frame": lambda path: frame_pass(path, [Plain()]),
}
"""What is decoded for, each in a pass of its own; `wp2 curate` shares one decode among all but the cuts."""
QUALITY = ("axes and flags", "hashes of copies")


def cost(footage: Path, frames: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "720p.mp4"
        make(footage / SOURCE, path, frames, gop=60)
        rows = [
            {name: own(lambda part=part: part(path)) for name, part in PARTS.items()} for _ in range(rounds)
        ]
    null = statistics.median(row["null decoding"] for row in rows)
    print(f"{frames} frames of 1280x720, {rounds} rounds; null decoding {null / frames * 1e3:.2f} ms a frame")
    print("what is added, as a share of null decoding (median over the rounds):")
    share = {}
    for name in list(PARTS)[1:]:
        share[name] = statistics.median(
            (row[name] - row["null decoding"]) / row["null decoding"] for row in rows
        )
        print(f"  {share[name]:6.3f}  {name}")
    quality = sum(share[name] for name in QUALITY)
    rest = ("views of loops", "cuts, menus, stills (the pass over recordings)")
    print(f"quality metrics together {quality:.3f} (bar 0.25)")
    whole, vo = quality + sum(share[n] for n in rest), share["tracks for vo"]
    print(f"whole analysis without vo {whole:.3f}, and {vo:.3f} for vo")
    print(f"numpy / axes {share['the axes in plain numpy, every frame'] / share['axes and flags']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="cost", choices=("matrix", "cost"))
    default = os.environ.get("WP2_FOOTAGE", "../shared/data/footage")
    parser.add_argument("--footage", type=Path, default=Path(default))
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    matrix(args.footage) if args.what == "matrix" else cost(args.footage, args.frames, args.rounds)


if __name__ == "__main__":
    main()

"""The linear codec on held-out clips of the footage pack: the tables and the picture of docs/codec.md.

Fitted on the navigation clips that are not held out (`pipeline.latents.fit`), at three sizes. PSNR of a frame
is that of its 8-bit RGB values; means are over the frames of a clip, then over clips. Times are CPU seconds
on one core, of the pass that the latents stage makes: decode, scale, both streams, segments, y.

    python -m benchmarks.codec [--footage ../shared/data/footage] [--picture docs/codec.png] [--entries 61]
    python -m benchmarks.codec --stage nav05 --size 448 832      (time and peak memory of one clip, alone)
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import torch

from pipeline.frames import frame_pass
from pipeline.geometry import Cover
from pipeline.latents.fit import Groups
from pipeline.latents.rows import RowWriter
from pipeline.latents.stage import Encoder
from pipeline.picture import Picture
from schemas import timeline
from schemas.latents import SEGMENT, FittedCodec, segment_starts
from trainer.codec.base import to_pixels, to_rgb
from trainer.codec.linear import Fit, Linear

SIZES = ((448, 832), (128, 256), (64, 128))
HELD = ("nav02", "nav06", "nav11", "nav12")
"""One clip of each style and game: mouse, keys, 480 lines, and the only one of its engine (nav12)."""
STRETCHES = (0.25, 0.6)


@dataclass(frozen=True)
class Clip:
    name: str
    path: Path
    grid: np.ndarray
    height: int
    width: int


def open_clip(path: Path) -> Clip:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        step = 1 / (Fraction(stream.average_rate) * stream.time_base)
        pts = np.asarray([round(k * step) for k in range(stream.frames)])
        grid = timeline.grid(pts, Fraction(stream.time_base)).frames
        return Clip(path.stem, path, grid, stream.height, stream.width)


class Take:
    """Observer that keeps some frames, covered at several sizes."""

    def __init__(self, wanted: set[int], covers: list[Cover]) -> None:
        self.wanted, self.covers = wanted, covers
        self.held: dict[int, list[np.ndarray]] = {}

    def see(self, index: int, picture: Picture) -> None:
        if index in self.wanted:
            self.held[index] = [cover.apply(picture.rgb) for cover in self.covers]


def stretches(clip: Clip, entries: int) -> list[np.ndarray]:
    """Frames of some runs of grid entries."""
    starts = [int(len(clip.grid) * share) for share in STRETCHES]
    return [clip.grid[a : a + entries] for a in starts]


def fit(clips: list[Clip], height: int, width: int) -> FittedCodec:
    found = Fit()
    for clip in clips:
        cover = Cover.of(clip.height, clip.width, height, width)
        frame_pass(clip.path, [Groups(found, clip.grid, cover)])
    return found.record(tuple(c.name for c in clips))


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """dB of every frame; a, b: uint8 [F, H, W, 3]."""
    error = np.square(a.astype(np.float32) - b.astype(np.float32)).mean(axis=(1, 2, 3))
    return 10 * np.log10(255**2 / error)


def coded(codec: Linear, rgb: np.ndarray) -> np.ndarray:
    latents, _ = codec.encode(to_pixels(torch.from_numpy(rgb)))
    return to_rgb(codec.decode(latents)[0]).numpy()


def picture(path: Path, rows: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    """Original, decoded, and their difference 4 times enlarged around grey."""
    lines = []
    for original, decoded in rows:
        difference = np.clip(128 + 4 * (decoded.astype(int) - original), 0, 255).astype(np.uint8)
        line = np.concatenate([original, decoded, difference], axis=1)
        lines.append(cv2.resize(line, (936, 168), interpolation=cv2.INTER_AREA))
    cv2.imwrite(str(path), np.concatenate(lines)[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])


def stage_seconds(clip: Clip, codec: Linear, height: int, width: int) -> float:
    """CPU seconds of the latents stage on a clip."""
    latents = timeline.latents_of(len(clip.grid))
    starts = segment_starts(latents, 4)
    high = 16, height // 8, width // 8
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder)
        hr = stack.enter_context(RowWriter(out / "hr", (latents,), high))
        lr = stack.enter_context(RowWriter(out / "lr", (latents // 2,), (16, high[1] // 4, high[2] // 4)))
        parts = stack.enter_context(RowWriter(out / "parts", (len(starts), SEGMENT), high))
        cover = Cover.of(clip.height, clip.width, height, width)
        encoder = Encoder(codec, clip.grid, cover, starts, hr, lr, parts)
        frame_pass(clip.path, [encoder])
        encoder.finish()
    return time.process_time() - began


def peak_mib() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("WP2_FOOTAGE", "../shared/data/footage")
    parser.add_argument("--footage", type=Path, default=Path(default))
    parser.add_argument("--picture", type=Path, help="write the picture here")
    parser.add_argument("--entries", type=int, default=61, help="grid entries of each stretch (4T-3)")
    parser.add_argument("--stage", help="only this: the latents stage on one clip")
    parser.add_argument("--size", type=int, nargs=2, default=SIZES[0], help="height and width of --stage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    if args.stage:
        clip = open_clip(next(iter(sorted(args.footage.glob(f"{args.stage}*.mp4")))))
        seconds = stage_seconds(clip, Linear(fit([clip], *args.size)), *args.size)
        print(
            f"{clip.name}: {len(clip.grid) / 16:.0f} s of video, {seconds:.1f} CPU s, peak {peak_mib()} MiB"
        )
        return
    clips = [open_clip(p) for p in sorted(args.footage.glob("nav*.mp4"))]
    held = [c for c in clips if c.name.startswith(HELD)]
    rest = [c for c in clips if not c.name.startswith(HELD)]
    print("| size | clip | first frame dB | all frames dB |\n|---|---|---|---|")
    codecs = {}
    shown = []
    for size in SIZES:
        codecs[size] = Linear(fit(rest, *size))
        means = []
        for clip in held:
            runs = stretches(clip, args.entries)
            take = Take({int(k) for run in runs for k in run}, [Cover.of(clip.height, clip.width, *size)])
            frame_pass(clip.path, [take])
            found = []
            for run in runs:
                rgb = np.stack([take.held[int(k)][0] for k in run])
                decoded = coded(codecs[size], rgb)
                found.append(psnr(rgb, decoded))
                if size == SIZES[0] and run is runs[-1] and clip is not held[0]:
                    shown.append((rgb[30], decoded[30]))
            means.append(float(np.mean(found)))
            first = float(np.mean([f[0] for f in found]))
            print(f"| {size[0]}x{size[1]} | {clip.name} | {first:.1f} | {means[-1]:.1f} |", flush=True)
        print(f"| {size[0]}x{size[1]} | **mean** | | **{np.mean(means):.2f}** |", flush=True)
    if args.picture:
        picture(args.picture, iter(shown))
    clip = next(c for c in clips if c.name.startswith("nav05"))
    print(f"\n| size | CPU s for {clip.name} ({len(clip.grid) / 16:.0f} s) | of a minute |\n|---|---|---|")
    for size in SIZES:
        seconds = stage_seconds(clip, codecs[size], *size)
        print(f"| {size[0]}x{size[1]} | {seconds:.1f} | {seconds * 960 / len(clip.grid):.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""What a strict pass costs: CPU seconds against `ffmpeg -f null -` and against seeking once per window.

    python benchmarks/frames.py [--frames 600] [--rounds 5] [--footage ../shared/data/footage]

Inputs are made here: footage scaled to 1280x720, H.264 with 3 B-frames, a key frame every 250 or 60 frames.
All sides run on one thread, interleaved, in one run; a row is the median over the rounds of each round's
ratio. Bars: hashes + gray at most 1.5 of ffmpeg; one RGB pass at least 2.5 times cheaper than a window worker
that opens a fresh decord reader and seeks for each 150-frame window (stride 140).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import cv2
import decord

from pipeline.frames import frame_pass
from pipeline.picture import Picture
from schemas.timeline import windows

SOURCE = "nav02_mouse_map02.mp4"


class Gray:
    def see(self, index: int, picture: Picture) -> None:
        _ = picture.gray


class Rgb:
    def see(self, index: int, picture: Picture) -> None:
        _ = picture.rgb


def make(source: Path, target: Path, frames: int, gop: int) -> None:
    options = {
        "g": str(gop),
        "keyint_min": str(gop),
        "bf": "3",
        "crf": "20",
        "preset": "fast",
        "sc_threshold": "0",
    }
    with av.open(str(source)) as read, av.open(str(target), "w") as out:
        stream = out.add_stream("libx264", rate=35, options=options)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for k, frame in enumerate(read.decode(video=0)):
            if k == frames:
                break
            large = frame.reformat(1280, 720, "yuv420p", interpolation="BICUBIC")
            large.pts, large.time_base = k, Fraction(1, 35)
            out.mux(stream.encode(large))
        out.mux(stream.encode(None))


def own(work: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ffmpeg(path: Path) -> float:
    child = subprocess.Popen(["ffmpeg", "-v", "error", "-threads", "1", "-i", str(path), "-f", "null", "-"])
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"ffmpeg ended with {child.returncode} on {path}")
    return used.ru_utime + used.ru_stime


def seek_per_window(path: Path, frames: int) -> None:
    for span in windows(frames).spans:
        reader = decord.VideoReader(str(path), num_threads=1)
        reader.get_batch(range(span.start, span.stop)).asnumpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--footage", type=Path, default=Path(__file__).parents[2] / "shared/data/footage")
    args = parser.parse_args()
    if shutil.which("ffmpeg") is None:
        sys.exit("benchmarks/frames.py compares with the ffmpeg command, which is missing: install ffmpeg")
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(f"{args.frames} frames of 1280x720, {args.rounds} rounds, CPU seconds (median) and ratios")
        names = ("GOP", "ffmpeg", "pass", "pass/ffmpeg", "RGB pass", "seeks", "seeks/RGB")
        print(" ".join(f"{name:>11}" for name in names))
        for gop in (250, 60):
            path = Path(folder) / f"g{gop}.mp4"
            make(args.footage / SOURCE, path, args.frames, gop)
            rows = []
            for _ in range(args.rounds):
                rows.append(
                    (
                        ffmpeg(path),
                        own(lambda p=path: frame_pass(p, [Gray()])),
                        own(lambda p=path: frame_pass(p, [Rgb()])),
                        own(lambda p=path: seek_per_window(p, args.frames)),
                    )
                )
            null, gray, rgb, seeks = (statistics.median(r[i] for r in rows) for i in range(4))
            to_null = statistics.median(r[1] / r[0] for r in rows)
            to_rgb = statistics.median(r[3] / r[2] for r in rows)
            cells = (f"{v:.2f}" for v in (null, gray, to_null, rgb, seeks, to_rgb))
            print(" ".join(f"{cell:>11}" for cell in (str(gop), *cells)), flush=True)


if __name__ == "__main__":
    main()

"""What the caption client costs, and whether it keeps a server busy: slots, and CPU against decoding.

A stand-in server of fixed latency runs as a process of its own; its slots are measured there, from the moment
when all were first taken until the last request came. Clips of the footage pack are ingested, then captioned
many times under other ids. Two passes in one run:
  client      pictures prepared before: requests, replies, checks, cache, attempts
  and frames  the same with the pictures of every clip read (decord), scaled and written as JPEG
decode is one strict pass over the same clips (PyAV, no observer). CPU seconds are the process's, threads
included. Bars: slots busy >= 95 %, client <= 0.15 of decode.

    python -m benchmarks.captions [--clips 384] [--slots 64] [--latency 5] [--per-interval 4] [NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import cv2
import httpx

import pipeline.caption.stage as stage_module
from pipeline.caption.attempts import AttemptLog
from pipeline.caption.frames import FramePlan, Limits, pictures
from pipeline.caption.stage import Caption, CaptionConfig, ServeConfig
from pipeline.frames import frame_pass
from pipeline.ingest import Ingest, IngestConfig
from pipeline.sources import SourceConfig
from pipeline.stage import Receipt, Unit, run_unit
from pipeline.store import Store
from schemas.clip import Clip, Perspective
from schemas.quality import Status

CLIPS = ("nav01_mouse_map01", "nav02_mouse_map02", "nav06_keys_map05", "event07_fight_defend_center")


def ingested(path: Path, corpus: Store) -> Unit:
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    clip = Clip(
        clip_id=sha[:16], recording_id=sha[:16], source_path=path.name, bytes=path.stat().st_size, sha256=sha,
        perspective=Perspective.FIRST,
    )  # fmt: skip
    unit = Unit(clip, "g0000-p00000", Store(str(path.parent)), corpus)
    receipt = run_unit(Ingest(IngestConfig()), unit)
    assert receipt.status is Status.OK, receipt.reasons
    made = Receipt(clip_id="", stage="actions", config="", inputs="", status=Status.OK, content="")
    return replace(unit, receipts={"ingest": receipt, "actions": made})


@contextmanager
def server(latency: float) -> Any:
    command = [sys.executable, "-m", "tests.caption_server", "--latency", str(latency)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def caption_all(
    units: list[Unit], url: str, corpus: Store, limits: Limits, slots: int
) -> tuple[float, float]:
    """CPU and wall seconds of captioning the units, twice as many in work as there are slots."""
    stage = Caption(
        CaptionConfig(source="vlm", limits=limits), SourceConfig(),
        ServeConfig(endpoints=(url,), in_flight=slots, per_endpoint=slots),
    )  # fmt: skip

    async def work(scratch: Path) -> None:
        at_once = asyncio.Semaphore(2 * slots)

        async def one(unit: Unit) -> None:
            async with at_once:
                result = await stage.caption(unit, scratch)
                assert result.verdict.status is Status.OK, result.verdict

        async with stage.session(AttemptLog(corpus)):
            await asyncio.gather(*map(one, units))

    with tempfile.TemporaryDirectory() as scratch:
        cpu, wall = time.process_time(), time.monotonic()
        asyncio.run(work(Path(scratch)))
        return time.process_time() - cpu, time.monotonic() - wall


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=CLIPS, help="clips of the pack")
    parser.add_argument("--footage", type=Path, default=Path("../shared/data/footage"))
    parser.add_argument("--clips", type=int, default=384)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--latency", type=float, default=5.0)
    parser.add_argument("--per-interval", type=int, default=Limits().per_interval)
    parser.add_argument("--frames-clips", type=int, default=16, help="clips of the pass that reads frames")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    limits = Limits(per_interval=args.per_interval)
    with tempfile.TemporaryDirectory() as folder, server(args.latency) as url:
        made = [ingested(args.footage / f"{name}.mp4", Store(f"{folder}/ingested")) for name in args.names]
        decode = []
        for unit in made:
            started = time.process_time()
            frame_pass(args.footage / unit.clip.source_path, [])
            decode.append(time.process_time() - started)

        def copies(count: int, mark: str) -> list[Unit]:
            return [
                replace(unit, clip=unit.clip.model_copy(update={"clip_id": f"{mark}{i:05d}"}))
                for i, unit in enumerate(islice(cycle(made), count))
            ]

        held: dict[tuple[int, ...], list[bytes]] = {}

        def prepared(unit: Unit, plan: FramePlan) -> list[bytes]:
            if plan.frames not in held:
                held[plan.frames] = pictures(unit, plan)
            return held[plan.frames]

        full, _ = caption_all(copies(args.frames_clips, "f"), url, Store(f"{folder}/f"), limits, args.slots)
        stage_module.pictures = prepared  # type: ignore[assignment]
        caption_all(copies(len(made), "w"), url, Store(f"{folder}/w"), limits, args.slots)
        # A server of its own for the measured pass: its busy share must hold nothing else.
        with server(args.latency) as fresh:
            cpu, wall = caption_all(copies(args.clips, "c"), fresh, Store(f"{folder}/c"), limits, args.slots)
            stats = httpx.get(f"{fresh}/stand-in/stats", params={"slots": args.slots}).json()
        # Copies of a clip whose check pictures happen to show the same digits are one request, and cached.
        assert stats["requests"] >= 0.9 * args.clips, stats
        per_clip = sum(decode) / len(decode)
        sent = sum(sum(map(len, jpegs)) for jpegs in held.values()) / len(held)
        print(f"{args.clips} clips, {args.slots} slots, latency {args.latency} s, wall {wall:.1f} s")
        print(f"pictures of a clip: {sum(map(len, held.values())) / len(held):.0f}, {sent / 1e6:.2f} MB")
        print(f"slots busy, at the server: {stats['busy_share']:.3f}")
        print(f"{'CPU a clip':12}{'ms':>8}{'of decode':>11}")
        for name, seconds in (
            ("decode", per_clip),
            ("client", cpu / args.clips),
            ("and frames", full / args.frames_clips),
        ):
            print(f"{name:12}{1e3 * seconds:8.1f}{seconds / per_clip:11.3f}")


if __name__ == "__main__":
    main()

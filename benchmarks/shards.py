"""CPU cost of writing a shard against the least that any writer must do.

    python benchmarks/shards.py [--samples 64] [--megabytes 4] [--rounds 5] [--folder DIR]

Bar: `TarWriter` (headers, sha256 of the tar, xxh64 of every member, one pass) takes at most 1.5 times the CPU
seconds of writing the same bytes to a file and hashing them once with sha256. Rounds are interleaved; the
median round counts. Reported apart: the read-back check that comes before a tar is published, the whole
`write_partition`, `read_sample` and `verify`. Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipeline.shards.check import check_tar
from pipeline.shards.read import read_index, read_sample
from pipeline.shards.tar import TarWriter
from pipeline.shards.verify import verify
from pipeline.shards.write import Sample, ShardConfig, write_partition, write_root
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import IntervalEvent, StructuredCaption
from schemas.clip import ClipKind, Perspective
from schemas.pose import Scale
from schemas.sample import ActionUnknown, Annotation, index_schema
from schemas.timeline import intervals

BAR = 1.5
FRAMES, LATENTS = 1800, 240  # a clip of 60 s at 30 fps


def make(count: int, megabytes: int, folder: Path) -> list[Sample]:
    """Samples whose video is random bytes on disk, as no compressed video is more compressible."""
    return [_sample(f"{i:016x}", np.random.default_rng(i), megabytes, folder) for i in range(count)]


def _sample(name: str, rng: np.random.Generator, megabytes: int, folder: Path) -> Sample:
    video = folder / f"{name}.mp4"
    video.write_bytes(rng.bytes(megabytes << 20))
    note = Annotation(
        sample_id=name,
        clip_id=name,
        recording_id=name,
        kind=ClipKind.NAVIGATION,
        split="train",
        game="",
        perspective=Perspective.FIRST,
        licence="",
        frames=FRAMES,
        fps=30.0,
        fps_num=30,
        fps_den=1,
        width=832,
        height=448,
        duration_s=60.0,
        latent_frames=LATENTS,
        actions_known=LATENTS,
        grid_jitter_max_s=0.0,
        pose_scale=Scale.UNKNOWN,
        pose_estimator="given",
        pose_valid_share=1.0,
        action_witness="poses",
        action_unknown=ActionUnknown(),
        action_lag_frames=0.0,
        caption=StructuredCaption(events=(IntervalEvent(),) * len(intervals(Fraction(60)))),
    )
    dump = note.model_dump(mode="json")
    facts = {n: dump[n] for n in index_schema().names if n in dump and n != "sample_id"}
    members: dict[str, bytes | Path] = {
        "mp4": video,
        "json": note.model_dump_json().encode(),
        "actions.npy": _npy(np.zeros((LATENTS, len(AXES)), np.float32)),
        "grid.npy": _npy(np.linspace(0, FRAMES - 1, 4 * LATENTS - 3).astype(np.int32)),
        "poses.npy": _npy(np.tile(np.eye(3, 4, dtype=np.float32), (FRAMES, 1, 1))),
    }
    return Sample(name, facts, members)


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def baseline(contents: list[bytes], path: Path) -> None:
    """Write the bytes, flush them, and hash them once."""
    digest = hashlib.sha256()
    with path.open("wb") as f:
        for content in contents:
            f.write(content)
            digest.update(content)
        os.fsync(f.fileno())


def shard(samples: list[tuple[str, bytes]], path: Path) -> list[dict[str, object]]:
    """The same through TarWriter; rows as `check_tar` takes them."""
    rows: list[dict[str, object]] = []
    with path.open("wb") as f:
        tar = TarWriter(f)
        for name, content in samples:
            rows.append({"sample_id": name, "media": {"members": [tar.add(f"{name}.mp4", content)]}})
        tar.finish()
        os.fsync(f.fileno())
    return rows


def read_back(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("rb") as f:
        _, findings = check_tar(f, "tar", "media", rows)
    if findings:
        raise SystemExit(str(findings[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU cost of writing a shard; see the head of this file.")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        samples = make(args.samples, args.megabytes, folder)
        held = [(s.sample_id, (folder / f"{s.sample_id}.mp4").read_bytes()) for s in samples]
        total = sum(len(c) for _, c in held)
        print(f"{len(samples)} samples x {args.megabytes} MiB, {args.rounds} interleaved rounds, CPU seconds")
        corpus = Store(str(folder / "corpus"))
        corpus.write("corpus.json", b"{}\n")
        times: dict[str, list[float]] = {}

        def measure(label: str, work: Callable[[], object]) -> None:
            times.setdefault(label, []).append(cpu(work))

        for _ in range(args.rounds):
            for path in (folder / "raw", folder / "tar"):
                path.unlink(missing_ok=True)
            rows: list[dict[str, object]] = []
            measure("baseline", lambda: baseline([c for _, c in held], folder / "raw"))
            measure("shard", lambda rows=rows: rows.extend(shard(held, folder / "tar")))
            measure("read-back", lambda rows=rows: read_back(folder / "tar", rows))
            measure(
                "write_partition, files in, read-back and all",
                lambda: write_partition(corpus, "g0000-p00000", samples, ShardConfig()),
            )
            write_root(corpus)
            places = [row["media"] for row in read_index(corpus).to_pylist()]
            measure("read_sample, checked", lambda places=places: [read_sample(corpus, p) for p in places])
            measure("verify", lambda: verify(corpus))
        for label, seconds in times.items():
            middle = statistics.median(seconds)
            each = " ".join(f"{s:.3f}" for s in seconds)
            print(f"  {label:46} median {middle:.3f}  {total / middle / 1e6:6.0f} MB/s   [{each}]")
    ratio = statistics.median(times["shard"]) / statistics.median(times["baseline"])
    print(f"shard / baseline = {ratio:.2f} (bar {BAR})")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())

"""What Ray costs a clip: the same clips through `wp2 curate` in one process and on a Ray of one CPU.

Both take the same clips through ingest and gates, in interleaved rounds: the cheapest work that a clip ever
is, about a second, so the largest share that Ray can have. The figure is wall time from the first task to the
last result; starting Ray and scanning the source stay apart.

    python -m benchmarks.runner [--clips 24] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import av
from rich.console import Console

from jobs.config import CurateConfig, RunConfig
from jobs.corpus_run import run_curate
from jobs.runner import InProcess, Pool, RayPool


def make_clips(footage: Path, folder: Path, count: int) -> None:
    """Clips of different content: copies of pack clips, packet by packet, each with its own title."""
    names = (
        "nav12_miniworld_fourrooms",
        "nav05_keys_deathmatch",
        "nav11_lowsens_e1m2",
        "loop04_rewind_map06",
    )
    for i in range(count):
        source = footage / f"{names[i % len(names)]}.mp4"
        with av.open(str(source)) as given, av.open(str(folder / f"{i:03d}.mp4"), "w") as made:
            stream = given.streams.video[0]
            target = made.add_stream_from_template(stream)
            target.metadata["title"] = str(i)
            made.metadata["title"] = str(i)  # other bytes, so another clip
            for packet in given.demux(stream):
                if packet.dts is not None:
                    packet.stream = target
                    made.mux(packet)


def once(source: Path, pool: Pool) -> float:
    config = CurateConfig(run=RunConfig(cpus=1, in_flight=2))
    with tempfile.TemporaryDirectory() as folder:
        quiet = Console(quiet=True)
        outcome = run_curate(
            f"folder:{source}", f"{folder}/corpus", config, only="gates", console=quiet, pool=pool
        )
    assert sum(outcome.counts.values()) > 0
    return outcome.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--footage", type=Path, default=Path(__file__).parents[2] / "shared/data/footage")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_clips(args.footage, Path(folder), args.clips)
        ray = RayPool(None, 1, 2)
        ray.submit("warm", sorted, [1])
        ray.wait(60.0)
        times: dict[str, list[float]] = {"in process": [], "ray": []}
        try:
            once(Path(folder), InProcess())
            once(Path(folder), ray)
            for _ in range(args.rounds):
                times["in process"].append(once(Path(folder), InProcess()))
                times["ray"].append(once(Path(folder), ray))
        finally:
            ray.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        rounds = " ".join(f"{t:.2f}" for t in times[name])
        print(f"{name:12}{seconds / args.clips * 1000:8.0f} ms a clip   (rounds: {rounds})")
    print(f"ratio       {medians['ray'] / medians['in process']:8.3f}")


if __name__ == "__main__":
    main()

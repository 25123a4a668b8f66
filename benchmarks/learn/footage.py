"""Writes episodes of the probe world as a game would leave them: video, key log, camera log, key map."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import av
import numpy as np
import yaml

from benchmarks.learn.world import (
    HEIGHT,
    MARGIN,
    SIDE,
    TURN,
    WIDTH,
    Keys,
    Panorama,
    Picture,
    Room,
    moved,
    turns,
    walks,
)
from schemas.timeline import FRAMES_PER_LATENT, GRID_RATE

ROOMS = 0.2
"""Share of episodes in the room; the others are panoramas."""
KEYS = ("TURN_RIGHT", "TURN_LEFT", "FORWARD", "BACK")
CRF = "8"
"""Of the videos: 45 dB and more, 10 dB above what the codec keeps."""


@dataclass(frozen=True)
class Episode:
    """heading (right positive), x, y of each of F frames; keys held from frame t to t+1, one row fewer."""

    name: str
    game: str
    poses: tuple[tuple[float, float, float], ...]
    keys: tuple[Keys, ...]


def episode(index: int, seed: int, latents: int) -> tuple[Episode, Callable[[int], Picture]]:
    """Episode `index` of a seed, and the picture of each of its frames."""
    rng = np.random.default_rng([seed, index])
    in_room = int((index + 1) * ROOMS) > int(index * ROOMS)
    world: Room | Panorama
    if in_room:
        world = Room.random(rng)
        x, y = rng.uniform(MARGIN, SIDE - MARGIN, 2)
        start = (float(rng.integers(32)) * TURN, float(x), float(y))
        plan = walks(rng, latents, start)
    else:
        world = Panorama.random(rng)
        start = (0.0, 0.0, 0.0)
        plan = turns(rng, latents)
    # Latent 0 is one frame; latent k is brought about by the four steps before its last frame.
    keys = tuple(k for k in plan for _ in range(FRAMES_PER_LATENT))
    poses = [start]
    for held in keys:
        poses.append(moved(*poses[-1], held, 1 / FRAMES_PER_LATENT))
    game = "probe_room" if in_room else "probe_panorama"
    made = Episode(f"{game}_{index:04d}", game, tuple(poses), keys)
    return made, lambda frame: world.picture(*made.poses[frame])


def write(folder: Path, count: int, seed: int, latents: int, tick: Callable[[int, int], None]) -> None:
    """Episodes 0..count-1 of `latents` latents each, and the key map. Those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "games.yaml").write_text(yaml.safe_dump({"games": [_entry("panorama"), _entry("room")]}))
    one = functools.partial(_write_episode, folder, seed, latents)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done, _ in enumerate(pool.map(one, range(count), chunksize=8), start=1):
            tick(done, count)


def _write_episode(folder: Path, seed: int, latents: int, index: int) -> None:
    """The video comes last: it stands for the whole of an episode."""
    one, picture = episode(index, seed, latents)
    video = folder / f"{one.name}.mp4"
    if not video.exists():
        _table(folder / f"{one.name}.keys.csv", KEYS, [_held(k) for k in (*one.keys, (0, 0))])
        _table(folder / f"{one.name}.poses.csv", ("x", "y", "z", "yaw"), [_pose(*p) for p in one.poses])
        partial = video.with_suffix(".partial")
        _video(partial, picture, len(one.poses))
        partial.rename(video)


def _held(keys: Keys) -> list[int]:
    turn, move = keys
    return [int(turn > 0), int(turn < 0), int(move > 0), int(move < 0)]


def _pose(heading: float, x: float, y: float) -> list[float]:
    """World: x east, y north, z up; yaw counts from north to the left."""
    return [x, y, 0.0, -heading]


def _table(path: Path, header: tuple[str, ...], rows: list[list[int]] | list[list[float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _video(path: Path, picture: Callable[[int], Picture], frames: int) -> None:
    with av.open(str(path), "w", format="mp4", container_options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=GRID_RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.options = {"crf": CRF, "preset": "veryfast", "g": "32", "flags": "+bitexact", "threads": "1"}
        stream.codec_context.thread_count = 1
        for index in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(index), "rgb24")))
        container.mux(stream.encode())


def _entry(kind: str) -> dict[str, object]:
    """The key map's entry of one of the two games."""

    def key(column: str, action: str, sign: int) -> dict[str, object]:
        return {"column": column, "action": action, "unit": "key", "sign": sign}

    return {
        "game": f"probe_{kind}",
        "videos": [f"probe_{kind}_*.mp4"],
        "licence": "made by this project",
        "perspective": "fps",
        "log": {
            "file": "{stem}.keys.csv",
            "row": "next",
            "absent": ["pitch", "lateral", "jump"],
            "inputs": [
                key("TURN_RIGHT", "yaw", 1),
                key("TURN_LEFT", "yaw", -1),
                key("FORWARD", "forward", 1),
                key("BACK", "forward", -1),
            ],
        },
        "poses": {
            "file": "{stem}.poses.csv",
            "columns": {"x": "x", "y": "y", "z": "z", "yaw": "yaw"},
            "world": {"up": "z", "handed": "right"},
            "yaw_zero": "y",
            "yaw_positive": "left",
        },
    }

"""Does it hold: how pictures change over a long rollout, chunk by chunk.

Everything is of the pictures alone and needs no weights. Compared are chunks with the first one of the same
video. The character of a third-person view is looked for where games put it, in the lower middle of the
picture (`CHARACTER`); its likeness is one of colours, which holds while it turns around, and no proof that it
is the same one. Source: issue of evaluation; spec/worldplay2.md j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from jobs.evaluate.actions import random_rows
from jobs.evaluate.report import Figure, Film, Line, Number, Report
from jobs.evaluate.starts import Start
from jobs.evaluate.stats import Floats, Interval, interval
from jobs.evaluate.world import Frames, World
from jobs.model import Tick
from jobs.video import video_writer
from schemas.clip import Perspective
from schemas.timeline import GRID_RATE, LATENTS_PER_CHUNK

BINS = (8, 8, 8)
CHARACTER = (slice(0.40, 0.95), slice(0.35, 0.65))
"""Rows and columns, as shares of the picture."""
LATE = 0.25
"""The last quarter of a video stands for its end."""


@dataclass(frozen=True)
class Looks:
    """A video, chunk by chunk: float64 [chunks] each.

    sharpness: variance of the Laplacian of luma. saturation: mean, 0..1. motion: mean absolute change of luma
    from frame to frame, 0..1; exactly 0 where nothing moves. distance: of colours from the first chunk, 0..1
    (total variation of Lab histograms). character: likeness of the character's region to that of the first
    chunk, 0..1; NaN in first person.
    """

    sharpness: Floats
    saturation: Floats
    motion: Floats
    distance: Floats
    character: Floats


@dataclass(frozen=True)
class Protocol:
    """latents: of every video, 320 are 80 seconds. yaw, pitch: degrees per latent."""

    trajectories: int = 8
    latents: int = 320
    yaw: float = 3.0
    pitch: float = 3.0
    seed: int = 0
    films: int = 2


def looks(chunks: Iterator[Frames], third_person: bool) -> Looks:
    """One chunk is held at a time, and the first one's colours."""
    rows: list[tuple[float, ...]] = []
    last: npt.NDArray[np.float32] | None = None
    first: Floats | None = None
    body: Floats | None = None
    for chunk in chunks:
        luma = np.stack([cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY) for rgb in chunk]).astype(np.float32) / 255
        run = luma if last is None else np.concatenate([last[None], luma])
        last = luma[-1]
        colours, region = _colours(chunk), _colours(_character(chunk))
        first, body = (colours, region) if first is None or body is None else (first, body)
        rows.append(
            (
                float(np.mean([cv2.Laplacian(picture, cv2.CV_32F).var() for picture in luma])),
                _saturation(chunk),
                float(np.abs(np.diff(run, axis=0)).mean()) if len(run) > 1 else 0.0,
                _apart(colours, first),
                1 - _apart(region, body) if third_person else float("nan"),
            )
        )
    if not rows:
        raise ValueError("a video without a chunk has no looks")
    return Looks(*(np.array(column) for column in zip(*rows)))


def _saturation(chunk: Frames) -> float:
    """Mean over all pixels of (largest - smallest) / largest channel."""
    most, least = chunk.max(axis=-1).astype(np.float32), chunk.min(axis=-1).astype(np.float32)
    return float(((most - least) / np.maximum(most, 1)).mean())


def _character(chunk: Frames) -> Frames:
    height, width = chunk.shape[1:3]
    rows, columns = (
        slice(round(size * part.start), round(size * part.stop))
        for size, part in zip((height, width), CHARACTER)
    )
    return np.ascontiguousarray(chunk[:, rows, columns])


def _colours(chunk: Frames) -> Floats:
    """Histogram of Lab colours of all pixels of a chunk, sums to 1."""
    flat = np.ascontiguousarray(chunk.reshape(-1, chunk.shape[2], 3))
    lab = cv2.cvtColor(flat, cv2.COLOR_RGB2LAB)
    counts = cv2.calcHist([lab], [0, 1, 2], None, list(BINS), [0, 256, 0, 256, 0, 256])
    shares: Floats = np.asarray(counts, np.float64).ravel() / counts.sum()
    return shares


def _apart(a: Floats, b: Floats) -> float:
    return float(np.abs(a - b).sum() / 2)


# --- a run ------------------------------------------------------------------------------------------------


def run(
    world: World,
    starts: Sequence[Start],
    protocol: Protocol,
    folder: Path,
    tick: Tick,
    settings: dict[str, Any] | None = None,
) -> Report:
    """Play long rollouts of random actions. Films are written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found, names, films = list[Looks](), list[str](), list[Film]()
    chunks = protocol.latents // LATENTS_PER_CHUNK
    for k in range(protocol.trajectories):
        start = starts[k % len(starts)]
        name = f"{start.name}-{k:03d}"
        p = protocol
        rows = random_rows(p.latents, start.perspective, p.yaw, p.pitch, p.seed, "drift", name)
        video = world.play(start.case(name, rows), p.seed)
        played = _ticking(video, tick, k * chunks, p.trajectories * chunks)
        names.append(start.name)
        third = start.perspective is Perspective.THIRD
        if k >= p.films:
            found.append(looks(played, third))
            continue
        path = folder / f"{name}.mp4"
        with video_writer(path) as write:
            found.append(looks(_written(played, write), third))
        films.append(Film(name, path))
    told = {
        **(settings or {}),
        "trajectories": protocol.trajectories,
        "latents": protocol.latents,
        "starts": len(starts),
        "yaw_deg_per_latent": protocol.yaw,
        "pitch_deg_per_latent": protocol.pitch,
        "seed": protocol.seed,
        "character_rows": f"{CHARACTER[0].start}-{CHARACTER[0].stop} of the height",
        "character_columns": f"{CHARACTER[1].start}-{CHARACTER[1].stop} of the width",
    }
    return report(world.name, found, names, films, told)


def summary(one: Looks) -> dict[str, float]:
    """The last quarter of a video: sharpness, saturation and motion as a share of the first chunk's (NaN
    where that had none), and distance and likeness as they are; motion also as it is, over all chunks."""
    late = slice(-max(1, round(LATE * len(one.motion))), None)

    def kept(values: Floats) -> float:
        return float(values[late].mean() / values[0]) if values[0] else float("nan")

    return {
        "sharpness_kept": kept(one.sharpness),
        "saturation_kept": kept(one.saturation),
        "motion": float(one.motion.mean()),
        "motion_kept": kept(one.motion),
        "distance": float(one.distance[late].mean()),
        "character": float(one.character[late].mean()),
    }


BETTER = {"distance": "lower", "character": "higher"}
"""Of the others neither is: kept is best at 1."""


def report(
    world: str, found: Sequence[Looks], starts: Sequence[str], films: Sequence[Film], told: dict[str, Any]
) -> Report:
    ends = [summary(one) for one in found]
    numbers = tuple(
        Number("end of the video", name, interval([e[name] for e in ends], starts), BETTER.get(name, ""))
        for name in ends[0]
        if any(np.isfinite(e[name]) for e in ends)
    )
    figures = tuple(
        Figure(part.name, "seconds", (_line(part.name, found, starts),))
        for part in fields(Looks)
        if any(np.isfinite(getattr(one, part.name)).any() for one in found)
    )
    cases = tuple({"case": k, "start": start, **e} for k, (start, e) in enumerate(zip(starts, ends)))
    return Report("drift", world, told, numbers, figures, tuple(films), cases)


def _line(name: str, found: Sequence[Looks], starts: Sequence[str]) -> Line:
    values = np.stack([getattr(one, name) for one in found], axis=1)
    y: tuple[Interval, ...] = tuple(interval(at, starts) for at in values)
    chunk = LATENTS_PER_CHUNK * 4 / GRID_RATE
    return Line(name, tuple(chunk * (k + 0.5) for k in range(len(y))), y)


def _ticking(chunks: Iterator[Frames], tick: Tick, done: int, of: int) -> Iterator[Frames]:
    for k, chunk in enumerate(chunks):
        yield chunk
        tick("drift", done + k + 1, of)


def _written(chunks: Iterator[Frames], write: Any) -> Iterator[Frames]:
    for chunk in chunks:
        for rgb in chunk:
            write(rgb)
        yield chunk

"""Is it the same room when I come back: actions out, their exact reverse, and the same views compared.

n latents out end at frame F = 4(n-1); the way back shows frame f again in frame 2F - f. Pairs close to the
turn lie close in time and say little of memory, so pairs 2 seconds apart or more are reported on their own.
Recorded loops give the ceiling: what the game itself scores at its own returns.
Source: spec/worldplay2.md j (RevisitBench).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jobs.evaluate.actions import mirrored, random_rows, there_and_back
from jobs.evaluate.loops import Pairs, RecordedLoop
from jobs.evaluate.measures import Measure
from jobs.evaluate.report import Figure, Film, Line, Number, Report
from jobs.evaluate.starts import Start
from jobs.evaluate.stats import Floats, interval
from jobs.evaluate.world import Case, Frames, World
from jobs.model import Tick
from jobs.video import video_writer
from schemas.timeline import GRID_RATE, LATENTS_PER_CHUNK

FAR_S = 2.0
"""Pairs of frames at least so many seconds apart are reported on their own."""
ALL, FAR = "all pairs", "pairs 2 s apart or more"
BATCH = 16
CEILING, PLAYED = "recorded loops (ceiling)", "recorded loops (world)"
Show = Callable[[Frames, Frames], None]
"""Called with first-pass frames and their partners on the way back, in order of the latter."""


@dataclass(frozen=True)
class Trajectory:
    """part: the group that it is reported in. start: whose cases are alike."""

    part: str
    start: str
    case: Case
    pairs: Pairs


@dataclass(frozen=True)
class Protocol:
    """ten, thirty: trajectories of 40 and of 120 latents out, 10 and 30 seconds. yaw, pitch: degrees per
    latent. films: of how many the two passes are written side by side."""

    ten: int = 50
    thirty: int = 150
    yaw: float = 3.0
    pitch: float = 3.0
    seed: int = 0
    films: int = 4

    LENGTHS = (("10 s out", 40), ("30 s out", 120))

    @staticmethod
    def of(trajectories: int, yaw: float, pitch: float, seed: int, films: int) -> Protocol:
        """A quarter of them, but one at least, of ten seconds; as in the 50 + 150 of the bench."""
        ten = max(1, round(trajectories / 4))
        return Protocol(ten, trajectories - ten, yaw, pitch, seed, films)

    @property
    def latents(self) -> int:
        """Of the longest video: there, back, and idle rows up to whole chunks."""
        longest = max(n for (_, n), count in zip(self.LENGTHS, (self.ten, self.thirty)) if count)
        return -(-(2 * longest - 1) // LATENTS_PER_CHUNK) * LATENTS_PER_CHUNK

    def trajectories(self, starts: Sequence[Start]) -> list[Trajectory]:
        """Starts are taken in turn."""
        made: list[Trajectory] = []
        for (part, latents), count in zip(self.LENGTHS, (self.ten, self.thirty)):
            first, later = mirrored(latents)
            for _ in range(count):
                start = starts[len(made) % len(starts)]
                name = f"{start.name}-{len(made):03d}"
                out = random_rows(latents, start.perspective, self.yaw, self.pitch, self.seed, name)
                case = start.case(name, there_and_back(out))
                made.append(Trajectory(part, start.name, case, Pairs(first, later)))
        return made


# --- one video --------------------------------------------------------------------------------------------


def compared(
    chunks: Iterator[Frames], pairs: Pairs, measures: Sequence[Measure], show: Show | None = None
) -> dict[str, Floats]:
    """Scores of each pair, float64 [P], NaN where a dear measure leaves a pair out. A first-pass frame is
    kept until its partner came, and nothing else; playing ends with the last pair.

    Raises ValueError when the video ends before its pairs do.
    """
    scores = {m.name: np.full(len(pairs), np.nan) for m in measures}
    last_use = {int(f): int(g) for f, g in zip(pairs.first, pairs.later)}
    partner = {int(g): (k, int(f)) for k, (f, g) in enumerate(zip(pairs.first, pairs.later))}
    kept: dict[int, Frames] = {}
    waiting: list[tuple[int, Frames, Frames]] = []

    def flush() -> None:
        if not waiting:
            return
        if show:
            show(np.stack([a for _, a, _ in waiting]), np.stack([b for _, _, b in waiting]))
        for measure in measures:
            taken = [(k, a, b) for k, a, b in waiting if k % measure.every == 0]
            if taken:
                left, right = np.stack([a for _, a, _ in taken]), np.stack([b for _, _, b in taken])
                scores[measure.name][[k for k, _, _ in taken]] = measure.of(left, right)
        waiting.clear()

    frame, found = 0, 0
    for chunk in chunks:
        for rgb in chunk:
            if frame in partner:
                k, first = partner[frame]
                waiting.append((k, kept[first], rgb))
                found += 1
                if last_use[first] == frame:
                    del kept[first]
                if len(waiting) == BATCH:
                    flush()
            if frame in last_use:
                kept[frame] = rgb
            frame += 1
        if found == len(pairs):
            break
    flush()
    if found < len(pairs):
        raise ValueError(f"the video has {frame} frames and its last pair needs {int(pairs.later[-1]) + 1}")
    return scores


# --- a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """One trajectory and the scores of its pairs, by measure."""

    trajectory: Trajectory
    scores: dict[str, Floats]

    def mean(self, measure: str, far: bool) -> float:
        """Of its pairs; NaN where there is none."""
        values = self.scores[measure][self.gaps >= FAR_S] if far else self.scores[measure]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else float("nan")

    @property
    def gaps(self) -> Floats:
        """Seconds between the frames of each pair."""
        pairs = self.trajectory.pairs
        return (pairs.later - pairs.first) / GRID_RATE


def run(
    world: World,
    starts: Sequence[Start],
    protocol: Protocol,
    measures: Sequence[Measure],
    loops: Iterable[RecordedLoop],
    folder: Path,
    tick: Tick,
    settings: dict[str, Any] | None = None,
) -> Report:
    """Play and compare everything. loops: taken one at a time. settings: told in the report. Films are
    written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = protocol.trajectories(starts)
    found: list[Scored] = []
    films: list[Film] = []
    tick("revisit", 0, len(planned))
    for k, one in enumerate(planned):
        with ExitStack() as held:
            show = None
            if k < protocol.films:
                path = folder / f"{one.case.name}.mp4"
                write = held.enter_context(video_writer(path))
                show = _beside(write)
                films.append(Film(f"{one.case.name}: first pass (left), return (right)", path))
            scores = compared(world.play(one.case, protocol.seed), one.pairs, measures, show)
        found.append(Scored(one, scores))
        tick("revisit", k + 1, len(planned))
    for loop in loops:
        tick(f"recorded loop {loop.case.name}", 0, 1)
        for part, chunks in (
            (PLAYED, world.play(loop.case, protocol.seed)),
            (CEILING, iter([loop.frames])),
        ):
            trajectory = Trajectory(part, loop.case.name, loop.case, loop.pairs)
            found.append(Scored(trajectory, compared(chunks, loop.pairs, measures)))
    told = {**(settings or {}), **_told(protocol, starts)}
    return report(world.name, found, measures, films, told)


def report(
    world: str,
    found: Sequence[Scored],
    measures: Sequence[Measure],
    films: Sequence[Film],
    told: dict[str, Any],
) -> Report:
    parts = list(dict.fromkeys(one.trajectory.part for one in found))
    numbers = []
    for part in parts:
        own = [one for one in found if one.trajectory.part == part]
        starts = [one.trajectory.start for one in own]
        for measure in measures:
            for name, far in ((ALL, False), (FAR, True)):
                value = interval([one.mean(measure.name, far) for one in own], starts)
                numbers.append(Number(f"{part}, {name}", measure.name, value, measure.better))
    figures = tuple(
        Figure(
            f"{m.name} by time between first pass and return",
            "seconds between the two frames",
            tuple(
                _by_gap(part, [one for one in found if one.trajectory.part == part], m.name) for part in parts
            ),
        )
        for m in measures
    )
    cases = tuple(
        {
            "case": one.trajectory.case.name,
            "part": one.trajectory.part,
            "start": one.trajectory.start,
            "pairs": len(one.trajectory.pairs),
            **{m.name: one.mean(m.name, False) for m in measures},
            **{f"{m.name}_far": one.mean(m.name, True) for m in measures},
        }
        for one in found
    )
    return Report("revisit", world, told, tuple(numbers), figures, tuple(films), cases)


def _by_gap(part: str, own: Sequence[Scored], measure: str) -> Line:
    """Mean over trajectories of what each scores in a bin of two seconds."""
    widest = max(float(one.gaps.max()) for one in own)
    edges = np.arange(0.0, widest + FAR_S, FAR_S)
    x, y = [], []
    for low, high in pairwise(edges):
        values, names = [], []
        for one in own:
            below = one.gaps <= high if high == edges[-1] else one.gaps < high
            inside = (one.gaps >= low) & below & np.isfinite(one.scores[measure])
            if inside.any():
                values.append(float(one.scores[measure][inside].mean()))
                names.append(one.trajectory.start)
        if values:
            x.append(float(low + high) / 2)
            y.append(interval(values, names))
    return Line(part, tuple(x), tuple(y))


def _beside(write: Callable[[Frames], None]) -> Show:
    def show(first: Frames, back: Frames) -> None:
        for a, b in zip(first, back):
            write(np.ascontiguousarray(np.concatenate([a, b], axis=1)))

    return show


def _told(protocol: Protocol, starts: Sequence[Start]) -> dict[str, Any]:
    return {
        "trajectories_10s": protocol.ten,
        "trajectories_30s": protocol.thirty,
        "starts": len(starts),
        "yaw_deg_per_latent": protocol.yaw,
        "pitch_deg_per_latent": protocol.pitch,
        "seed": protocol.seed,
    }

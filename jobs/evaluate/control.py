"""Did it do what I asked: the camera of what was generated, by this project's odometry, against the rows.

Rotation error is in degrees a latent, over latents whose motion is known. Signs are judged of every latent
that was asked to turn or to travel; a latent whose motion the pictures do not tell counts as wrong, for a
world that shows nothing followed nothing. Odometry knows no length of a step, so of travel only the side is
judged. Source: spec/worldplay2.md a.6, j; docs/vo.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from av.video.reformatter import VideoReformatter

from jobs.evaluate.actions import held_turn, random_rows
from jobs.evaluate.report import Figure, Film, Line, Number, Report
from jobs.evaluate.starts import Start
from jobs.evaluate.stats import Floats, interval
from jobs.evaluate.world import Case, EvaluationError, Frames, Rows, World
from jobs.model import Tick
from jobs.overlay import drawn
from jobs.video import video_writer
from pipeline.picture import Picture
from pipeline.pose.focal import Calibration, Camera, find_turns, pool
from pipeline.pose.tracks import WORK_WIDTH, Tracker, Tracks
from pipeline.pose.vo import solve, window_track
from pipeline.pose.vo_fit import Look
from schemas.action import FORWARD, LATERAL, PITCH, YAW
from schemas.pose import turn_between
from schemas.timeline import FRAMES_PER_LATENT, LATENTS_PER_CHUNK, Span

RANDOM, OPPOSITE = "random actions", "left against right"
SIGN_CHANCE, PAIR_CHANCE = 0.5, 0.25
MOST_FOR_FOCAL = 32
"""Videos of held turns that the focal length is measured from: at 8 latents they have 224 turns of one latent
each, and 12 are enough."""


@dataclass(frozen=True)
class Protocol:
    """trajectories: of random rows. pairs: starts that are turned to both sides. latents: of a trajectory;
    turn_latents: of a held turn. yaw, pitch: degrees per latent. focal: fx as a share of the picture's width;
    None measures it from the held turns that were generated. look: what looking up does, where focal is given
    (docs/vo.md)."""

    trajectories: int = 50
    pairs: int = 50
    latents: int = 32
    turn_latents: int = 8
    yaw: float = 3.0
    pitch: float = 3.0
    focal: float | None = None
    look: Look = Look.TILT
    seed: int = 0
    films: int = 4


@dataclass(frozen=True)
class Asked:
    """One video to be made. side: 0 of random rows; -1 and 1 of the two of a pair."""

    case: Case
    start: str
    side: int = 0


@dataclass(frozen=True)
class Seen:
    """What the pictures say of each latent k = 1..T-1.

    turned: float64 [T-1, 2], degrees to the right and up. moved: float64 [T-1, 2], travel to the right and
    ahead, without a length. known: bool [T-1].
    """

    turned: Floats
    moved: Floats
    known: np.ndarray[Any, np.dtype[np.bool_]]


def plan(starts: Sequence[Start], protocol: Protocol) -> list[Asked]:
    """Starts are taken in turn."""
    asked = []
    for k in range(protocol.trajectories):
        start = starts[k % len(starts)]
        name = f"{start.name}-{k:03d}"
        p = protocol
        rows = random_rows(p.latents, start.perspective, p.yaw, p.pitch, p.seed, "control", name)
        asked.append(Asked(start.case(name, rows), start.name))
    for k in range(protocol.pairs):
        start = starts[k % len(starts)]
        for side, word in ((-1, "left"), (1, "right")):
            rows = held_turn(protocol.turn_latents, start.perspective, side * protocol.yaw)
            name = f"{start.name}-{k:03d}-pair"
            # Both sides under one noise: they differ in what was asked alone.
            case = replace(start.case(f"{start.name}-{k:03d}-{word}", rows), noise=name)
            asked.append(Asked(case, start.name, side))
    return asked


# --- the camera of a video --------------------------------------------------------------------------------


def follow(chunks: Iterator[Frames], also: Callable[[Frames], None] | None = None) -> Tracks:
    """Point tracks of a video from latent to latent: of frames 0, 4, 8, ... also: called with every frame.

    From frame to frame there is too little to see: 3 degrees a latent move points by 0.8 % of the width, and
    the focal length needs 1.5 %. On three walks in a painted room the error fell from 1.6, 1.1 and 0.29
    degrees a latent to 1.6, 0.24 and 0.07, at a third of the time.
    Pictures are enlarged to the width that the tracker works at, for its patches and noise are in pixels of
    it: of a 64x128 picture it would follow 32 points at most, and 15 are needed.
    """
    tracker, scaler = Tracker(), VideoReformatter()
    index = 0
    for chunk in chunks:
        for rgb in chunk:
            if also:
                also(rgb)
            if index % FRAMES_PER_LATENT == 0:
                shown = av.VideoFrame.from_ndarray(_enlarged(rgb), "rgb24")
                tracker.see(index // FRAMES_PER_LATENT, Picture(shown, scaler))
            index += 1
    return tracker.tracks()


def _enlarged(rgb: Frames) -> Frames:
    height, width = rgb.shape[:2]
    if width >= WORK_WIDTH:
        return np.ascontiguousarray(rgb)
    # Even sizes, for the colours of a video have half its size.
    size = (WORK_WIDTH, 2 * round(height * WORK_WIDTH / width / 2))
    return np.asarray(cv2.resize(rgb, size, interpolation=cv2.INTER_CUBIC), np.uint8)


def camera_of(
    tracks: Sequence[Tracks], focal: float | None, look: Look = Look.TILT
) -> tuple[Camera, Calibration | None]:
    """The stated camera, or the one that the turns on the spot of these videos show.

    Raises EvaluationError where they show none.
    """
    if focal is not None:
        return Camera(focal, look), None
    found = pool([find_turns(_joined(tracks))] if tracks else [])
    if found.camera is None:
        raise EvaluationError(
            f"what was generated shows {found.n} turns on the spot, too few to tell the focal length: give "
            "--focal (fx as a share of the picture's width, 0.6 for a view of 80 degrees)"
        )
    return found.camera, found


def _joined(tracks: Sequence[Tracks]) -> Tracks:
    """One after the other; no point is followed into the next. A video of 8 latents alone has fewer steps
    than turns are looked for in."""
    return Tracks(
        np.concatenate([t.at for t in tracks]),
        np.concatenate([t.linked for t in tracks]),
        np.concatenate([t.repeat for t in tracks]),
        tracks[0].width,
        tracks[0].height,
    )


def see(tracks: Tracks, camera: Camera) -> Seen:
    """Motion of each latent."""
    steps = solve(tracks, camera)
    known = steps.valid
    turned, moved = np.zeros((len(known), 2)), np.zeros((len(known), 2))
    one, next_one = np.array([0]), np.array([1])
    for k in np.flatnonzero(known):
        turned[k] = turn_between(window_track(steps, Span(int(k), int(k) + 2)), one, next_one)[0]
        moved[k] = steps.direction[k, [0, 2]]
    return Seen(turned, moved, known)


# --- scores -----------------------------------------------------------------------------------------------


def scores(rows: Rows, seen: Seen) -> dict[str, float]:
    """Of one video of random rows; NaN where nothing of it can be judged.

    rotation_error: degrees a latent, over known latents. rotation_error_relative: its sum as a share of the
    sum of what was asked. turn_accuracy, translation_accuracy: share of the axes that were asked to turn, or
    to travel, whose sign is right. known: share of the latents.
    """
    asked = rows[1:, [YAW, PITCH]].astype(np.float64)
    off = np.linalg.norm(seen.turned - asked, axis=1)[seen.known]
    whole = float(np.linalg.norm(asked, axis=1)[seen.known].sum())
    return {
        "rotation_error": float(off.mean()) if len(off) else float("nan"),
        "rotation_error_relative": float(off.sum()) / whole if whole else float("nan"),
        "turn_accuracy": _signs(asked, seen.turned, seen),
        "translation_accuracy": _signs(rows[1:, [LATERAL, FORWARD]].astype(np.float64), seen.moved, seen),
        "known": float(seen.known.mean()),
    }


def _signs(asked: Floats, found: Floats, seen: Seen) -> float:
    wanted = asked != 0
    right = (np.sign(asked) == np.sign(found)) & seen.known[:, None]
    return float(right[wanted].mean()) if wanted.any() else float("nan")


def run(
    world: World,
    starts: Sequence[Start],
    protocol: Protocol,
    folder: Path,
    tick: Tick,
    settings: dict[str, Any] | None = None,
) -> Report:
    """Play everything, find the camera, and judge. Films are written into `folder`.

    Raises EvaluationError where the focal length is neither given nor shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, films, followed = plan(starts, protocol), list[Film](), list[Tracks]()
    filmed = {id(a) for a in [a for a in asked if a.side == 0][: protocol.films // 2]}
    filmed |= {id(a) for a in [a for a in asked if a.side != 0][: protocol.films - protocol.films // 2]}
    for k, one in enumerate(asked):
        tick("playing", k, len(asked))
        chunks = world.play(one.case, protocol.seed)
        if id(one) not in filmed:
            followed.append(follow(chunks))
            continue
        path = folder / f"{one.case.name}.mp4"
        with video_writer(path) as write:
            followed.append(follow(chunks, _with_keys(write, one.case.rows)))
        films.append(Film(one.case.name, path))
    tick("focal length", 0, 1)
    turns = [f for a, f in zip(asked, followed) if a.side][:MOST_FOR_FOCAL]
    camera, calibration = camera_of(turns, protocol.focal, protocol.look)
    found = []
    for k, points in enumerate(followed):
        tick("odometry", k, len(followed))
        found.append(see(points, camera))
    told = {
        **(settings or {}),
        "trajectories": protocol.trajectories,
        "pairs": protocol.pairs,
        "latents": protocol.latents,
        "turn_latents": protocol.turn_latents,
        "starts": len(starts),
        "yaw_deg_per_latent": protocol.yaw,
        "pitch_deg_per_latent": protocol.pitch,
        "seed": protocol.seed,
        "focal_share_of_width": round(camera.focal, 4),
        "focal_from": "given" if calibration is None else f"{calibration.n} turns on the spot",
    }
    return report(world.name, asked, found, films, told)


def report(
    world: str, asked: Sequence[Asked], found: Sequence[Seen], films: Sequence[Film], told: dict[str, Any]
) -> Report:
    pairs = list(zip(asked, found))
    random = [(a, s, scores(a.case.rows, s)) for a, s in pairs if a.side == 0]
    names = [a.start for a, _, _ in random]
    # By chance: what was seen of one video against the rows of the next.
    others = [random[(k + 1) % len(random)][0].case.rows for k in range(len(random))]
    chance = [scores(rows, s) for rows, (_, s, _) in zip(others, random)]
    numbers = []
    for measure, better in (
        ("rotation_error", "lower"),
        ("rotation_error_relative", "lower"),
        ("turn_accuracy", "higher"),
        ("translation_accuracy", "higher"),
        ("known", "higher"),
    ):
        values = [own[measure] for _, _, own in random]
        level = None
        if measure.startswith("rotation_error") and len(random) > 1:
            mean = interval([c[measure] for c in chance], names).mean
            level = mean if np.isfinite(mean) else None
        elif measure.endswith("accuracy"):
            level = SIGN_CHANCE
        numbers.append(Number(RANDOM, measure, interval(values, names), better, level))
    turns = [(a, float(s.turned[s.known, 0].sum())) for a, s in pairs if a.side]
    right = [float(np.sign(yaw) == a.side) for a, yaw in turns]
    both = [min(right[k : k + 2]) for k in range(0, len(right), 2)]
    sides = [a.start for a, _ in turns]
    numbers.append(Number(OPPOSITE, "sign", interval(right, sides), "higher", SIGN_CHANCE))
    numbers.append(Number(OPPOSITE, "both_signs", interval(both, sides[::2]), "higher", PAIR_CHANCE))
    cases = [
        {"case": a.case.name, "start": a.start, **own, "rotation_error_chance": c["rotation_error"]}
        for (a, _, own), c in zip(random, chance)
    ]
    cases += [
        {"case": a.case.name, "start": a.start, "yaw_deg": yaw, "sign": ok}
        for (a, yaw), ok in zip(turns, right)
    ]
    figures = (_over_time(random), _both_sides(pairs))
    return Report("control", world, told, tuple(numbers), figures, tuple(films), tuple(cases))


def _over_time(random: Sequence[tuple[Asked, Seen, dict[str, float]]]) -> Figure:
    """Does it obey as long as it plays."""
    names = [a.start for a, _, _ in random]
    latents = min((len(s.known) for _, s, _ in random), default=0)
    x, y = [], []
    for first in range(0, latents, LATENTS_PER_CHUNK):
        part = slice(first, min(first + LATENTS_PER_CHUNK, latents))
        values = []
        for a, s, _ in random:
            wanted = a.case.rows[1:, [YAW, PITCH]][part]
            off = np.linalg.norm(s.turned[part] - wanted, axis=1)[s.known[part]]
            values.append(float(off.mean()) if len(off) else float("nan"))
        x.append((part.start + part.stop) / 2 + 0.5)
        y.append(interval(values, names))
    return Figure("rotation error, degrees a latent", "latent", (Line(RANDOM, tuple(x), tuple(y)),))


def _both_sides(pairs: Sequence[tuple[Asked, Seen]]) -> Figure:
    """Yaw since the start, of both sides; what is not known adds nothing."""
    lines = []
    for side, word in ((-1, "left"), (1, "right")):
        own = [(a, s) for a, s in pairs if a.side == side]
        if own:
            yaw = [np.cumsum(np.where(s.known, s.turned[:, 0], 0.0)) for _, s in own]
            y = tuple(interval(at, [a.start for a, _ in own]) for at in np.stack(yaw, axis=1))
            lines.append(Line(word, tuple(float(k + 1) for k in range(len(y))), y))
    return Figure("yaw since the start, degrees: left against right", "latent", tuple(lines))


def _with_keys(write: Callable[[Frames], None], rows: Rows) -> Callable[[Frames], None]:
    frames = count()

    def also(rgb: Frames) -> None:
        latent = -(-next(frames) // FRAMES_PER_LATENT)
        write(drawn(rgb, rows[latent], f"latent {latent}"))

    return also

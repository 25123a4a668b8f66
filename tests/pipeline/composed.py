"""Recordings composed of pieces of the footage pack, with what is known of them: cuts, flashes, fast turns.

A piece is a stretch of a pack clip. Flashes are drawn into it; a fast turn is a turn of the clip with frames
left out (7 degrees a frame, every second, is 14). Encoded with libx264 at crf 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import av
import cv2
import numpy as np

SIZE = (320, 180)
RATE = 30
# Clip, frames that may be taken from it. nav08 and nav05 turn by keys; loop03 by the mouse.
CLIPS = {
    "nav01_mouse_map01": (40, 1500),
    "nav02_mouse_map02": (40, 2000),
    "nav04_mouse_mywayhome": (30, 1300),
    "nav05_keys_deathmatch": (30, 700),
    "nav06_keys_map05": (30, 1150),
    "nav11_lowsens_e1m2": (30, 900),
    "nav12_miniworld_fourrooms": (110, 780),
    "loop03_turn180_deathmatch_offpath": (80, 950),
    "event07_fight_defend_center": (20, 740),
}
# Frames of nav08 in which it turns by 7 degrees a frame, at least 100 degrees.
TURNING = ("nav08_runkeys_map03", "d_yaw_right_deg", 7.0, 14)
FLASHES = (((255, 255, 255), 1.0), ((255, 250, 230), 0.85), ((255, 0, 0), 0.5), ((255, 0, 0), 0.8))


@dataclass
class Composed:
    """A recording on disk and its truth; spans are half-open."""

    path: Path
    frames: int = 0
    cuts: list[int] = field(default_factory=list)
    flashes: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    menus: list[tuple[int, int]] = field(default_factory=list)


def pictures(path: Path, start: int, stop: int) -> list[np.ndarray]:
    """Frames [start, stop) of a clip, uint8 [180, 320, 3] RGB; another shape is cut to fit."""
    out = []
    with av.open(str(path)) as container:
        for frame in islice(container.decode(video=0), start, stop):
            picture = frame.to_ndarray(format="rgb24")
            height, width = picture.shape[:2]
            wide = min(height, width * SIZE[1] // SIZE[0])
            top = (height - wide) // 2
            out.append(cv2.resize(picture[top : top + wide], SIZE, interpolation=cv2.INTER_AREA))
    return out


def turning(footage: Path) -> list[tuple[int, int]]:
    """Spans of frames over which nav08 turns fast, the same way, for at least 14 steps."""
    name, column, least, steps = TURNING
    lines = (footage / f"{name}.truth.csv").read_text().splitlines()
    place = lines[0].split(",").index(column)
    turn = np.array([float(line.split(",")[place] or 0) for line in lines[1:]])
    fast = (turn >= least) * 1 - (turn <= -least) * 1
    edges = np.flatnonzero(np.diff(np.concatenate(([0], fast, [0]))))
    return [(int(a), int(b)) for a, b in pairwise(edges) if fast[a] and b - a >= steps]


def compose(footage: Path, folder: Path, seed: int, pieces: int) -> Composed:
    """A recording of this many pieces with hard cuts between them."""
    rng = np.random.default_rng(seed)
    made = Composed(folder / f"composed{seed:02d}.mp4")
    turns = turning(footage)
    with av.open(str(made.path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "16", "preset": "veryfast", "g": "48"}
        stream.codec_context.thread_count = 1
        last = ""
        for piece in range(pieces):
            kind = ("turn", "flash", "menu", "flash")[piece % 4]
            name = str(rng.choice([n for n in CLIPS if n != last]))
            if kind == "turn":
                start, stop = turns[int(rng.integers(len(turns)))]
                shown = _turn(made, footage, start, stop, int(rng.integers(1, 4)))
                name = TURNING[0]
            elif kind == "menu":
                name = "bad04_menu"
                shown = pictures(footage / "bad04_menu.mp4", 0, int(rng.integers(60, 120)))
                made.menus.append((made.frames + 21, made.frames + len(shown)))
            else:
                low, high = CLIPS[name]
                start = int(rng.integers(low, high - 70))
                shown = pictures(footage / f"{name}.mp4", start, start + int(rng.integers(45, 70)))
                _flash(made, shown, rng)
            if piece:
                made.cuts.append(made.frames)
            for picture in shown:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame.pts, frame.time_base = made.frames, Fraction(1, RATE)
                made.frames += 1
                container.mux(stream.encode(frame))
            last = name
        container.mux(stream.encode())
    return made


def _turn(made: Composed, footage: Path, start: int, stop: int, stride: int) -> list[np.ndarray]:
    """A turn at 7, 14 or 21 degrees a frame, with the frames around it."""
    low, high = max(0, start - 24), min(1200, stop + 24)
    clip = pictures(footage / f"{TURNING[0]}.mp4", low, high)
    inside = range(start - low, stop - low, stride)
    first = made.frames + start - low
    made.turns.append((first, first + len(inside)))
    return clip[: start - low] + [clip[k] for k in inside] + clip[stop - low :]


def _flash(made: Composed, shown: list[np.ndarray], rng: np.random.Generator) -> None:
    colour, strength = FLASHES[int(rng.integers(len(FLASHES)))]
    start, long = int(rng.integers(12, len(shown) - 15)), int(rng.integers(1, 4))
    for k in range(start, start + long):
        over = np.full_like(shown[k], colour)
        shown[k] = cv2.addWeighted(shown[k], 1.0 - strength, over, strength, 0.0)
    made.flashes.append((made.frames + start, made.frames + start + long))

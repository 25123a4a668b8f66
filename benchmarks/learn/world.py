"""The probe world: a panorama and a room, where a revisit is exact and hidden columns are known.

A column of the picture is a fixed angle (a cylinder of view), so turning shifts the picture by whole pixels:
the same heading and place give the same picture, bit for bit. Each episode has its own panorama, or room, at
random: nothing but memory can tell what was there.
Angles in degrees, right positive; pictures are uint8 [128, 256, 3], of 90 degrees.
Source: issue "the trainer", table "what it must show".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import cv2
import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH = 128, 256
VIEW = 90.0
"""Degrees that a picture shows."""
COLUMNS = round(WIDTH * 360 / VIEW)
"""Columns of a whole turn."""
TURN = 11.25
"""Degrees of a latent (four frames) while a turn key is held: 32 columns, one column of tokens at 64x128."""
STEP = 0.25
"""Length of a latent's walk while a move key is held."""
AWAY = 0.85
"""Share of panoramas whose player goes far out first."""
SIDE = 6.0
"""Side of the room."""
MARGIN = 1.2
"""Nearest to a wall that a player comes."""

Picture = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class World(Protocol):
    def picture(self, heading: float, x: float, y: float) -> Picture:
        """What is seen at a place, looking along `heading`."""


def _colour(rng: np.random.Generator) -> Floats:
    """A saturated colour: hues far apart are told apart whatever the codec loses."""
    hsv = np.array([[[rng.uniform(0, 360), rng.uniform(0.55, 1.0), rng.uniform(0.45, 1.0)]]], np.float32)
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)[0, 0] * 255, np.float32)


def _strip(rng: np.random.Generator, rows: int, columns: int, widths: tuple[float, float]) -> Floats:
    """[rows, columns, 3], closed around: panels of random width and colour, most with a patch on them.

    widths: least and most of a panel, in columns.
    """
    out = np.zeros((rows, columns, 3), np.float32)
    edges = [0]
    while columns - edges[-1] > widths[1] + widths[0]:
        edges.append(edges[-1] + int(rng.uniform(*widths)))
    edges += [columns] if columns - edges[-1] <= widths[1] else [(edges[-1] + columns) // 2, columns]
    for left, right in itertools.pairwise(edges):
        out[:, left:right] = _colour(rng)
        if rng.random() < 0.5:
            height, width = int(rows * rng.uniform(0.3, 0.7)), int((right - left) * rng.uniform(0.4, 0.8))
            top = int(rng.uniform(0, rows - height))
            at = left + int(rng.uniform(0, right - left - width))
            out[top : top + height, at : at + width] = _colour(rng)
    return out


def _backdrop(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Colours of sky and ground, dark enough for the panels to stand out."""
    return _colour(rng) * 0.5 + 60.0, _colour(rng) * 0.35 + 20.0


def _soft(picture: Floats, sigma: float) -> Floats:
    """Blurred, closed around in columns: edges of one pixel are nothing that four components can hold."""
    pad = 16
    wide = np.concatenate([picture[:, -pad:], picture, picture[:, :pad]], axis=1)
    return np.asarray(cv2.GaussianBlur(wide, (0, 0), sigma)[:, pad:-pad], np.float32)


@dataclass(frozen=True)
class Panorama:
    """A cylinder of panels under a sky; only the heading counts."""

    texture: Picture  # [HEIGHT, COLUMNS, 3]

    @staticmethod
    def random(rng: np.random.Generator) -> Panorama:
        sky, ground = _backdrop(rng)
        out = np.empty((HEIGHT, COLUMNS, 3), np.float32)
        horizon = HEIGHT // 2
        out[:horizon], out[horizon:] = sky, ground
        top, bottom = HEIGHT // 5, HEIGHT * 4 // 5
        out[top:bottom] = _strip(rng, bottom - top, COLUMNS, (48, 120))
        return Panorama(_soft(out, 5.0).round().astype(np.uint8))

    def picture(self, heading: float, x: float, y: float) -> Picture:
        first = round(heading / 360 * COLUMNS) - WIDTH // 2
        return np.take(self.texture, np.arange(first, first + WIDTH) % COLUMNS, axis=1)


@dataclass(frozen=True)
class Room:
    """Four walls of panels around a square, seen by a ray for each column."""

    walls: Floats  # [64, 4 * 128, 3], the four walls one after the other
    sky: Floats
    ground: Floats

    @staticmethod
    def random(rng: np.random.Generator) -> Room:
        sky, ground = _backdrop(rng)
        return Room(_soft(_strip(rng, 64, 512, (32, 72)), 2.5), sky, ground)

    def picture(self, heading: float, x: float, y: float) -> Picture:
        """x to the east, y to the north, from the south-west corner; heading 0 looks north."""
        angles = np.radians(heading + (np.arange(WIDTH) + 0.5 - WIDTH / 2) * VIEW / WIDTH)
        east, north = np.sin(angles), np.cos(angles)
        with np.errstate(divide="ignore"):
            to_x = np.where(east > 0, SIDE - x, -x) / east
            to_y = np.where(north > 0, SIDE - y, -y) / north
        on_x = to_x < to_y
        distance = np.minimum(to_x, to_y)
        along = np.where(on_x, y + distance * north, x + distance * east) / SIDE
        wall = np.where(on_x, np.where(east > 0, 1, 3), np.where(north > 0, 0, 2))
        u = (wall * 128 + along * 127).astype(np.float32)
        half = 0.9 * HEIGHT / distance  # of the wall's height in the picture
        rows = (np.arange(HEIGHT) + 0.5 - HEIGHT / 2)[:, None]
        v = ((rows / half + 1) * 31.5).astype(np.float32)
        seen = cv2.remap(
            self.walls,
            np.broadcast_to(u, v.shape).copy(),
            v,
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REPLICATE,
        )
        empty = np.where((rows < 0)[..., None], self.sky, self.ground)
        # A wall's edge covers a pixel by its share, so that walking moves it smoothly.
        cover = np.clip(half - np.abs(rows) + 0.5, 0, 1)[..., None]
        return np.asarray((seen * cover + empty * (1 - cover)).round(), np.uint8)


# --- what a player does -----------------------------------------------------------------------------------

IDLE, RIGHT, LEFT, FORWARD, BACK = (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)
Keys = tuple[int, int]
"""Turn (right +1, left -1) and move (forward +1, back -1) that are held during a latent."""


def turns(rng: np.random.Generator, latents: int) -> list[Keys]:
    """Keys of latents 1..latents-1 in a panorama. They change between pairs of latents: of a pair, memory is
    told the action of the first.

    Most go far out, 12 to 18 latents (135 to 202 degrees), which leaves the first view behind, and look to
    and fro there: what a way back shows is neither in the sink nor in the last latent, but was seen; what a
    way out shows was not, the placebo. The others glance about from the first view.
    """
    out: list[Keys] = [IDLE] * (1 + 2 * int(rng.integers(0, 2)))
    if rng.random() < AWAY:
        side, other = (RIGHT, LEFT) if rng.random() < 0.5 else (LEFT, RIGHT)
        out += [side] * 2 * int(rng.integers(6, 10))
        while len(out) < latents - 1:
            side, other = other, side
            out += [IDLE] * 2 * int(rng.random() < 0.2) + [side] * 2 * int(rng.integers(3, 7))
    while len(out) < latents - 1:
        keys = (RIGHT, LEFT, IDLE)[int(rng.choice(3, p=[0.42, 0.42, 0.16]))]
        out += [keys] * 2 * int(rng.integers(1, 3) if keys is IDLE else rng.integers(1, 6))
    return out[: latents - 1]


def walks(rng: np.random.Generator, latents: int, start: tuple[float, float, float]) -> list[Keys]:
    """Keys of latents 1..latents-1 in a room from (heading, x, y): turns and walks that no wall ends."""
    out: list[Keys] = [IDLE]
    heading, x, y = start
    while len(out) < latents - 1:
        keys = (RIGHT, LEFT, FORWARD, BACK, IDLE)[int(rng.choice(5, p=[0.3, 0.3, 0.2, 0.12, 0.08]))]
        for _ in range(int(rng.integers(1, 2) if keys is IDLE else rng.integers(1, 5))):
            heading, to_x, to_y = moved(heading, x, y, keys, 2.0)
            if not (MARGIN <= to_x <= SIDE - MARGIN and MARGIN <= to_y <= SIDE - MARGIN):
                break
            x, y = to_x, to_y
            out += [keys, keys]
    return out[: latents - 1]


def moved(heading: float, x: float, y: float, keys: Keys, share: float = 1.0) -> tuple[float, float, float]:
    """Where `share` of a latent leads. Turn and move are never held together."""
    turn, move = keys
    angle = np.radians(heading)
    far = STEP * move * share
    return heading + TURN * turn * share, x + far * float(np.sin(angle)), y + far * float(np.cos(angle))

"""Worlds built by hand, in place of a trained model: what they remember and obey is known exactly.

`Panorama` shows a part of a wide picture that it imagines where it has not been, and remembers or does not.
Its place is a whole number of pixels, so that a way back is exact to the pixel. `Room` is a box with painted
walls, seen by a true camera, for measures that look for a motion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

import cv2
import numpy as np
import numpy.typing as npt

from jobs.evaluate.actions import random_rows
from jobs.evaluate.starts import Start
from jobs.evaluate.stats import keyed
from jobs.evaluate.world import Case, Frames, Rows, World
from schemas.action import FORWARD, LATERAL, PITCH, YAW
from schemas.clip import Perspective
from schemas.timeline import FRAMES_PER_LATENT, LATENTS_PER_CHUNK

Picture = npt.NDArray[np.uint8]


def texture(height: int, width: int, key: str, grain: int = 6) -> Picture:
    """Smooth coloured blobs that wrap around, uint8 [H, W, 3]."""
    coarse = keyed(0, "texture", key).uniform(0, 255, (height // grain, width // grain, 3)).astype(np.float32)
    wide = np.concatenate([coarse[:, -2:], coarse, coarse[:, :2]], axis=1)
    wide = np.concatenate([wide[-2:], wide, wide[:2]], axis=0)
    scale = height / coarse.shape[0], width / coarse.shape[1]
    size = (round(wide.shape[1] * scale[1]), round(wide.shape[0] * scale[0]))
    big = cv2.resize(wide, size, interpolation=cv2.INTER_CUBIC)
    top, left = round(2 * scale[0]), round(2 * scale[1])
    return np.clip(big[top : top + height, left : left + width], 0, 255).astype(np.uint8)


def starts(count: int, height: int = 32, width: int = 48) -> tuple[Start, ...]:
    return tuple(
        Start(f"start{k}", texture(height, width, f"start{k}"), Perspective.FIRST, "The scene is: a room.")
        for k in range(count)
    )


def by_chunk(frames: Iterator[Picture]) -> Iterator[Frames]:
    """13 frames, then 16 each."""
    held: list[Picture] = []
    size = FRAMES_PER_LATENT * LATENTS_PER_CHUNK - FRAMES_PER_LATENT + 1
    for frame in frames:
        held.append(frame)
        if len(held) == size:
            yield np.stack(held)
            held, size = [], FRAMES_PER_LATENT * LATENTS_PER_CHUNK


# --- memory -----------------------------------------------------------------------------------------------


class Memory(Enum):
    """What a world knows of where it has been, beyond the picture that it shows now."""

    OWN = "own"
    ZEROED = "zeroed"  # nothing: what leaves the picture is imagined anew in every chunk
    SWAPPED = "swapped"  # that of another case


@dataclass(frozen=True)
class Panorama:
    """A picture sliding over a canvas: 1 pixel a frame and degree of yaw or pitch, and for every step."""

    memory: Memory = Memory.OWN
    canvas: tuple[int, int] = (480, 960)

    @property
    def name(self) -> str:
        return f"panorama with {self.memory.value} memory"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        return by_chunk(self._frames(case, seed))

    def _frames(self, case: Case, seed: int) -> Iterator[Picture]:
        height, width = case.image.shape[:2]
        rows, columns = np.arange(height), np.arange(width)
        canvas = texture(*self.canvas, f"{seed}-{case.name}")
        canvas[:height, :width] = case.image
        seen = np.zeros(self.canvas, bool)
        y = x = 0
        for latent, (dy, dx) in enumerate(places(case.rows)):
            if latent and latent % LATENTS_PER_CHUNK == 0 and self.memory is not Memory.OWN:
                key = f"{latent}" if self.memory is Memory.ZEROED else "of another"
                gone = seen.copy()
                gone[np.ix_((y + rows) % self.canvas[0], (x + columns) % self.canvas[1])] = False
                canvas[gone] = texture(*self.canvas, f"{seed}-{case.name}-{key}")[gone]
            for _ in range(FRAMES_PER_LATENT if latent else 1):
                y, x = y + dy, x + dx
                view = np.ix_((y + rows) % self.canvas[0], (x + columns) % self.canvas[1])
                seen[view] = True
                yield canvas[view]


def places(rows: Rows) -> npt.NDArray[np.int64]:
    """Pixels (down, right) a frame of each latent; linear in the rows, so that reversed rows undo them."""
    down = -rows[:, PITCH] - rows[:, FORWARD]
    return np.rint(np.stack([down, rows[:, YAW] + rows[:, LATERAL]], axis=1)).astype(np.int64)


@dataclass(frozen=True)
class Frozen:
    """Shows the start and nothing else."""

    name: str = "frozen"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        return by_chunk(case.image for _ in range(frames_of(case)))


@dataclass(frozen=True)
class Noise:
    """Every picture is drawn anew."""

    name: str = "noise"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        draw = keyed(seed, "noise", case.name)
        shape = case.image.shape
        return by_chunk(draw.integers(0, 256, shape, np.uint8) for _ in range(frames_of(case)))


def frames_of(case: Case) -> int:
    return FRAMES_PER_LATENT * len(case.rows) - FRAMES_PER_LATENT + 1


@dataclass(frozen=True)
class Corrupted:
    """Another world's pictures, changed. change: (picture, frame, generator of the frame) -> picture."""

    world: World
    change: Callable[[Picture, int, np.random.Generator], Picture]
    name: str = "corrupted"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        frame = 0
        for chunk in self.world.play(case, seed):
            changed = []
            for rgb in chunk:
                draw = keyed(seed, "corrupt", case.name, frame)
                changed.append(self.change(rgb, frame, draw))
                frame += 1
            yield np.stack(changed)


@dataclass(frozen=True)
class Deaf:
    """Another world that hears the rows of somebody else: random ones, whatever it is asked for."""

    world: World
    name: str = "shuffled actions"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        rows = random_rows(len(case.rows), case.perspective, 3.0, 3.0, seed, "somebody else", case.name)
        return self.world.play(replace(case, rows=rows), seed)


@dataclass(frozen=True)
class Mishearing:
    """Another world that turns and walks to the other side in a share of latents; 1 is all of them. The
    latents of a smaller share are among those of a larger one."""

    world: World
    share: float
    name: str = "mishearing"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        rows = case.rows.copy()
        wrong = keyed(seed, "misheard", case.name).random(len(rows)) < self.share
        rows[np.ix_(wrong, [PITCH, YAW, FORWARD, LATERAL])] *= -1
        return self.world.play(replace(case, rows=rows), seed)


@dataclass(frozen=True)
class Stuttering:
    """Another world at a lower rate: every picture is held for `hold` frames."""

    world: World
    hold: int
    name: str = "stuttering"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        frames = (rgb for chunk in self.world.play(case, seed) for rgb in chunk)
        shown = (rgb for k, rgb in enumerate(frames) if k % self.hold == 0)
        held = (rgb for rgb in shown for _ in range(self.hold))
        return by_chunk(islice(held, frames_of(case)))


# --- a room that a camera moves in ------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A box of 12 x 1.6 x 12 with painted walls: low, for where only a far wall is seen odometry cannot tell
    a step to the side from a turn. The way back of a row undoes it: half its turn, its step, and the other
    half. focal: of the camera, as a share of the width. step: of one latent of walking."""

    focal: float = 0.6
    step: float = 0.15
    size: tuple[float, float, float] = (12.0, 1.6, 12.0)
    name: str = "room"
    walls: dict[str, list[Picture]] = field(default_factory=dict, compare=False)

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        return by_chunk(self._frames(case))

    def _frames(self, case: Case) -> Iterator[Picture]:
        height, width = case.image.shape[:2]
        walls = (
            [texture(512, 1024, f"wall{k}", 16) for k in range(6)] if not self.walls else self.walls["all"]
        )
        self.walls["all"] = walls
        u = (np.arange(width) - (width - 1) / 2) / (self.focal * width)
        v = (np.arange(height) - (height - 1) / 2) / (self.focal * width)
        rays = np.stack([*np.meshgrid(u, v), np.ones((height, width))], axis=-1).reshape(-1, 3)
        yaw = pitch = 0.0
        at = np.array([0.4, 0.1, -0.3])
        for latent, row in enumerate(case.rows):
            for _ in range(FRAMES_PER_LATENT if latent else 1):
                part = row / FRAMES_PER_LATENT
                yaw, pitch = yaw + part[YAW] / 2, pitch + part[PITCH] / 2
                turn = np.radians(yaw)
                ahead = np.array([np.sin(turn), 0.0, np.cos(turn)])
                side = np.array([np.cos(turn), 0.0, -np.sin(turn)])
                at = at + self.step * (part[FORWARD] * ahead + part[LATERAL] * side)
                yaw, pitch = yaw + part[YAW] / 2, pitch + part[PITCH] / 2
                yield self._seen(rays @ _turned(yaw, pitch).T, at, walls).reshape(height, width, 3)

    def _seen(
        self, rays: npt.NDArray[np.float64], at: npt.NDArray[np.float64], walls: list[Picture]
    ) -> Picture:
        """x right, y down, z ahead. The nearest wall that a ray meets from inside."""
        half = np.array(self.size) / 2
        with np.errstate(divide="ignore"):
            far = (np.sign(rays) * half - at) / rays
        axis = far.argmin(axis=1)
        hit = at + rays * far[np.arange(len(rays)), axis][:, None]
        out = np.zeros((len(rays), 3), np.uint8)
        for k in range(3):
            others = [i for i in range(3) if i != k]
            for sign in (0, 1):
                mine = (axis == k) & ((rays[:, k] > 0) == bool(sign))
                if not mine.any():
                    continue
                wall = walls[2 * k + sign]
                share = hit[mine][:, others] / (2 * half[others]) + 0.5
                to = (share * (np.array(wall.shape[1::-1]) - 1)).astype(np.float32)
                found = cv2.remap(wall, to[None, :, 0].copy(), to[None, :, 1].copy(), cv2.INTER_LINEAR)
                out[mine] = found.reshape(-1, 3)
        return out


def _turned(yaw: float, pitch: float) -> npt.NDArray[np.float64]:
    """Camera-to-world: pitch up, then yaw right."""
    a, b = np.radians(yaw), np.radians(pitch)
    about_y = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
    about_x = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    return np.asarray(about_y @ about_x)

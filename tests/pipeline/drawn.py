"""Drawn moving pictures in several styles, for tests of what is measured of pictures: no encoder in
between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import av
import cv2
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from pipeline.picture import Picture
from pipeline.quality.looks import Look, Looks

Image = npt.NDArray[np.uint8]
"""uint8 BGR [H, W, 3]."""
WIDTH, HEIGHT = 640, 360
WORLD = 1600
"""Width of a drawn world; the view pans across it."""


def flat_shapes(seed: int = 3) -> Image:
    """Cel-shaded: filled shapes with antialiased outlines on a plain ground, drawn at four times the size."""
    rng = np.random.default_rng(seed)
    world = np.full((HEIGHT * 4, WORLD * 4, 3), (200, 170, 120), np.uint8)
    for _ in range(120):
        x, y = int(rng.integers(0, WORLD * 4)), int(rng.integers(0, HEIGHT * 4))
        size, colour = int(rng.integers(80, 360)), tuple(int(c) for c in rng.integers(20, 245, 3))
        corners = np.array([(x, y), (x + 2 * size, y + size // 2), (x + size // 2, y + 2 * size)])
        if rng.random() < 0.5:
            cv2.circle(world, (x, y), size, colour, -1)
        else:
            cv2.fillConvexPoly(world, corners, colour)
    return np.asarray(cv2.resize(world, (WORLD, HEIGHT), interpolation=cv2.INTER_AREA), np.uint8)


def foliage(seed: int = 5) -> Image:
    """Texture everywhere: many small leaves, each of its own green."""
    rng = np.random.default_rng(seed)
    world = np.full((HEIGHT * 2, WORLD * 2, 3), (30, 60, 40), np.uint8)
    for _ in range(60_000):
        at = int(rng.integers(0, WORLD * 2)), int(rng.integers(0, HEIGHT * 2))
        green = int(rng.integers(40, 230))
        axes, turn = (int(rng.integers(3, 10)), int(rng.integers(2, 5))), float(rng.integers(0, 180))
        cv2.ellipse(world, at, axes, turn, 0, 360, (green // 3, green, green // 2), -1)
    return np.asarray(cv2.resize(world, (WORLD, HEIGHT), interpolation=cv2.INTER_AREA), np.uint8)


def pixels(seed: int = 7) -> Image:
    """Pixel art: 4x4 px texels without any smoothing."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 6, (HEIGHT // 24, WORLD // 24 + 1))
    sprites = rng.integers(30, 225, (6, 6, 6, 3)).astype(np.uint8)
    texels = np.concatenate([np.concatenate([sprites[t] for t in row], axis=1) for row in tiles], axis=0)
    return np.asarray(texels.repeat(4, axis=0).repeat(4, axis=1)[:HEIGHT, :WORLD], np.uint8)


def blur(picture: Image, sigma: float) -> Image:
    return np.asarray(cv2.GaussianBlur(picture, (0, 0), sigma), np.uint8)


def dimmed(picture: Image, mean: float) -> Image:
    """The same picture at a mean level of `mean`, as a night is."""
    return np.asarray(np.rint(picture * (mean / picture.mean())).clip(0, 255), np.uint8)


def grain(picture: Image, sigma: float, seed: int) -> Image:
    noise = np.random.default_rng(seed).normal(0, sigma, picture.shape)
    return np.asarray(np.rint(picture + noise).clip(0, 255), np.uint8)


def pan(world: Image, frames: int = 40, step: int = 7) -> Iterator[Image]:
    """Views of the world, `step` px further each frame, there and back."""
    room = world.shape[1] - WIDTH
    for k in range(frames):
        x = abs((k * step + room) % (2 * room) - room)
        yield np.ascontiguousarray(world[:, x : x + WIDTH])


def looked(
    views: Iterator[Image], paint: Callable[[Image, int], Image] | None = None, look: Look | None = None
) -> Looks:
    """Looks of drawn views. paint: what is done to each, given its index."""
    look, scaler = look or Look(), VideoReformatter()
    for k, view in enumerate(views):
        shown = paint(view, k) if paint else view
        frame = av.VideoFrame.from_ndarray(shown, format="bgr24").reformat(format="yuv420p")
        look.see(k, Picture(frame, scaler))
    return look.looks()

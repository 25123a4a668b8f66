"""What a game draws over its world, or instead of it: menus, loading cards, flashes."""

from __future__ import annotations

from typing import Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
MenuStyle = Literal["dimmed", "boxed", "full"]

MENU_STYLES: Final[tuple[MenuStyle, ...]] = ("dimmed", "boxed", "full")
ITEMS: Final = ("RESUME", "OPTIONS", "SAVE GAME", "LOAD GAME", "QUIT TO TITLE")
FONT: Final = cv2.FONT_HERSHEY_SIMPLEX


def menu(world: Picture, style: MenuStyle, cursor: tuple[float, float]) -> Picture:
    """A pause menu over (H, W, 3) RGB; cursor: its place as shares of width and height. The row beside it is
    marked."""
    height, width = world.shape[:2]
    shown = world.copy()
    left, right = round(0.3 * width), round(0.7 * width)
    if style == "dimmed":
        shown = (shown * 0.4).astype(np.uint8)
    elif style == "boxed":
        cv2.rectangle(shown, (left, round(0.1 * height)), (right, round(0.92 * height)), (40, 44, 60), -1)
        cv2.rectangle(shown, (left, round(0.1 * height)), (right, round(0.92 * height)), (180, 180, 190), 2)
    else:
        shown[:] = (52, 46, 38)
        for column in range(8):
            for row in range(4):
                x, y = round((0.08 + 0.105 * column) * width), round((0.55 + 0.1 * row) * height)
                size = (x + round(0.09 * width), y + round(0.085 * height))
                cv2.rectangle(shown, (x, y), size, (88, 80, 66), -1)
    scale = height / 360
    _text(shown, "PAUSED", (left + 20 * scale, 0.22 * height), 1.1 * scale, (230, 200, 90))
    chosen = int(np.clip((cursor[1] - 0.3) / 0.12, 0, len(ITEMS) - 1))
    for i, item in enumerate(ITEMS):
        colour = (250, 250, 250) if i == chosen else (150, 150, 150)
        _text(shown, item, (left + 24 * scale, (0.36 + 0.12 * i) * height), 0.7 * scale, colour)
    x, y = round(cursor[0] * width), round(cursor[1] * height)
    tip = np.array([(x, y), (x, y + 16 * scale), (x + 11 * scale, y + 11 * scale)], np.int32)
    cv2.fillConvexPoly(shown, tip, (255, 255, 255))
    return shown


def loading(size: tuple[int, int], level: str, done: float) -> Picture:
    """A loading card (H, W, 3) for size (width, height): a name and a thin bar that fills."""
    width, height = size
    card = np.full((height, width, 3), (18, 20, 24), np.uint8)
    scale = height / 360
    _text(card, f"LOADING {level}", (0.28 * width, 0.5 * height), 1.0 * scale, (200, 200, 200))
    end = (round((0.28 + 0.4 * done) * width), round(0.6 * height) + max(1, round(2 * scale)))
    cv2.rectangle(card, (round(0.28 * width), round(0.6 * height)), end, (200, 200, 200), -1)
    return card


def flash(world: Picture, colour: tuple[int, int, int], strength: float) -> Picture:
    """The world under a colour: an explosion at strength 0.9 of white, damage at 0.45 of red."""
    over = np.full_like(world, colour)
    return np.asarray(cv2.addWeighted(world, 1.0 - strength, over, strength, 0.0), np.uint8)


def _text(
    picture: Picture, text: str, at: tuple[float, float], scale: float, colour: tuple[int, int, int]
) -> None:
    where = (round(at[0]), round(at[1]))
    cv2.putText(picture, text, where, FONT, scale, colour, max(1, round(2 * scale)), cv2.LINE_AA)

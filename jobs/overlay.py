"""The controls of a frame, drawn onto it: keys lit while they are held, and a line of text."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

from schemas.action import FORWARD, JUMP, LATERAL, PITCH, YAW

LEAST_HEIGHT = 256
"""Smaller pictures are enlarged by whole pixels: keys of a 64-pixel picture could not be read."""
_LIT, _DARK, _EDGE = (255, 196, 64), (24, 24, 24), (230, 230, 230)
# Label, column and row in units of a key, axis of the action row, sign that lights it.
_KEYS = (
    ("W", 1.0, 0.0, FORWARD, 1),
    ("A", 0.0, 1.0, LATERAL, -1),
    ("S", 1.0, 1.0, FORWARD, -1),
    ("D", 2.0, 1.0, LATERAL, 1),
)
_TURNS = (
    ("^", 1.0, 0.0, PITCH, 1),
    ("<", 0.0, 1.0, YAW, -1),
    ("v", 1.0, 1.0, PITCH, -1),
    (">", 2.0, 1.0, YAW, 1),
)


def drawn(rgb: npt.NDArray[np.uint8], row: npt.NDArray[np.float32], caption: str) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3] -> the same or a whole multiple, with the action row [6] of its latent on top."""
    scale = -(-LEAST_HEIGHT // rgb.shape[0])
    picture = np.ascontiguousarray(rgb.repeat(scale, 0).repeat(scale, 1))
    height, width = picture.shape[:2]
    key = height // 11
    bottom = height - key // 2
    right = width - key // 2 - 3 * key
    for left, keys in ((key // 2, _KEYS), (right, _TURNS)):
        for label, column, line, axis, sign in keys:
            at = int(left + column * key), int(bottom - (2 - line) * key)
            _key(picture, at, (key, key), label, bool(sign * row[axis] > 0))
    _key(picture, (width // 2 - 2 * key, bottom - key), (4 * key, key), "space", bool(row[JUMP] > 0))
    _text(picture, (key // 3, int(key * 0.8)), caption, key)
    return picture


def _key(
    picture: npt.NDArray[np.uint8], at: tuple[int, int], size: tuple[int, int], label: str, lit: bool
) -> None:
    (x, y), (w, h) = at, size
    box = picture[y + 1 : y + h - 1, x + 1 : x + w - 1]
    box[:] = (0.35 * box + 0.65 * np.array(_LIT if lit else _DARK)).astype(np.uint8)
    cv2.rectangle(picture, (x + 1, y + 1), (x + w - 2, y + h - 2), _EDGE, 1)
    (tw, th), _ = cv2.getTextSize(label, cv2.FONT_HERSHEY_SIMPLEX, h / 45, 1)
    place = x + (w - tw) // 2, y + (h + th) // 2
    cv2.putText(
        picture, label, place, cv2.FONT_HERSHEY_SIMPLEX, h / 45, _DARK if lit else _EDGE, 1, cv2.LINE_AA
    )


def _text(picture: npt.NDArray[np.uint8], at: tuple[int, int], text: str, key: int) -> None:
    (x, y), size = at, key / 50
    (w, h), base = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    box = picture[max(0, y - h - base) : y + base, max(0, x - base) : x + w + base]
    box[:] = (0.35 * box + 0.65 * np.array(_DARK)).astype(np.uint8)
    cv2.putText(picture, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, _EDGE, 1, cv2.LINE_AA)

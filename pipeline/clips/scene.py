"""Do two pictures show the same place? The dear question, asked only where the cheap ones leave doubt.

Blocks of one picture are sought in the other. In one scene, however fast the camera turns, neighbouring
blocks are found and have moved alike; across a hard cut they are not, or they scatter. What did not move at
all (a status bar, a weapon) says nothing as long as the rest moved. Source: spec/faults.md C5.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

Gray = npt.NDArray[np.uint8]

WIDTH = 160
BLOCK = (15, 16)  # rows, columns
REACH = (15, 72)  # how far a block is sought: 72 of 160 columns are about 42 degrees of a 106 degree view
TEXTURE = 3.0  # luma levels of spread below which a block shows nothing that could be found again
STILL = 2.0  # mean luma levels of change below which a block did not move
FOUND = 0.75  # normalised correlation
ALIKE = 5  # pixels by which the moves of neighbouring blocks may differ
STAND = 0.6  # share of blocks that did not move: more than any status bar and weapon
# Share of the moving blocks that were found moving like two neighbours. Over the 25 greatest steps of 9 clips
# (turns of 7 degrees a frame among them) the 5th percentile is 0.13, over 336 pairs across clips the 99th is
# 0.09.
SAME = 0.12
# Across a flash up to 8 candidates are tried, so more is asked: the greatest of the 336 is 0.15.
SURELY_SAME = 0.25
# Too little to find: then the pictures must simply be alike.
FEW_BLOCKS = 6
ALIKE_LEVELS = 10.0


def small(gray: Gray) -> Gray:
    """uint8 [h, 160] of a gray@320 picture."""
    size = (WIDTH, max(2 * BLOCK[0], gray.shape[0] * WIDTH // gray.shape[1]))
    return np.asarray(cv2.resize(gray, size, interpolation=cv2.INTER_AREA), np.uint8)


def sameness(a: Gray, b: Gray) -> float:
    """0..1: share of the blocks of one picture that the other shows moved coherently, in the better
    direction; 1 where most stand still.

    a, b: uint8 [h, 160], see `small`. A change of brightness or tint does not matter.
    """
    return max(_found_in(a, b), _found_in(b, a))


def _found_in(a: Gray, b: Gray) -> float:
    rows, columns = a.shape[0] // BLOCK[0], WIDTH // BLOCK[1]
    textured = np.zeros((rows, columns), np.bool_)
    still = np.zeros_like(textured)
    found = np.zeros_like(textured)
    move = np.zeros((rows, columns, 2))
    for r in range(rows):
        for c in range(columns):
            y, x = r * BLOCK[0], c * BLOCK[1]
            block = a[y : y + BLOCK[0], x : x + BLOCK[1]]
            if block.std() < TEXTURE:
                continue
            textured[r, c] = True
            if cv2.absdiff(block, b[y : y + BLOCK[0], x : x + BLOCK[1]]).mean() < STILL:
                still[r, c] = True
                continue
            move[r, c], score = _seek(block, b, y, x)
            found[r, c] = score > FOUND
    if textured.sum() < FEW_BLOCKS:
        return float(cv2.absdiff(a, b).mean() < ALIKE_LEVELS)
    moving = int(textured.sum() - still.sum())
    if moving < FEW_BLOCKS or still.sum() > STAND * textured.sum():
        return 1.0
    return float(_coherent(found, move).sum() / moving)


def _seek(block: Gray, b: Gray, y: int, x: int) -> tuple[tuple[int, int], float]:
    """Where in `b` a block from (y, x) is best found, as (columns, rows) moved, and its correlation."""
    top, left = max(0, y - REACH[0]), max(0, x - REACH[1])
    window = b[top : y + BLOCK[0] + REACH[0], left : x + BLOCK[1] + REACH[1]]
    _, score, _, at = cv2.minMaxLoc(cv2.matchTemplate(window, block, cv2.TM_CCOEFF_NORMED))
    return (at[0] + left - x, at[1] + top - y), float(score)


def _coherent(found: npt.NDArray[np.bool_], move: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """bool [rows, columns]: found, and at least two neighbours moved alike."""
    rows, columns = found.shape
    near = np.pad(found, 1)
    moves = np.pad(move, ((1, 1), (1, 1), (0, 0)))
    count = np.zeros(found.shape, np.int64)
    for dr in (0, 1, 2):
        for dc in (0, 1, 2):
            if (dr, dc) == (1, 1):
                continue
            alike = np.abs(moves[dr : dr + rows, dc : dc + columns] - move).max(axis=2) <= ALIKE
            count += near[dr : dr + rows, dc : dc + columns] & alike
    return np.asarray(found & (count >= 2), np.bool_)

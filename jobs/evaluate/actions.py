"""Action rows that worlds are asked to play: random ones, and there and back.

Source: spec/worldplay2.md a.6, j (RevisitBench).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jobs.evaluate.stats import keyed
from jobs.evaluate.world import Rows
from schemas.action import JUMP, PERSPECTIVE
from schemas.clip import Perspective
from schemas.rollout import MOVES, Command, action_rows
from schemas.timeline import FRAMES_PER_LATENT, LATENTS_PER_CHUNK

HELD = (2, 8)
"""A command is held for 2 to 8 latents, 0.5-2 s; the release's examples hold theirs for 4 to 8."""
MOST_PITCH = 20.0
"""Degrees from the start's pitch, beyond which looking up or down turns back: floors show little."""
PITCH_SHARE = 0.25
_MOVES = ((0, 0), *MOVES.values())


def random_rows(
    latents: int, perspective: Perspective, yaw: float, pitch: float, seed: int, *role: str | int
) -> Rows:
    """float32 [latents, 6], row 0 idle, without jumps. yaw, pitch: degrees per latent of a held turn.

    Movement is any of the nine, yaw any of three, pitch other than none in a quarter of the commands; a
    command that holds nothing is drawn again.
    """
    draw = keyed(seed, "actions", *role)
    commands: list[Command] = []
    left, tilt = latents, 0.0
    while left:
        held = min(left, int(draw.integers(HELD[0], HELD[1] + 1)))
        forward, lateral = _MOVES[int(draw.integers(len(_MOVES)))]
        turn = int(draw.integers(-1, 2))
        look = int(draw.choice([-1, 1])) if draw.random() < PITCH_SHARE else 0
        if abs(tilt + look * held * pitch) > MOST_PITCH:
            look = -look if abs(tilt - look * held * pitch) <= MOST_PITCH else 0
        if not (forward or lateral or turn or look):
            continue
        tilt += look * held * pitch
        left -= held
        commands.append(Command(held, forward, lateral, turn, look))
    return action_rows(commands, perspective, yaw, pitch)


def held_turn(latents: int, perspective: Perspective, yaw: float) -> Rows:
    """float32 [latents, 6]: idle, then `yaw` degrees a latent and nothing else."""
    return action_rows([Command(latents, yaw=1)], perspective, yaw, 0.0)


def there_and_back(rows: Rows) -> Rows:
    """n rows out, then rows n-1..1 with every sign turned, then idle rows up to whole chunks.

    Raises ValueError on a jump, which has no reverse.
    """
    if np.any(rows[:, JUMP]):
        raise ValueError("a jump has no reverse: leave jumps out of a way that is to be taken back")
    back = -rows[:0:-1]
    count = len(rows) + len(back)
    idle = np.zeros((-count % LATENTS_PER_CHUNK, rows.shape[1]), np.float32)
    out = np.concatenate([rows, back, idle])
    out[:, PERSPECTIVE] = rows[0, PERSPECTIVE]
    # The minus sign of nothing would make rows that are equal look different.
    return np.asarray(out + 0.0, np.float32)


def mirrored(latents: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Frames of the way out and their partners on the way back, in order of the latter.

    n latents out end at frame F = 4(n-1); frame f < F is seen again in frame 2F - f.
    """
    turn = FRAMES_PER_LATENT * (latents - 1)
    first = np.arange(turn - 1, -1, -1, dtype=np.int64)
    return first, 2 * turn - first

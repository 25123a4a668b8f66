"""From what a player wants to the keys and mouse counts a person would give in one tic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jobs.record.engine import DEGREES_PER_COUNT, KEY_TURN, KEY_TURN_SLOW, Input, State

Style = Literal["mouse", "keys"]

WALK = 9.0  # map units a tic that a walking player ends up with (8.98 measured)
RUN = 17.0
MAX_TURN = 4.5  # degrees a tic = 157 deg/s; people turn about this fast when they look where they go
TURN_GAIN = 0.14
MAX_TURN_CHANGE = 0.55  # degrees a tic, a tic: no jerks
MAX_LOOK = 0.9  # degrees a tic, up or down
MIN_HOLD = 4  # tics between two changes of one key: no chatter


def wrap(degrees: float) -> float:
    """An angle in [-180, 180)."""
    return (degrees + 180.0) % 360.0 - 180.0


def bearing(start: NDArray[np.float64], end: NDArray[np.float64]) -> float:
    """Engine yaw in degrees that looks from `start` to `end`."""
    return float(np.degrees(np.arctan2(end[1] - start[1], end[0] - start[0])))


def unit(yaw: float) -> NDArray[np.float64]:
    return np.array([np.cos(np.radians(yaw)), np.sin(np.radians(yaw))])


@dataclass(frozen=True)
class Intent:
    """What the player wants in this tic.

    yaw: engine degrees to look along; None keeps it. pitch_up: degrees. velocity: map units a tic.
    taps: keys pressed as they are. exact: turn onto `yaw` to the count, not just near it.
    """

    phase: str
    yaw: float | None = None
    pitch_up: float = 0.0
    velocity: tuple[float, float] = (0.0, 0.0)
    run: bool = False
    taps: tuple[str, ...] = ()
    exact: bool = False


class Hands:
    """Turns intents into inputs; remembers which keys are down and how fast the mouse moves."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.turn_step = KEY_TURN_SLOW if style == "keys" else 12 * DEGREES_PER_COUNT
        self._turn_rate = 0.0
        self._turn_key = 0
        self._look_counts = 0
        self._axis = {"forward": 0, "right": 0}
        self._changed = {"forward": -MIN_HOLD, "right": -MIN_HOLD}
        self._tic = 0

    def __call__(self, intent: Intent, state: State) -> Input:
        self._tic += 1
        keys = set(intent.taps)
        keys.update(self._move(intent, state))
        if intent.run and self.style == "mouse" and self._axis["forward"] > 0:
            keys.add("SPEED")
        error = 0.0 if intent.yaw is None else wrap(state.yaw - intent.yaw)  # positive: turn right
        if self.style == "keys":
            keys.update(self._turn_keys(error, intent.exact))
            return Input(frozenset(keys))
        return Input(frozenset(keys), self._mouse_x(error, intent.exact), self._mouse_y(intent.pitch_up))

    def turned(self, state: State, yaw: float) -> bool:
        """True when no smaller turn would bring the view closer to `yaw`."""
        step = KEY_TURN_SLOW if self.style == "keys" else DEGREES_PER_COUNT
        return abs(wrap(state.yaw - yaw)) <= 0.51 * step

    def level(self) -> bool:
        return self._look_counts == 0

    def _mouse_x(self, error: float, exact: bool) -> int:
        want = float(np.clip(TURN_GAIN * error, -MAX_TURN, MAX_TURN))
        if not exact and abs(error) < 0.8:
            want = 0.0
        self._turn_rate += float(np.clip(want - self._turn_rate, -MAX_TURN_CHANGE, MAX_TURN_CHANGE))
        counts = round(self._turn_rate / DEGREES_PER_COUNT)
        left = round(error / DEGREES_PER_COUNT)
        if exact and abs(left) <= 4:
            counts = int(np.sign(left))
        return counts

    def _mouse_y(self, pitch_up: float) -> int:
        left = round(pitch_up / DEGREES_PER_COUNT) - self._look_counts
        limit = max(1, round(min(MAX_LOOK, 0.12 * abs(left) * DEGREES_PER_COUNT) / DEGREES_PER_COUNT))
        counts = int(np.clip(left, -limit, limit))
        self._look_counts += counts
        return counts

    def _turn_keys(self, error: float, exact: bool) -> Iterable[str]:
        """Press towards the aim; let go where one more tic would overshoot. A press starts slow."""
        start, stop = (0.51 * KEY_TURN_SLOW, 0.51 * KEY_TURN_SLOW) if exact else (7.0, 0.6 * KEY_TURN)
        side = int(np.sign(error))
        if self._turn_key == 0:
            self._turn_key = side if abs(error) > start else 0
        elif side != self._turn_key or abs(error) < stop or (exact and abs(error) < KEY_TURN):
            self._turn_key = 0
        return () if self._turn_key == 0 else ("TURN_RIGHT",) if self._turn_key > 0 else ("TURN_LEFT",)

    def _move(self, intent: Intent, state: State) -> Iterable[str]:
        want = np.array(intent.velocity)
        ahead = unit(state.yaw)
        right = np.array([ahead[1], -ahead[0]])
        moving = bool(want.any())
        for axis, direction, dead in (("forward", ahead, 0.8), ("right", right, 1.6)):
            error = float((want - state.velocity) @ direction)
            wish = int(np.sign(error)) if abs(error) > dead else 0
            if not moving or (axis == "forward" and wish < 0 and want @ direction > -1.0):
                wish = 0  # people let go of the key and slide; they do not brake
            if wish != self._axis[axis] and self._tic - self._changed[axis] >= MIN_HOLD:
                self._axis[axis], self._changed[axis] = wish, self._tic
        names = {"forward": ("MOVE_BACKWARD", "MOVE_FORWARD"), "right": ("MOVE_LEFT", "MOVE_RIGHT")}
        return [names[axis][value > 0] for axis, value in self._axis.items() if value]

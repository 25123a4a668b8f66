"""Watchdogs of Stable Forcing: when the student must wait, and when the run must end, each by a named rule.

Source: spec/faults.md M1, M3; spec/worldplay2.md g.1 (how runs fail: collapse, blur, grids, still pictures).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

_EMPTY = -1.0  # a row of the state without a reading; losses are not negative


class Rule(StrEnum):
    """CRITIC_BEHIND pauses the student; the others end the run."""

    CRITIC_BEHIND = "critic_behind"
    CRITIC_FROZEN = "critic_frozen"
    CRITIC_LOST = "critic_lost"
    LEFT_OUT = "left_out"
    STILL = "still"
    SATURATED = "saturated"
    BLURRED = "blurred"


@dataclass(frozen=True)
class WatchConfig:
    """behind: loss of the fake score on new rollouts, over that on rollouts it was trained on, at which the
    student waits; worse: the same over that of the real score, which never saw a rollout. caught_up: what is
    left of the excess when the student goes on. window: steps over which losses are averaged.
    frozen: steps without any change of its loss by its updates. patience: steps that the student may wait.
    left_out: share of clips that do not count, over the window. still, saturated, blurred: motion energy,
    saturation and sharpness of the last quarter of rollouts, as shares of those of the teacher's samples."""

    behind: float = 1.25
    worse: float = 1.05
    caught_up: float = 0.5
    window: int = 8
    frozen: int = 10
    patience: int = 50
    left_out: float = 0.25
    still: float = 0.3
    saturated: float = 1.6
    blurred: float = 0.4


@dataclass(frozen=True)
class Pictures:
    """What videos look like, one value a chunk: motion (mean change from frame to frame), saturation (mean of
    largest less smallest channel), sharpness (mean change from pixel to pixel). Pixels in [-1, 1]."""

    motion: tuple[float, ...]
    saturation: tuple[float, ...]
    sharpness: tuple[float, ...]

    @staticmethod
    def of(chunks: list[Tensor]) -> Pictures:
        """chunks: pixels [B, 3, F, H, W] of each."""
        motion = tuple(float((c[:, :, 1:] - c[:, :, :-1]).abs().mean()) for c in chunks)
        saturation = tuple(float((c.amax(1) - c.amin(1)).mean()) for c in chunks)
        sharpness = tuple(float((c[..., 1:] - c[..., :-1]).abs().mean()) for c in chunks)
        return Pictures(motion, saturation, sharpness)

    @staticmethod
    def joined(parts: list[Pictures]) -> Pictures:
        """Of chunks one behind the other."""
        names = ("motion", "saturation", "sharpness")
        return Pictures(*(tuple(v for part in parts for v in getattr(part, name)) for name in names))

    def late(self) -> tuple[float, float, float]:
        """Means over the last quarter of the chunks."""
        last = max(1, len(self.motion) // 4)
        each = (self.motion, self.saturation, self.sharpness)
        return tuple(math.fsum(values[-last:]) / last for values in each)  # type: ignore[return-value]


@dataclass(frozen=True)
class Reading:
    """What one step showed. before, after: loss of the fake score on the newest rollout, at the same noise,
    before and after its updates; real: that of the real score. clips, left_out: scored, and of these without
    weight. pictures: of the rollout."""

    before: float
    after: float
    real: float
    clips: int
    left_out: int
    pictures: Pictures


@dataclass(frozen=True)
class Verdict:
    """paused: rules by which the student waits; stopped: those that end the run, each with its figures."""

    paused: Mapping[Rule, str]
    stopped: Mapping[Rule, str]


@dataclass
class Watch:
    """The readings so far, as far as a rule looks back. teacher: pictures of the teacher's samples."""

    config: WatchConfig
    teacher: Pictures
    _readings: deque[Reading] = field(default_factory=deque)
    _unmoved: int = 0
    _waited: int = 0

    def read(self, reading: Reading) -> Verdict:
        """Take in a step and judge."""
        config = self.config
        self._unmoved = self._unmoved + 1 if reading.before == reading.after else 0
        self._readings.append(reading)
        if len(self._readings) > config.window + 1:
            self._readings.popleft()
        paused = self._behind()
        self._waited = self._waited + 1 if paused else 0
        return Verdict(paused, {**self._critic(), **self._pictures(reading.pictures)})

    def _behind(self) -> dict[Rule, str]:
        """New rollouts against those that the fake score has seen, and against the real score: one that
        follows the student knows its rollouts at least as well as one that does not know the student."""
        if len(self._readings) < 2:
            return {}
        readings = list(self._readings)
        new = math.fsum(r.before for r in readings[1:])
        against = (
            ("seen ones", math.fsum(r.after for r in readings[:-1]), self.config.behind),
            ("the real score's", math.fsum(r.real for r in readings[1:]), self.config.worse),
        )
        for what, other, limit in against:
            ratio = new / other if other > 0 else math.inf
            if ratio - 1.0 > (limit - 1.0) * (self.config.caught_up if self._waited else 1.0):
                return {
                    Rule.CRITIC_BEHIND: f"loss of the fake score on new rollouts is {ratio:.2f} of {what}"
                }
        return {}

    def _critic(self) -> dict[Rule, str]:
        config, found = self.config, dict[Rule, str]()
        if self._unmoved >= config.frozen:
            found[Rule.CRITIC_FROZEN] = f"{self._unmoved} steps did not change the loss of the fake score"
        if self._waited > config.patience:
            found[Rule.CRITIC_LOST] = f"the student has waited {self._waited} steps for the fake score"
        clips = sum(r.clips for r in self._readings)
        share = sum(r.left_out for r in self._readings) / clips if clips else 0.0
        if len(self._readings) > config.window and share > config.left_out:
            found[Rule.LEFT_OUT] = f"{share:.0%} of the clips gave no sound gradient"
        return found

    def _pictures(self, pictures: Pictures) -> dict[Rule, str]:
        config, found = self.config, dict[Rule, str]()
        shares = [a / b if b > 0 else math.inf for a, b in zip(pictures.late(), self.teacher.late())]
        limits = (
            (Rule.STILL, "motion", shares[0], shares[0] < config.still),
            (Rule.SATURATED, "saturation", shares[1], shares[1] > config.saturated),
            (Rule.BLURRED, "sharpness", shares[2], shares[2] < config.blurred),
        )
        for rule, what, share, broken in limits:
            if broken:
                found[rule] = f"{what} of late chunks is {share:.2f} of the teacher's"
        return found

    def state(self) -> Tensor:
        """What a resumed run needs, as one tensor [window + 2, 5]: losses and counts, then the counters."""
        rows = [[r.before, r.after, r.real, float(r.clips), float(r.left_out)] for r in self._readings]
        rows += [[_EMPTY] * 5] * (self.config.window + 1 - len(rows))
        rows.append([float(self._unmoved), float(self._waited), 0.0, 0.0, 0.0])
        return torch.tensor(rows, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Go on from `state`."""
        rows = state.tolist()
        empty = Pictures((), (), ())
        self._readings = deque(
            Reading(before, after, real, int(clips), int(left), empty)
            for before, after, real, clips, left in rows[:-1]
            if before != _EMPTY
        )
        self._unmoved, self._waited = int(rows[-1][0]), int(rows[-1][1])

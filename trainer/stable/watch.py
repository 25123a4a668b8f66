"""Watchdogs of Stable Forcing: when the student must wait, and when the run must end, each by a named rule.

Source: spec/faults.md M1, M3; spec/worldplay2.md g.1 (how runs fail: collapse, blur, grids, still pictures).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
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
    DRIFTED = "drifted"


@dataclass(frozen=True)
class WatchConfig:
    """behind: loss of the fake score on new rollouts, over that on rollouts it was trained on, at which the
    student waits; worse: the same over that of the real score, which never saw a rollout. caught_up: what is
    left of the excess when the student goes on. window: steps over which readings are averaged.
    frozen: times in a row that updates of an expert of the fake score change its loss by less than the share
    `moves`. patience: steps that the student may wait. left_out: share of clips that do not count.
    still, saturated, blurred: motion energy, saturation and sharpness of the last quarter of rollouts, as
    shares of those of the teacher's samples. drifted: how much farther than theirs the mean colour may go
    from the first chunk's, pixels in [-1, 1]. teacher: videos of it at least, over all ranks."""

    behind: float = 1.25
    worse: float = 1.05
    caught_up: float = 0.5
    window: int = 8
    frozen: int = 10
    moves: float = 1e-4
    patience: int = 50
    left_out: float = 0.25
    still: float = 0.3
    saturated: float = 1.6
    blurred: float = 0.4
    drifted: float = 0.25
    teacher: int = 8


@dataclass(frozen=True)
class Late:
    """The last quarter of videos: mean motion, saturation, sharpness, and drift of colours."""

    motion: float
    saturation: float
    sharpness: float
    drift: float

    @staticmethod
    def mean(parts: Sequence[Late]) -> Late:
        return Late(*(math.fsum(column) / len(parts) for column in zip(*map(astuple, parts))))


@dataclass(frozen=True)
class Pictures:
    """What videos look like, one value a chunk: motion (mean change from frame to frame), saturation (mean of
    largest less smallest channel), sharpness (mean change from pixel to pixel), drift (mean distance of a
    video's mean colour from that of its first chunk). Pixels in [-1, 1]."""

    motion: tuple[float, ...]
    saturation: tuple[float, ...]
    sharpness: tuple[float, ...]
    drift: tuple[float, ...]

    @staticmethod
    def of(chunks: Iterable[Tensor]) -> Pictures:
        """chunks: pixels [B, 3, F, H, W] of each, in order; one is held at a time."""
        rows: list[tuple[float, ...]] = []
        first: Tensor | None = None
        for c in chunks:
            colour = c.mean((2, 3, 4))
            first = colour if first is None else first
            rows.append(
                (
                    float((c[:, :, 1:] - c[:, :, :-1]).abs().mean()),
                    float((c.amax(1) - c.amin(1)).mean()),
                    float((c[..., 1:] - c[..., :-1]).abs().mean()),
                    float((colour - first).norm(dim=1).mean()),
                )
            )
        return Pictures(*map(tuple, zip(*rows)))

    def late(self) -> Late:
        last = max(1, len(self.motion) // 4)
        return Late(*(math.fsum(values[-last:]) / last for values in astuple(self)))


@dataclass(frozen=True)
class Critic:
    """An expert of the fake score at one step: loss on the newest rollouts, at one noise, before and after
    its updates; real: that of the real score; updates: how many there were."""

    before: float
    after: float
    real: float
    updates: int


@dataclass(frozen=True)
class Reading:
    """What one step showed. critics: by expert. clips, left_out: scored, and of these without weight."""

    critics: Mapping[str, Critic]
    clips: int
    left_out: int
    late: Late


@dataclass(frozen=True)
class Verdict:
    """paused: rules by which the student waits; stopped: those that end the run, each with its figures."""

    paused: Mapping[Rule, str]
    stopped: Mapping[Rule, str]


class Watch:
    """The readings so far, as far as a rule looks back. teacher: of its samples."""

    def __init__(self, config: WatchConfig, teacher: Late, experts: tuple[str, ...]) -> None:
        self.config, self.teacher, self.experts = config, teacher, experts
        self._readings: deque[Reading] = deque(maxlen=config.window + 1)
        self._unmoved = dict.fromkeys(experts, 0)
        self._waited = 0

    def read(self, reading: Reading) -> Verdict:
        """Take in a step and judge."""
        for name, critic in reading.critics.items():
            still = abs(critic.before - critic.after) < self.config.moves * critic.before
            if critic.updates:
                self._unmoved[name] = self._unmoved[name] + 1 if still else 0
        self._readings.append(reading)
        paused = self._behind()
        self._waited = self._waited + 1 if paused else 0
        return Verdict(paused, {**self._critic(), **self._looks()})

    def _behind(self) -> dict[Rule, str]:
        """New rollouts against those that the fake score has seen, and against the real score: one that
        follows the student knows its rollouts at least as well as one that does not know the student."""
        readings = list(self._readings)
        if len(readings) < 2:
            return {}
        left = self.config.caught_up if self._waited else 1.0
        for name in self.experts:
            new = math.fsum(r.critics[name].before for r in readings[1:])
            against = (
                ("seen ones", math.fsum(r.critics[name].after for r in readings[:-1]), self.config.behind),
                (
                    "the real score's",
                    math.fsum(r.critics[name].real for r in readings[1:]),
                    self.config.worse,
                ),
            )
            for what, other, limit in against:
                ratio = new / other if other > 0 else math.inf
                if ratio - 1.0 > (limit - 1.0) * left:
                    why = f"loss of the fake score {name} on new rollouts is {ratio:.2f} of {what}"
                    return {Rule.CRITIC_BEHIND: why}
        return {}

    def _critic(self) -> dict[Rule, str]:
        config, found = self.config, dict[Rule, str]()
        for name, times in self._unmoved.items():
            if times >= config.frozen:
                found[Rule.CRITIC_FROZEN] = (
                    f"{times} steps of updates changed the loss of the fake score {name} by less than "
                    f"{config.moves:g} of it"
                )
        if self._waited > config.patience:
            found[Rule.CRITIC_LOST] = f"the student has waited {self._waited} steps for the fake score"
        clips = sum(r.clips for r in self._readings)
        share = sum(r.left_out for r in self._readings) / clips if clips else 0.0
        if len(self._readings) > config.window and share > config.left_out:
            found[Rule.LEFT_OUT] = f"{share:.0%} of the clips gave no sound gradient"
        return found

    def _looks(self) -> dict[Rule, str]:
        """Over the window: one step's videos may be of other scenes than the teacher's."""
        config, found = self.config, dict[Rule, str]()
        if len(self._readings) <= config.window:
            return found
        own, teacher = Late.mean([r.late for r in self._readings]), self.teacher

        def share(value: float, of: float) -> float:
            return value / of if of > 0 else math.inf

        motion, saturation, sharpness = (
            share(getattr(own, what), getattr(teacher, what))
            for what in ("motion", "saturation", "sharpness")
        )
        limits = (
            (Rule.STILL, "motion", motion, motion < config.still),
            (Rule.SATURATED, "saturation", saturation, saturation > config.saturated),
            (Rule.BLURRED, "sharpness", sharpness, sharpness < config.blurred),
        )
        for rule, what, value, broken in limits:
            if broken:
                found[rule] = f"{what} of late chunks is {value:.2f} of the teacher's"
        if own.drift - teacher.drift > config.drifted:
            found[Rule.DRIFTED] = (
                f"colours of late chunks are {own.drift:.2f} from the first chunk's, the teacher's "
                f"{teacher.drift:.2f}"
            )
        return found

    def state(self) -> Tensor:
        """What a resumed run needs, float64 [window + 2, 4 experts + 6]: readings, then counters."""
        rows = [
            [v for name in self.experts for v in astuple(r.critics[name])]
            + [float(r.clips), float(r.left_out), *astuple(r.late)]
            for r in self._readings
        ]
        width = 4 * len(self.experts) + 6
        rows += [[_EMPTY] * width] * (self.config.window + 1 - len(rows))
        counters = [float(self._waited), *(float(n) for n in self._unmoved.values())]
        rows.append(counters + [0.0] * (width - len(counters)))
        return torch.tensor(rows, dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Go on from `state`."""
        *rows, counters = state.tolist()
        self._readings.clear()
        for row in rows:
            if row[0] == _EMPTY:
                continue
            critics = {
                name: Critic(row[4 * k], row[4 * k + 1], row[4 * k + 2], int(row[4 * k + 3]))
                for k, name in enumerate(self.experts)
            }
            clips, left_out, *late = row[4 * len(self.experts) :]
            self._readings.append(Reading(critics, int(clips), int(left_out), Late(*late)))
        self._waited = int(counters[0])
        self._unmoved = {name: int(counters[1 + k]) for k, name in enumerate(self.experts)}

"""Clips with known answers, drawn here: what a model says of them shows whether it can be believed.

They go through the same plan, question and schema as any clip. A server that answers them wrongly (wrong
weights, a broken picture path, a quantisation too far) is found before it writes thousands of captions.
Source: DESIGN rule 6; spec/faults.md V11.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.caption.frames import FramePlan, Limits, jpeg, plan_frames
from pipeline.caption.prompt import Ask, ask
from pipeline.caption.reply import Fault, FaultKind, Reply
from schemas.caption import EventCategory, Part, interval_key
from schemas.clip import Perspective
from schemas.timeline import intervals

SIZE = (640, 360)
FPS = 16
SECONDS = Fraction(10)
_Image = npt.NDArray[np.uint8]
_WHITE, _BLACK, _RED, _GREEN, _BLUE, _YELLOW = (
    *((255, 255, 255), (0, 0, 0), (220, 20, 20)),
    *((20, 170, 40), (20, 50, 220), (250, 220, 20)),
)


@dataclass(frozen=True)
class Canary:
    """A drawn clip of two intervals in first person: without character.

    said: one of each row of words stands in the scene or the interface.
    events: does something happen, by interval.
    """

    name: str
    said: tuple[tuple[str, ...], ...]
    events: tuple[bool, ...]
    plan: FramePlan
    jpegs: tuple[bytes, ...]

    def ask(self, nonce: str) -> Ask:
        """The request for it."""
        return ask(self.plan, self.jpegs, Perspective.FIRST, nonce)

    def check(self, reply: Reply) -> list[Fault]:
        """Where a whole reply differs from the known answer; on top of `validate.check`."""
        return [
            Fault(part, FaultKind.CANARY, f"{self.name}: {detail}") for part, detail in self._wrong(reply)
        ]

    def _wrong(self, reply: Reply) -> list[tuple[Part, str]]:
        # A model may take a shape on a plain ground for something drawn over the picture.
        words = set(re.findall(r"[^\W_]+", f"{reply.scene} {reply.ui}".lower()))
        wrong = [
            (Part.SCENE, f"none of {', '.join(row)} in the scene")
            for row in self.said
            if not words & set(row)
        ]
        if reply.character:
            wrong.append((Part.CHARACTER, "a character where there is none"))
        for i, (happens, event) in enumerate(zip(self.events, reply.events or (), strict=True)):
            if happens is (event.category is EventCategory.NONE):
                told = f"{event.category} in {interval_key(i)}"
                wrong.append((Part.EVENTS, f"{told}, where {'something' if happens else 'nothing'} happens"))
        return wrong


def canaries(limits: Limits) -> tuple[Canary, ...]:
    """All of them: shapes and colours that stand still, a number, and a circle that vanishes at 7.5 s.

    Raises FramesRefused when two intervals do not fit the limits.
    """
    circle = ("circle", "disc", "disk", "ball", "dot", "round", "circular", "sphere")
    square = ("square", "rectangle", "box", "block", "cube", "square-shaped")
    triangle = ("triangle", "triangular", "pyramid", "arrow")
    return (
        _canary("red_circle", (("red",), circle), limits, lambda s: _circle(_WHITE, _RED)),
        _canary("blue_square", (("blue",), square, ("yellow",)), limits, lambda s: _square(_YELLOW, _BLUE)),
        _canary("green_triangle", (("green",), triangle), limits, lambda s: _triangle(_BLACK, _GREEN)),
        _canary("number", (("742",),), limits, lambda s: _digits(_BLUE, "742")),
        _canary(
            "vanishing_circle",
            (("black", "dark"),),
            limits,
            lambda s: _circle(_BLACK, _RED if s < Fraction(15, 2) else _BLACK),
            events=(False, True),
        ),
    )


def _canary(
    name: str,
    said: tuple[tuple[str, ...], ...],
    limits: Limits,
    draw: Callable[[Fraction], _Image],
    events: tuple[bool, ...] = (False, False),
) -> Canary:
    pts = np.arange(int(SECONDS * FPS))
    plan = plan_frames(pts, Fraction(1, FPS), intervals(SECONDS), SIZE, limits)
    jpegs = tuple(jpeg(draw(second), (plan.width, plan.height), limits.quality) for second in plan.seconds)
    return Canary(name, said, events, plan, jpegs)


def _plain(colour: tuple[int, int, int]) -> _Image:
    return np.full((SIZE[1], SIZE[0], 3), colour, np.uint8)


def _circle(ground: tuple[int, int, int], colour: tuple[int, int, int]) -> _Image:
    canvas = _plain(ground)
    cv2.circle(canvas, (SIZE[0] // 2, SIZE[1] // 2), 110, colour, -1, cv2.LINE_AA)
    return canvas


def _square(ground: tuple[int, int, int], colour: tuple[int, int, int]) -> _Image:
    canvas = _plain(ground)
    cv2.rectangle(canvas, (220, 80), (420, 280), colour, -1)
    return canvas


def _triangle(ground: tuple[int, int, int], colour: tuple[int, int, int]) -> _Image:
    canvas = _plain(ground)
    cv2.fillPoly(canvas, [np.array([[320, 60], [190, 290], [450, 290]])], colour, cv2.LINE_AA)
    return canvas


def _digits(ground: tuple[int, int, int], text: str) -> _Image:
    canvas = _plain(ground)
    cv2.putText(canvas, text, (130, 240), cv2.FONT_HERSHEY_SIMPLEX, 7, _WHITE, 22, cv2.LINE_AA)
    return canvas

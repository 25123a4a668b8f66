"""A VLM as judge of videos, over the caption client: the same endpoints, ladder of retries and checks.

A case is judged once a reply of finish reason `stop` passed our own reading and checks. Every retry changes
something; a case whose last reply failed stays unjudged, with its reason. Before the first case the judge is
shown two drawn videos, one in which what was asked happens and one in which it does not: a judge that cannot
tell them apart is refused. Source: DESIGN rule 6; spec/worldplay2.md j; spec/faults.md V1, V11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from jobs.evaluate.judge_prompt import (
    Judgement,
    Question,
    content_faults,
    question,
    read_judgement,
    reply_schema,
)
from jobs.evaluate.world import EvaluationError
from pipeline.caption.attempts import REPLY_CHARACTERS, storable
from pipeline.caption.client import Client, EndpointError, RequestError
from pipeline.caption.completion import Completion
from pipeline.caption.frames import FramesRefused, Limits, jpeg, plan_frames
from pipeline.caption.ladder import ContentChecks, Shown, Step, steps
from pipeline.caption.prompt import nonce_of
from pipeline.caption.reply import Fault, ReplyError
from pipeline.frames import MediaError, Picture, frame_pass
from schemas.timeline import intervals

DONE_LEAST, UNDONE_MOST = 3, 1
"""Instruction grades that the two drawn videos must get: at least, and at most."""


class JudgeConfig(BaseModel):
    """How videos are shown and judged. A change of any of it gives other numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    # Events of a second or less are common (a door, a shot): 4 pictures of 5 s, as captions have, miss them.
    limits: Limits = Field(default=Limits(per_interval=8), description="pictures and tokens of a request")
    attempts: int = Field(
        default=4, ge=1, le=10, description="requests for one case before it stays unjudged"
    )
    content_checks: ContentChecks = Field(
        default=ContentChecks.ENFORCE, description="advise: faults of reasons and digits are only recorded"
    )


class Tried(BaseModel):
    """One request. change: what differs from the one before. faults: empty when it was accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    number: int
    change: str
    status: int
    finish: str
    faults: tuple[str, ...]
    tokens_in: int | None
    tokens_out: int | None
    seconds: float
    reply: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """judgement: None when the case stays unjudged, for `reason`."""

    judgement: Judgement | None
    reason: str
    tries: tuple[Tried, ...]


@dataclass(frozen=True, slots=True)
class Film:
    """A video as a judge is shown it. start: JPEG of the start picture. expected: what should happen, in
    `spans` of seconds."""

    name: str
    start: bytes
    shown: Shown
    expected: str
    spans: tuple[tuple[float, float], ...]

    def ask(self, step: Step) -> Question:
        """The request of a rung; its digits follow from the name and the rung."""
        view = self.shown.thinned() if step.thinned else self.shown
        nonce = nonce_of(self.name, step.number)
        return question(view.plan, self.start, view.jpegs, self.expected, self.spans, nonce)


async def judge(client: Client, film: Film, config: JudgeConfig) -> Verdict:
    """Ask for a judgement until one passes, at most `config.attempts` times.

    Raises NoEndpoint, EndpointError, and EvaluationError where no request can hold the video.
    """
    tries: list[Tried] = []
    avoid = ""
    for step in steps(config.attempts):
        asked = film.ask(step)
        if asked.tokens > config.limits.context:
            raise EvaluationError(
                f"{film.name}: a request of {asked.tokens} tokens, {config.limits.context} are allowed: "
                "show fewer pictures"
            )
        how = step.sampling(asked.max_tokens)
        try:
            got = await client.complete(
                f"{film.name}.{step.number}", asked.messages, reply_schema(), how, avoid
            )
        except RequestError as error:
            avoid = error.endpoint
            tries.append(_tried(step, error, (str(error),)))
            continue
        avoid = got.endpoint
        found, faults = _read(got, asked)
        tries.append(_tried(step, got, tuple(map(str, faults))))
        advised = config.content_checks is ContentChecks.ADVISE
        if found is not None and (advised or not faults):
            return Verdict(found, "", tuple(tries))
    last = tries[-1]
    return Verdict(None, ("" if last.status == 200 else "no answer: ") + "; ".join(last.faults), tuple(tries))


def _read(got: Completion, asked: Question) -> tuple[Judgement | None, tuple[Fault, ...]]:
    try:
        nonce, judgement = read_judgement(got.text, got.finish_reason)
    except ReplyError as error:
        return None, (error.fault,)
    return judgement, tuple(content_faults(nonce, judgement, asked))


def _tried(step: Step, got: Completion | RequestError, faults: tuple[str, ...]) -> Tried:
    told: dict[str, Any] = {
        "number": step.number,
        "change": step.change,
        "faults": tuple(storable(fault[:300]) for fault in faults),
        "seconds": round(got.meter.seconds, 4),
    }
    if isinstance(got, RequestError):
        return Tried(**told, status=got.status, finish="", tokens_in=None, tokens_out=None, reply="")
    return Tried(
        **told,
        status=200,
        finish=storable(got.finish_reason[:40]),
        tokens_in=got.tokens_in,
        tokens_out=got.tokens_out,
        reply=storable(got.text[:REPLY_CHARACTERS]),
    )


# --- films ------------------------------------------------------------------------------------------------


class _Keep:
    """Observer that keeps JPEGs of some frames."""

    def __init__(self, frames: Sequence[int], size: tuple[int, int], quality: int) -> None:
        self._wanted, self._size, self._quality = frozenset(frames), size, quality
        self.jpegs: dict[int, bytes] = {}

    def see(self, index: int, picture: Picture) -> None:
        if index in self._wanted:
            self.jpegs[index] = jpeg(picture.rgb, self._size, self._quality)


def film_of(
    name: str,
    video: Path,
    start: npt.NDArray[np.uint8],
    expected: str,
    spans: tuple[tuple[float, float], ...],
    limits: Limits,
) -> Film:
    """A video file as it is shown. start: uint8 [H, W, 3], the start picture; shown at the video's size.

    Raises EvaluationError where the video is damaged or cannot be shown.
    """
    try:
        decoded = frame_pass(video)
        if not decoded.ok.all():
            raise EvaluationError(f"{video} is damaged: delete it, and run again")
        base, pts = decoded.report.stream.time_base, decoded.pts - decoded.pts[0]
        step = int(np.median(np.diff(pts))) if len(pts) > 1 else 1
        duration = (int(pts[-1]) + step) * base
        size = decoded.report.stream.width, decoded.report.stream.height
        # The start picture is one more than the plan knows of.
        room = limits.model_copy(update={"max_images": limits.max_images - 1})
        plan = plan_frames(pts, base, intervals(duration), size, room)
        kept = _Keep(plan.frames, (plan.width, plan.height), limits.quality)
        frame_pass(video, [kept])
    except (MediaError, FramesRefused) as error:
        raise EvaluationError(f"{video}: {error}") from None
    first = jpeg(start, (plan.width, plan.height), limits.quality)
    return Film(name, first, Shown(plan, [kept.jpegs[k] for k in plan.frames]), expected, spans)


# --- can it see -------------------------------------------------------------------------------------------

_SIZE, _FPS, _SECONDS = (640, 360), 16, Fraction(10)
_WHITE, _RED = (255, 255, 255), (220, 20, 20)


async def require_sight(client: Client, config: JudgeConfig) -> None:
    """Show the judge two drawn videos. Raises EndpointError when it does not tell the event that happens from
    the one that does not; with checks that advise it is not asked."""
    if config.content_checks is ContentChecks.ADVISE:
        return
    grades = []
    for film in drawn_films(config.limits):
        verdict = await judge(client, film, config)
        if verdict.judgement is None:
            raise EndpointError(
                f"{client.model.name} cannot judge a drawn video ({verdict.reason}): serve another"
            )
        grades.append(verdict.judgement.instruction)
    done, undone = grades
    if done < DONE_LEAST or undone > UNDONE_MOST:
        raise EndpointError(
            f"{client.model.name} grades a drawn event that happens {done} of 4, and one that does not "
            f"{undone}: it does not see them; serve another model, or set content_checks to advise"
        )


def drawn_films(limits: Limits) -> tuple[Film, Film]:
    """A red circle that vanishes at 5 s, as was asked; and one that stays, where a square was asked for."""
    circle, plain = _circle(), np.full((_SIZE[1], _SIZE[0], 3), _WHITE, np.uint8)
    half = _SECONDS / 2
    return (
        _drawn("judge-sight-done", "The red circle vanishes", [circle, plain], half, limits),
        _drawn(
            "judge-sight-undone", "A blue square appears beside the circle", [circle, circle], half, limits
        ),
    )


def _drawn(
    name: str, expected: str, halves: list[npt.NDArray[np.uint8]], at: Fraction, limits: Limits
) -> Film:
    pts = np.arange(int(_SECONDS * _FPS))
    room = limits.model_copy(update={"max_images": limits.max_images - 1})
    plan = plan_frames(pts, Fraction(1, _FPS), intervals(_SECONDS), _SIZE, room)
    size = plan.width, plan.height
    first, second = (jpeg(picture, size, limits.quality) for picture in halves)
    jpegs = [first if seconds < at else second for seconds in plan.seconds]
    return Film(name, first, Shown(plan, jpegs), expected, ((float(at), float(_SECONDS)),))


def _circle() -> npt.NDArray[np.uint8]:
    canvas = np.full((_SIZE[1], _SIZE[0], 3), _WHITE, np.uint8)
    cv2.circle(canvas, (_SIZE[0] // 2, _SIZE[1] // 2), 110, _RED, -1, cv2.LINE_AA)
    return canvas

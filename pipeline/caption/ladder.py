"""The retry ladder: what a caption is asked again with, and when it is given up.

Every step keeps what the steps before it changed and adds one change, in this order: another seed at a
temperature, half the pictures, a repetition penalty. A retry goes to another endpoint where there is one, and
asks only for the fields that failed: those that passed are kept.
Source: DESIGN rule 6; spec/faults.md V1, V11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.caption.client import Client, RequestError, Sampling
from pipeline.caption.completion import Completion
from pipeline.caption.frames import FramePlan
from pipeline.caption.prompt import Ask, ask, nonce_of
from pipeline.caption.reply import Fault, Reply, ReplyError, read_reply
from pipeline.caption.validate import check
from schemas.caption import ALL
from schemas.clip import Perspective

RETRY_TEMPERATURE = 0.5
RETRY_PENALTY = 1.1


class ContentChecks(StrEnum):
    """What a fault of content (`FaultKind.structural` is False) does: it is acted on, or only recorded."""

    ENFORCE = "enforce"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: how the model draws its reply, and whether every second picture is left out."""

    number: int
    change: str
    temperature: float = 0.0
    thinned: bool = False
    repetition_penalty: float = 1.0

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(self.number, self.temperature, self.repetition_penalty, max_tokens)


def steps(attempts: int) -> list[Step]:
    """The first `attempts` rungs. Beyond the fourth, the seed alone changes."""
    rungs = [Step(1, "first")]
    rungs.append(replace(rungs[-1], number=2, change="seed, temperature", temperature=RETRY_TEMPERATURE))
    rungs.append(replace(rungs[-1], number=3, change="half the pictures", thinned=True))
    rungs.append(replace(rungs[-1], number=4, change="penalty", repetition_penalty=RETRY_PENALTY))
    rungs += [replace(rungs[3], number=n, change="seed") for n in range(5, attempts + 1)]
    return rungs[:attempts]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a clip is shown as: the plan of its frames, and their JPEGs."""

    plan: FramePlan
    jpegs: Sequence[bytes]

    def thinned(self) -> Shown:
        """Every second picture of each interval, the first of them always."""
        seen: dict[int, int] = {}
        kept = []
        for place, interval in enumerate(self.plan.interval):
            if seen.setdefault(interval, 0) % 2 == 0:
                kept.append(place)
            seen[interval] += 1
        plan = replace(
            self.plan,
            frames=tuple(self.plan.frames[k] for k in kept),
            seconds=tuple(self.plan.seconds[k] for k in kept),
            interval=tuple(self.plan.interval[k] for k in kept),
        )
        return Shown(plan, [self.jpegs[k] for k in kept])


@dataclass(frozen=True, slots=True)
class Try:
    """What came of one request: a completion or an error, the faults found, and the whole reply if this
    request completed it."""

    step: Step
    ask: Ask
    got: Completion | RequestError
    faults: tuple[Fault, ...]
    whole: Reply | None


@dataclass(frozen=True, slots=True)
class Climbed:
    """reply: the whole reply; None when the ladder ended without. faults: without a reply, those of the last
    request that stood against it; with one, what was only recorded. unanswered: the last request that got no
    answer at all; without a reply the clip has then not been judged."""

    reply: Reply | None
    faults: tuple[Fault, ...]
    unanswered: RequestError | None = None


def first_ask(shown: Shown, clip_id: str, perspective: Perspective) -> Ask:
    """The request of the first rung, which names a caption in the cache."""
    return ask(shown.plan, shown.jpegs, perspective, nonce_of(clip_id, 1))


async def climb(
    client: Client,
    shown: Shown,
    first: Ask,
    clip_id: str,
    attempts: int,
    checks: ContentChecks,
    after: Callable[[Try], None],
) -> Climbed:
    """Ask for a caption until every field has passed, at most `attempts` times.

    first: `first_ask` of the clip. after: told of every try.
    Raises NoEndpoint, and what the client's `before` raises.
    """
    kept: Reply | None = None
    wanted = ALL
    against: tuple[Fault, ...] = ()
    unanswered: RequestError | None = None
    avoid = ""
    request = first
    for step in steps(attempts):
        if step.number > 1:
            view = shown.thinned() if step.thinned else shown
            nonce = nonce_of(clip_id, step.number)
            request = ask(view.plan, view.jpegs, first.perspective, nonce, wanted)
        how = step.sampling(request.max_tokens)
        try:
            got = await client.complete(
                f"{clip_id}.{step.number}", request.messages, request.schema, how, avoid
            )
        except RequestError as error:
            unanswered, avoid = error, error.endpoint
            after(Try(step, request, error, (), None))
            continue
        avoid = got.endpoint
        held, faults = judge(got, request, kept)
        against = tuple(f for f in faults if f.kind.structural or checks is ContentChecks.ENFORCE)
        if held is not None and all(f.part for f in against):
            failed = {f.part for f in against}
            passed = [p for p in ALL if getattr(held, p) is not None and p not in failed]
            kept = held.only(passed)
            wanted = tuple(p for p in ALL if p not in passed)
        whole = None if wanted else kept
        after(Try(step, request, got, faults, whole))
        if whole:
            return Climbed(whole, faults)
    return Climbed(None, against, unanswered)


def judge(got: Completion, request: Ask, kept: Reply | None) -> tuple[Reply | None, tuple[Fault, ...]]:
    """What is now known of the clip, the fields kept before and those of this reply, and everything that is
    wrong with it; None when the reply cannot be read."""
    try:
        reply = read_reply(got.text, got.finish_reason, request)
    except ReplyError as error:
        return None, (error.fault,)
    held = replace(kept.with_(reply), nonce=reply.nonce) if kept else reply
    return held, tuple(check(held, request))

"""What the requests of one process share while it captions clips of one corpus: connections, log, accounts.

A session starts with the canaries: drawn clips with known answers. A model that answers more than one of them
wrongly is refused before it writes a caption, unless checks of content are advisory.
Source: DESIGN rules 6, 10; spec/faults.md V11.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.caption.accounts import Accounts
from pipeline.caption.attempts import REPLY_CHARACTERS, Attempt, AttemptLog, now, storable
from pipeline.caption.canary import Canary, canaries
from pipeline.caption.client import Client, EndpointError, RequestError
from pipeline.caption.frames import FramesRefused, Limits
from pipeline.caption.ladder import Climbed, ContentChecks, Shown, Try, climb, steps
from pipeline.caption.prompt import Ask, nonce_of
from pipeline.caption.reply import Fault, Reply
from pipeline.caption.validate import check
from pipeline.stage import digest
from pipeline.store import StoreError
from schemas.caption import ALL, StructuredCaption, read_caption, write_caption

FLUSH_S = 3.0
CANARIES = "canaries"
"""Partition of the attempts at canaries."""
CANARIES_WRONG_MAX = 1  # of five; a good model may take one shape for another, a broken one fails them all


@dataclass
class Session:
    """revision: of the model, for the record. attempts: requests for one clip at most."""

    client: Client
    log: AttemptLog
    accounts: Accounts
    revision: str
    attempts: int
    checks: ContentChecks
    threads: ThreadPoolExecutor = field(
        # Decoding frames and writing JPEGs, beside the loop that waits for the endpoints.
        default_factory=lambda: ThreadPoolExecutor(os.cpu_count() or 1, "captions")
    )

    @property
    def provenance(self) -> str:
        return "@".join(filter(None, (self.client.model.name, self.revision)))

    async def do(self, function: Any, *args: Any) -> Any:
        """Run blocking work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    async def flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(StoreError):  # the rows are kept; the last flush raises
                await self.do(self.log.flush)

    def key(self, request: Ask) -> str:
        """Names a caption in the cache: pictures, prompt, schema, model, revision, first sampling."""
        model = self.client.model
        sampling = asdict(steps(1)[0].sampling(request.max_tokens))
        return digest(request.digests, model.name, model.root, self.revision, sampling)

    def held(self, partition: str, request: Ask) -> tuple[StructuredCaption, tuple[Fault, ...]] | None:
        """The first accepted caption of a request that passes the present checks, and what they advise."""
        for attempt in self.log.accepted(partition, self.key(request)):
            caption = read_caption(attempt.caption.encode())
            faults = tuple(check(_reply(caption, request), request))
            if not faults or self.checks is ContentChecks.ADVISE:
                return caption, faults
        return None

    async def ask(self, partition: str, clip_id: str, shown: Shown, first: Ask) -> Climbed:
        """Climb the ladder; every try goes to the log and the accounts. Raises NoEndpoint, BudgetReached."""
        key = self.key(first)

        def after(tried: Try) -> None:
            self._record(partition, _attempt(tried, self, key, clip_id))

        return await climb(self.client, shown, first, clip_id, self.attempts, self.checks, after)

    def _record(self, partition: str, attempt: Attempt) -> None:
        self.log.add(partition, attempt)
        self.accounts.total.add(attempt)

    async def require_canaries(self, limits: Limits) -> None:
        """Ask for every canary that this model has not answered yet. Raises EndpointError, NoEndpoint."""
        try:
            drawn = canaries(limits)
        except FramesRefused:  # neither do clips of two intervals fit, and each of them says so
            return
        said = await asyncio.gather(*map(self._canary, drawn))
        wrong = [text for text in said if text]
        if len(wrong) > CANARIES_WRONG_MAX and self.checks is ContentChecks.ENFORCE:
            raise EndpointError(
                f"{self.provenance} describes {len(wrong)} of {len(said)} drawn clips wrongly "
                f"({'; '.join(wrong)[:400]}): serve another model, or set caption.content_checks to advise"
            )

    async def _canary(self, canary: Canary) -> str:
        """What is wrong with the answer; "" when it is right."""
        name = f"canary-{canary.name}"
        request = canary.ask(nonce_of(name, 1))
        if found := await self.do(self.held, CANARIES, request):
            wrong = canary.check(_reply(found[0], request))
            return str(wrong[0]) if wrong else ""
        wrongs: list[Fault] = []

        def after(tried: Try) -> None:
            wrongs[:] = canary.check(tried.whole) if tried.whole else tried.faults
            attempt = _attempt(tried, self, self.key(request), "", wrongs if tried.whole else ())
            self._record(CANARIES, attempt)

        shown = Shown(canary.plan, canary.jpegs)
        climbed = await climb(self.client, shown, request, name, self.attempts, self.checks, after)
        if climbed.reply is None:
            return f"{canary.name}: {climbed.unanswered or climbed.faults[0]}"
        return str(wrongs[0]) if wrongs else ""


def _reply(caption: StructuredCaption, request: Ask) -> Reply:
    parts = {part.value: getattr(caption, part) for part in ALL}
    return Reply(nonce=request.nonce, **parts)


def _attempt(tried: Try, session: Session, key: str, clip_id: str, more: Any = ()) -> Attempt:
    """more: faults that the ladder did not look for."""
    step, request, got = tried.step, tried.ask, tried.got
    if isinstance(got, RequestError):
        status, finish, faults, reply = got.status, "", str(got), ""
        # A request that is refused (HTTP 4xx) generates nothing; what a broken or late one did is not known.
        tokens_in = tokens_out = 0 if got.kind == "refused" else None
    else:
        status, finish, reply = 200, got.finish_reason[:40], got.text[:REPLY_CHARACTERS]
        faults = "; ".join(map(str, (*tried.faults, *more)))
        tokens_in, tokens_out = got.tokens_in, got.tokens_out
    return Attempt(
        id=session.log.next_id(),
        key=key,
        clip_id=clip_id,
        number=step.number,
        change=step.change,
        parts=",".join(request.parts),
        endpoint=got.endpoint,
        model=session.provenance,
        status=status,
        finish=storable(finish),
        faults=storable(faults[:500]),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        bound_tokens=request.tokens,
        seconds=round(got.meter.seconds, 4),
        engine_seconds=round(got.meter.engine_seconds, 4),
        at=now(),
        reply=storable(reply),
        caption=write_caption(tried.whole.caption(session.provenance)).decode() if tried.whole else "",
    )

"""The caption stage: caption.json from nothing, from a game's log, or from a served VLM.

What changes a caption is in `CaptionConfig`, and so in the receipt; where the model is served, what it costs
and how much may be spent is in `ServeConfig`, and changes nothing that was made. Attempts, times and money
never reach caption.json or the facts. Source: DESIGN rules 6, 7, 10.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipeline.caption.accounts import Accounts, Budget, Prices
from pipeline.caption.attempts import AttemptLog
from pipeline.caption.client import Client, EndpointConfig
from pipeline.caption.frames import FramesRefused, Limits, pictures, plan_frames
from pipeline.caption.ladder import Climbed, ContentChecks, Shown, first_ask
from pipeline.caption.log import log_caption
from pipeline.caption.prompt import Ask
from pipeline.caption.reply import Fault
from pipeline.caption.session import Session
from pipeline.events import clip_events
from pipeline.media import read_frames
from pipeline.sources import SourceConfig
from pipeline.sources.sidecar import SidecarError
from pipeline.stage import Fact, Receipt, Result, Unit
from pipeline.store import StoreError
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, read_caption, write_caption
from schemas.clip import Clip, FrameTable
from schemas.errors import StopRun
from schemas.quality import Reason, Status, Verdict, because
from schemas.timeline import intervals

CAPTION = "caption.json"


class CaptionConfig(BaseModel):
    """Settings of the caption stage. A change of any of them is another caption."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: Literal["none", "log", "vlm"] = Field(
        default="none",
        description="none: what a clip has stays, empty where it has nothing; log: events of the game's log; "
        "vlm: a served model",
    )
    model: str = Field(
        default="", description="name that the endpoints must serve; whatever they do if empty"
    )
    revision: str = Field(default="", description="revision of the model, for the record")
    limits: Limits = Field(default=Limits(), description="pictures and tokens of a request")
    attempts: int = Field(default=4, ge=1, le=10, description="requests for one clip before it is rejected")
    content_checks: ContentChecks = Field(
        default=ContentChecks.ENFORCE,
        description="advise: faults of content (language, leak, ...) are recorded and not acted on",
    )


class ServeConfig(EndpointConfig):
    """Where the model is served, and what it may cost. Nothing here changes a caption."""

    prices: Prices = Field(default=Prices(), description="for the accounts, and a budget of money")
    budget: Budget = Field(default=Budget(), description="the most that one run may use")


class Caption:
    """Stage: caption.json (read it with `read_unit_caption`).

    `caption` is the stage; many may run at once on one event loop within a `session`. `run` does one clip.
    """

    name: ClassVar[str] = "caption"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("ingest", "actions")
    reads: ClassVar[tuple[str, ...]] = ("perspective", "events")

    def __init__(self, config: CaptionConfig, source: SourceConfig, serve: ServeConfig) -> None:
        self.config: CaptionConfig = config
        self.serve = serve
        self._source = source
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}  # connections stay in their process

    def frozen(self, clip: Clip) -> object:
        return None

    def stands(self, receipt: Receipt) -> bool:
        """What any captioner said stays as it is in a run that captions nothing: `wp2 curate` after
        `wp2 caption` takes no caption away, and brings no clip back that none was accepted for."""
        return self.config.source == "none"

    def run(self, unit: Unit, scratch: Path) -> Result:
        """One clip by itself, with a session of its own where the source is a VLM."""
        return asyncio.run(self._alone(unit, scratch))

    async def _alone(self, unit: Unit, scratch: Path) -> Result:
        if self.config.source != "vlm":
            return await self.caption(unit, scratch)
        async with self.session(AttemptLog(unit.corpus)):
            return await self.caption(unit, scratch)

    @contextlib.asynccontextmanager
    async def session(self, log: AttemptLog) -> AsyncIterator[Session]:
        """Connect to the endpoints; within it, `caption` may be called. Attempts are published every few
        seconds and at the end. Raises EndpointError (also for a model that fails the canaries), NoEndpoint,
        BudgetReached, and StoreError at the end."""
        accounts = Accounts(self.serve.prices, self.serve.budget)
        config = self.config
        async with Client(self.serve, config.model, accounts.require) as client:
            session = Session(client, log, accounts, config.revision, config.attempts, config.content_checks)
            flushing = asyncio.create_task(session.flush_often())
            try:
                await session.require_canaries(config.limits)
                self._session = session
                yield session
            finally:
                self._session = None
                flushing.cancel()
                session.threads.shutdown(wait=True)
                log.flush()

    async def caption(self, unit: Unit, scratch: Path) -> Result:
        """One clip. Raises BudgetReached when nothing is left to ask with: the clip then has no outcome, and
        a later run asks for it. Raises EndpointError when an endpoint turns out to be the wrong one.
        """
        if self.config.source == "vlm":
            return await self._from_vlm(unit, scratch)
        table = read_frames(unit)
        if self.config.source == "none" and (stands := _stands(unit, table, scratch)):
            return stands
        if self.config.source == "log" and unit.clip.events is not None:
            try:
                found = log_caption(clip_events(unit, self._source, table), table)
            except SidecarError as error:
                return Result(Verdict.failed(because(Reason.BAD_SIDECAR, str(error))))
        else:
            found = no_caption(table)
        return _result(found, scratch)

    async def _from_vlm(self, unit: Unit, scratch: Path) -> Result:
        session = self._session
        if session is None:
            raise RuntimeError("Caption.caption with a VLM needs an open session")
        try:
            shown, request = await session.do(self._prepare, unit)
        except FramesRefused as error:
            return Result(Verdict.rejected(because(Reason.CAPTION_FRAMES, str(error))))
        try:
            held = await session.do(session.held, unit.partition, request)
        except StoreError as error:  # of every clip of the partition, not of this one
            raise StopRun(str(error)) from None
        if held:
            return _result(held[0], scratch, held[1])
        climbed = await session.ask(unit.partition, unit.clip.clip_id, shown, request)
        if climbed.reply is None:
            verdict = _verdict(climbed)
            return Result(verdict, _before(unit, scratch) if verdict.status is Status.FAILED else {})
        return _result(climbed.reply.caption(session.provenance), scratch, climbed.faults)

    def _prepare(self, unit: Unit) -> tuple[Shown, Ask]:
        """Pictures and first request. Raises FramesRefused, StoreError, FramesDiffer."""
        table = read_frames(unit)
        facts = unit.receipts["ingest"].facts
        size = int(facts["width"]), int(facts["height"])
        spans = intervals(table.duration())
        plan = plan_frames(table.pts, table.time_base, spans, size, self.config.limits)
        shown = Shown(plan, pictures(unit, plan))
        return shown, first_ask(shown, unit.clip.clip_id, unit.clip.perspective)


def _verdict(climbed: Climbed) -> Verdict:
    """Rejected only when every request was answered: else the clip has not been judged, and a later run asks
    again."""
    if climbed.unanswered is not None:
        return Verdict.failed(because(Reason.NO_ANSWER, str(climbed.unanswered)))
    structural = any(f.kind.structural for f in climbed.faults)
    reason = Reason.CAPTION_INVALID if structural else Reason.CAPTION_DOUBTFUL
    return Verdict.rejected(*(because(reason, str(fault)) for fault in climbed.faults))


def _before(unit: Unit, scratch: Path) -> dict[str, Path]:
    """The caption that the clip had: a clip that could not be asked for keeps it, and its shard can be
    written."""
    held = unit.receipts.get(Caption.name)
    if held is None or not held.has(CAPTION):
        return {}
    path = scratch / CAPTION
    path.write_bytes(unit.corpus.read(held.output(CAPTION).path))
    return {CAPTION: path}


def _stands(unit: Unit, table: FrameTable, scratch: Path) -> Result | None:
    """What an earlier captioner said of a clip, for a run that captions nothing; None where there is nothing
    to keep."""
    held = unit.receipts.get(Caption.name)
    if held is None:
        return None
    files = _before(unit, scratch)
    if held.status is not Status.OK:
        return Result(Verdict(held.status, held.reasons), files)
    caption = read_unit_caption(unit)
    if not caption.provenance or len(caption.events) != len(intervals(table.duration())):
        return None
    return Result(Verdict.ok(), files, held.facts)


def no_caption(table: FrameTable) -> StructuredCaption:
    """The caption of a clip that nobody has described: an interval of none each, no provenance."""
    return StructuredCaption(events=tuple(IntervalEvent() for _ in intervals(table.duration())))


def read_unit_caption(unit: Unit) -> StructuredCaption:
    """A clip's caption, from the stage's output. Raises StoreError, CaptionError."""
    return read_caption(unit.corpus.read(unit.receipts[Caption.name].output(CAPTION).path))


def _result(caption: StructuredCaption, scratch: Path, advised: tuple[Fault, ...] = ()) -> Result:
    path = scratch / CAPTION
    path.write_bytes(write_caption(caption))
    kinds = sorted({f"{f.kind} of {f.part}" if f.part else str(f.kind) for f in advised})
    facts: dict[str, Fact] = {
        "provenance": caption.provenance,
        "intervals": len(caption.events),
        "events": sum(e.category is not EventCategory.NONE for e in caption.events),
        "advised": "; ".join(kinds),
    }
    return Result(Verdict.ok(), {CAPTION: path}, facts)

"""Captions of many clips at once: a pool whose slots are clips in flight.

A clip that is being captioned waits for a server nearly all of its time. A desk holds one event loop with the
stage's open session, and a thread a slot: there `run_clip` goes its usual way, until the caption stage hands
its coroutine to the loop and the thread waits. So a curator uses this pool as any other. On one machine the
desk is in this process, on a cluster in one actor a node. Frames are decoded where the desk is, and never
enter the object store. Source: DESIGN 4 (captions), rules 7, 10; spec/faults.md V5, R6.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import ray
import ray.exceptions as rx
from pydantic import BaseModel

from jobs.engine import EngineConfig, Served
from jobs.runner import Lost
from jobs.serving import Engines, serve
from pipeline.caption.attempts import AttemptLog
from pipeline.caption.stage import Caption, ServeConfig
from pipeline.flow import Flow
from pipeline.stage import Receipt, Result, Unit, is_fresh, one_line
from schemas.clip import Clip
from schemas.errors import StopRun, UserError
from schemas.quality import Status

T = TypeVar("T")


class NotReady(StopRun):
    """A clip whose earlier stages are not done: captioning runs no other stage."""


WATCH_S = 5.0


def slots(serve: ServeConfig) -> int:
    """Clips in flight that keep `in_flight` requests in flight: two more a core are being decoded."""
    return serve.in_flight + 2 * (os.cpu_count() or 1)


def caption_stage(flow: Flow) -> Caption:
    """The last stage of a flow that ends with captions."""
    stage = flow.stages[-1]
    if not isinstance(stage, Caption):
        raise ValueError(f"the flow ends with {stage.name}, not with captions")
    return stage


class _OnLoop:
    """The caption stage, its `run` carried out by the loop of a desk."""

    name: ClassVar[str] = Caption.name
    version: ClassVar[int] = Caption.version
    needs: ClassVar[tuple[str, ...]] = Caption.needs
    reads: ClassVar[tuple[str, ...]] = Caption.reads

    def __init__(self, stage: Caption, carry_out: Callable[[Unit, Path], Result]) -> None:
        self._stage, self._carry_out = stage, carry_out

    @property
    def config(self) -> BaseModel:
        return self._stage.config

    def frozen(self, clip: Clip) -> object:
        return self._stage.frozen(clip)

    def run(self, unit: Unit, scratch: Path) -> Result:
        return self._carry_out(unit, scratch)


class Desk:
    """An event loop in a thread, with an open session of a flow's caption stage.

    Raises EndpointError, NoEndpoint when no session can be opened.
    """

    def __init__(self, flow: Flow) -> None:
        self._stage = caption_stage(flow)
        bound = (_OnLoop(s, self._caption) if s is self._stage else s for s in flow.stages)
        self._flow = replace(flow, stages=tuple(bound))
        self._asked: set[futures.Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="captions", daemon=True)
        self._thread.start()
        self._session = contextlib.AsyncExitStack()
        try:
            session = self._stage.session(AttemptLog(flow.corpus))
            self._send(self._session.enter_async_context(session)).result()
        except BaseException:
            self._end_loop()
            raise

    def call(
        self, function: Callable[[Flow, Unit, int], list[Receipt]], unit: Unit, attempt: int
    ) -> list[Receipt]:
        """`function(flow, unit, attempt)` with the flow of this desk: receipts. A clip that an earlier stage
        gave up keeps the receipt that says so. Raises StopRun: the clip on its way then has no outcome, and a
        later run takes it up."""
        if against := self._against(unit):
            return [against]
        return function(self._flow, unit, attempt)

    def _against(self, unit: Unit) -> Receipt | None:
        for stage in self._flow.stages[:-1]:
            if not is_fresh(stage, unit.clip, unit.receipts):
                raise NotReady(
                    f"clip {unit.clip.clip_id} is not through stage {stage.name} with this config: run "
                    "`wp2 curate` with the same --config first"
                )
            if unit.receipts[stage.name].status is not Status.OK:
                return unit.receipts[stage.name]
        return None

    def stop(self) -> None:
        """Give up the requests on their way."""
        for future in list(self._asked):
            future.cancel()

    def close(self) -> None:
        """Publish the attempts and disconnect, after every call has come back. Raises StoreError."""
        try:
            self._send(self._session.aclose()).result()
        finally:
            self._end_loop()

    def _caption(self, unit: Unit, scratch: Path) -> Result:
        future = self._send(self._stage.caption(unit, scratch))
        self._asked.add(future)
        try:
            return future.result()
        finally:
            self._asked.discard(future)

    def _send(self, coroutine: Coroutine[Any, Any, T]) -> futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Office(Protocol):
    """Where desks are. A handle stands for one call; `result` gives what came of it, or raises
    StopRun."""

    @property
    def slots(self) -> int: ...
    def start(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def ready(self, handles: Iterable[Any], timeout_s: float) -> Iterable[Any]: ...
    def result(self, handle: Any) -> Any: ...
    def close(self) -> None: ...


class Here:
    """One desk, in this process."""

    def __init__(self, flow: Flow) -> None:
        self.slots = slots(caption_stage(flow).serve)
        self._desk = Desk(flow)
        self._threads = futures.ThreadPoolExecutor(self.slots, "clips")

    def start(self, function: Callable[..., Any], *args: Any) -> futures.Future[Any]:
        return self._threads.submit(self._desk.call, function, *args)

    def ready(self, handles: Iterable[Any], timeout_s: float) -> Iterable[Any]:
        return futures.wait(list(handles), timeout_s, futures.FIRST_COMPLETED).done

    def result(self, handle: futures.Future[Any]) -> Any:
        try:
            return handle.result()
        except StopRun:
            raise
        except Exception as error:  # noqa: BLE001 - a task that raises is an outcome, as in other pools
            return Lost(one_line(error), worker_died=False)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._desk.stop()
        self._threads.shutdown(wait=True)
        self._desk.close()


class _DeskActor:
    """A desk in a Ray actor; its calls run in threads of the actor."""

    def open(self, flow: Flow, serve: ServeConfig) -> None:
        caption_stage(flow).serve = serve  # this process's share
        self._desk = Desk(flow)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._desk.call(function, *args)

    def close(self) -> None:
        self._desk.stop()
        self._desk.close()


class OnRay:
    """One desk a node of the running Ray. Requests in flight and the budget are divided among them."""

    def __init__(self, flow: Flow) -> None:
        nodes = sum(node["Alive"] for node in ray.nodes())
        serve = caption_stage(flow).serve
        share = serve.model_copy(
            update={"in_flight": -(-serve.in_flight // nodes), "budget": serve.budget.part(nodes)}
        )
        each = slots(share)
        self.slots = nodes * each
        options = {"num_cpus": 1, "max_concurrency": each + 2, "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(**options)(_DeskActor)
        self._desks = [actor.remote() for _ in range(nodes)]
        self._turn = itertools.cycle(self._desks)
        try:
            ray.get([desk.open.remote(flow, share) for desk in self._desks])
        except rx.RayTaskError as error:
            self.close()
            raise (error.cause if isinstance(error.cause, UserError) else error) from None

    def start(self, function: Callable[..., Any], *args: Any) -> Any:
        return next(self._turn).call.remote(function, *args)

    def ready(self, handles: Iterable[Any], timeout_s: float) -> Iterable[Any]:
        refs = list(handles)
        found, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if found:
            found, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return list(found)

    def result(self, handle: Any) -> Any:
        try:
            return ray.get(handle)
        except rx.RayTaskError as error:
            if isinstance(error.cause, StopRun):
                raise error.cause from None
            return Lost(one_line(error.cause or error), worker_died=False)
        except rx.RayError as error:
            return Lost(one_line(error), worker_died=True)

    def close(self) -> None:
        ray.wait([desk.close.remote() for desk in self._desks], num_returns=len(self._desks), timeout=60.0)
        for desk in self._desks:
            ray.kill(desk)


class CaptionPool:
    """A pool for flows like the one that it was made with. Its office is opened for the first task: a run
    that finds nothing to caption needs no server.

    After a StopRun it takes no more tasks, gives the results that are on their way, and raises it.
    watch: called every few seconds while results are waited for; what it raises ends the run.
    """

    def __init__(self, flow: Flow, opens: Callable[[], Office], watch: Callable[[], None]) -> None:
        self._configs, self._opens = flow.configs(), opens
        self._office: Office | None = None
        self._watch, self._watched = watch, time.monotonic()
        self._flying: dict[Any, Any] = {}
        self._ending: UserError | None = None

    @property
    def free(self) -> int:
        slots = self._office.slots if self._office else 1
        return 0 if self._ending else slots - len(self._flying)

    @property
    def busy(self) -> int:
        return len(self._flying) + (self._ending is not None)

    def share(self, value: Any) -> Any:
        if isinstance(value, Flow) and value.configs() != self._configs:
            raise ValueError("the flow has other stages than the one that this pool was made for")
        return value

    def submit(self, key: Any, function: Callable[..., Any], *args: Any) -> None:
        """`function(flow, *rest)`: the desk puts its own flow in the place of the one given."""
        self._office = self._office or self._opens()
        self._flying[self._office.start(function, *args[1:])] = key

    def wait(self, timeout_s: float) -> list[tuple[Any, Any]]:
        if time.monotonic() - self._watched > WATCH_S:
            self._watch()
            self._watched = time.monotonic()
        if (office := self._office) is None:
            return []
        found = []
        for handle in office.ready(self._flying, timeout_s):
            key = self._flying.pop(handle)
            try:
                found.append((key, office.result(handle)))
            except StopRun as error:
                self._ending = self._ending or error
        if self._ending and not self._flying and not found:
            raise self._ending
        return found

    def close(self) -> None:
        self._flying.clear()
        if self._office:
            self._office.close()


@contextlib.contextmanager
def captioning(
    work: Flow, engines: EngineConfig, model: str, local: bool, tell: Callable[[str], None]
) -> Iterator[CaptionPool]:
    """A pool for a flow that ends with captions by a VLM, on the running Ray.

    model: started by `engines` for the first clip, and served as long as the pool is open; "" leaves the
    flow's endpoints as they are. local: Ray is this machine's alone. tell: is told how many engines serve.
    """
    stage = caption_stage(work)
    with contextlib.ExitStack() as stack:
        running: list[Engines] = []

        def opens() -> Office:
            if model:
                served = Served(model, stage.config.revision, stage.config.limits)
                running.append(stack.enter_context(serve(engines, served, local, tell)))
                stage.serve = stage.serve.model_copy(update={"endpoints": running[0].urls})
            return Here(work) if local else OnRay(work)

        def watch() -> None:
            for started in running:
                started.require()

        pool = CaptionPool(work, opens, watch)
        try:
            yield pool
        finally:
            pool.close()

"""`--serve MODEL`: vLLM engines on the running Ray, one actor each, for the length of a run.

An actor holds the GPUs of its engine and supervises it (`jobs/engine.py`). Ray ends actors when the driver
is gone, however it went; the death of an actor breaks the pipe to its engine's guard, which ends the engine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.exceptions as rx

from jobs.engine import (
    STOP_S,
    Engine,
    EngineConfig,
    EngineError,
    Phase,
    Served,
    State,
    command,
    environment,
    free_port,
    program_of,
)
from jobs.runner import RunnerError
from pipeline.stage import one_line

POLL_S = 1.0
LOCAL = "127.0.0.1"


class _Keeper:
    """Actor that holds an engine's GPUs and supervises it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def start(self, config: EngineConfig, served: Served, host: str) -> None:
        """host: "" listens at the node's own address. Raises EngineError."""
        program = program_of(config)
        address = host or ray.util.get_node_ip_address()
        port = free_port(address)
        line = command(config, program, served, address, port)
        logs = Path(config.logs or tempfile.gettempdir())
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"wp2-engine-{os.getpid()}.log"
        env = environment(os.environ, program, served.model)
        self._engine = Engine(config, line, env, f"http://{address}:{port}", log)

    def state(self) -> State:
        if self._engine is None:
            raise RuntimeError("an engine has a state once it is started")
        return self._engine.state()

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()


_KEEPER: Any = ray.remote(num_cpus=0, max_concurrency=4)(_Keeper)


class Engines:
    """Engines that are starting, serving or given up. `urls` do not change."""

    def __init__(self, config: EngineConfig, served: Served, local: bool) -> None:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = config.engines or max(1, gpus // config.tensor_parallel)
        held = config.tensor_parallel if gpus else 0
        if count * held > gpus:
            raise RunnerError(
                f"{count} engines of {held} GPUs need {count * held}, Ray has {gpus}: correct "
                "engines.engines or engines.tensor_parallel"
            )
        options = {"num_gpus": held, "scheduling_strategy": "SPREAD"}
        self._keepers = [_KEEPER.options(**options).remote() for _ in range(count)]
        host = LOCAL if local else ""
        self._starts = [k.start.remote(config, served, host) for k in self._keepers]
        self.urls: tuple[str, ...] = ()

    def wait(self, tell: Callable[[str], None]) -> None:
        """Until every engine serves. tell: is told how many do. Raises EngineError when one is given up:
        where one cannot start at all, something is wrong that will not pass."""
        started, before = time.monotonic(), -1
        try:
            ray.get(self._starts)
        except rx.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, EngineError) else error) from None
        while True:
            states = self.states()
            for number, state in enumerate(states):
                if state.phase is Phase.FAILED:
                    raise EngineError(f"engine {number} of {len(states)} does not start: {state.why}")
            serving = sum(s.phase is Phase.SERVING for s in states)
            if serving != before:
                tell(f"{serving} of {len(states)} engines serve after {time.monotonic() - started:.0f} s")
                before = serving
            if serving == len(states):
                self.urls = tuple(s.url for s in states)
                return
            time.sleep(POLL_S)

    def states(self) -> list[State]:
        return [_state(keeper) for keeper in self._keepers]

    def require(self) -> None:
        """Raises EngineError when every engine has been given up; the requests of one go to the others."""
        states = self.states()
        if all(s.phase is Phase.FAILED for s in states):
            raise EngineError(f"no engine is left; the last one: {states[-1].why}")

    def close(self) -> None:
        """End every engine: asked first, then by the end of its actor."""
        stops = [keeper.stop.remote() for keeper in self._keepers]
        ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
        for keeper in self._keepers:
            ray.kill(keeper)


def _state(keeper: Any) -> State:
    try:
        state: State = ray.get(keeper.state.remote())
    except rx.RayActorError as error:  # its node is gone
        return State("", Phase.FAILED, 0, one_line(error))
    return state


@contextlib.contextmanager
def serve(
    config: EngineConfig, served: Served, local: bool, tell: Callable[[str], None]
) -> Iterator[Engines]:
    """Engines that serve a model, ended with the context. Ray must be running; local: it is this machine's
    alone. Raises EngineError, RunnerError."""
    engines = Engines(config, served, local)
    try:
        engines.wait(tell)
        yield engines
    finally:
        engines.close()

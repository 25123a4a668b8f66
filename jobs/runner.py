"""Where tasks run: in this process, or on Ray. Both answer with results by key, in completion order.

A task is a module-level function and small arguments (paths, spans, receipts; never frames). What all tasks
share is put once. Only this module starts Ray. Source: DESIGN 4; spec/faults.md R1, R6.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import ray.cloudpickle as cloudpickle
import ray.exceptions as rx

from pipeline.stage import one_line
from schemas.errors import StopRun, UserError

SHARED_BYTES_MAX = 64 << 10
"""Stages are built from small configs; a larger closure means that data has crept into it (faults R1)."""


class RunnerError(UserError):
    """The runner itself cannot start or go on."""


@dataclass(frozen=True)
class Lost:
    """A task that gave no result: its worker died, or it raised."""

    reason: str
    worker_died: bool


class Pool(Protocol):
    """Runs tasks. `free` says how many more may be in flight; `wait` blocks for at least one result."""

    @property
    def free(self) -> int: ...
    @property
    def busy(self) -> int: ...
    def share(self, value: Any) -> Any: ...
    def submit(self, key: Any, function: Callable[..., Any], *args: Any) -> None: ...
    def wait(self, timeout_s: float) -> list[tuple[Any, Any]]: ...
    def close(self) -> None: ...


class InProcess:
    """One task at a time, in this process: the floor that Ray is measured against."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = deque()

    @property
    def free(self) -> int:
        return 1 - len(self._queue)

    @property
    def busy(self) -> int:
        return len(self._queue)

    def share(self, value: Any) -> Any:
        return value

    def submit(self, key: Any, function: Callable[..., Any], *args: Any) -> None:
        self._queue.append((key, function, args))

    def wait(self, timeout_s: float) -> list[tuple[Any, Any]]:
        key, function, args = self._queue.popleft()
        try:
            return [(key, function(*args))]
        except StopRun:
            raise
        except Exception as error:  # noqa: BLE001 - a task that raises is an outcome, as it is on Ray
            return [(key, Lost(one_line(error), worker_died=False))]

    def close(self) -> None:
        self._queue.clear()


@ray.remote(num_cpus=1, max_retries=0)  # type: ignore[untyped-decorator]
def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class RayPool:
    """Ray Core tasks, one CPU each, at most `in_flight` submitted at a time.

    address: None starts a cluster of our own on this machine and ends it at `close`; anything else joins a
    running one, to which the four packages (and nothing else) are shipped.
    """

    def __init__(
        self,
        address: str | None,
        cpus: int | None,
        in_flight: int | None,
        dashboard: bool = False,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        if address is not None:
            _require_listener(address)
        if ray.is_initialized():
            raise RunnerError("Ray is already running in this process: close the other run first")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "runtime_env": runtime_env,
        }
        if address is None:
            # address="local": a bare init would join any cluster that happens to run on this machine.
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=dashboard,
                object_store_memory=256 << 20,  # payloads are paths and receipts
                _node_ip_address="127.0.0.1",
                **common,
            )
        else:
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError) as error:
                hint = "; where it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
                raise RunnerError(f"no Ray cluster answers at {address}: {one_line(error)}{hint}") from None
        slots = int(ray.cluster_resources().get("CPU", 1))
        self._limit = in_flight or 2 * max(1, slots)
        self._flying: dict[Any, Any] = {}

    @property
    def free(self) -> int:
        return self._limit - len(self._flying)

    @property
    def busy(self) -> int:
        return len(self._flying)

    def share(self, value: Any) -> Any:
        size = len(cloudpickle.dumps(value))
        if size > SHARED_BYTES_MAX:
            raise RunnerError(f"stages serialise to {size} bytes, over {SHARED_BYTES_MAX}: pass data by path")
        return ray.put(value)

    def submit(self, key: Any, function: Callable[..., Any], *args: Any) -> None:
        self._flying[_call.remote(function, *args)] = key

    def wait(self, timeout_s: float) -> list[tuple[Any, Any]]:
        refs = list(self._flying)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready:  # take whatever else is ready too
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return [(self._flying.pop(ref), _result(ref)) for ref in ready]

    def close(self) -> None:
        for ref in self._flying:
            ray.cancel(ref, force=True)
        self._flying.clear()
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Refuse HOST:PORT where nothing listens: Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            raise RunnerError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


def _result(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except (rx.WorkerCrashedError, rx.OutOfMemoryError, rx.NodeDiedError, rx.LocalRayletDiedError) as error:
        return Lost(one_line(error), worker_died=True)
    except rx.RayTaskError as error:
        if isinstance(error.cause, StopRun):
            raise error.cause from None
        return Lost(one_line(error.cause or error), worker_died=False)
    except rx.RayError as error:
        return Lost(one_line(error), worker_died=True)

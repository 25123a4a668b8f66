"""Run a function in a disposable process, with a wall-time and a memory limit.

Native decoders crash, hang and eat memory on hostile files; here that costs one worker and gives a named
error. One worker serves many calls; it is replaced when it dies, when a limit kills it, and after
`Limits.calls` calls. It is a plain `python -m pipeline.isolate`, not a `multiprocessing` child, because that
would import the caller's main module again (inside a Ray worker: Ray's). It ends when its parent does: its
only input is a pipe from the parent, watched by a thread, and the pipe breaks with the parent.
Source: DESIGN 4 (strict decode); spec/formats.md 3; spec/faults.md D8.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import resource
import select
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from schemas.quality import Reason

T = TypeVar("T")
_LENGTH = struct.Struct("<Q")
_START_S = 60.0  # a start takes 0.1 s; the rest is for a machine that is overloaded


@dataclass(frozen=True, slots=True)
class Limits:
    """seconds: wall time of one call; memory: bytes of address space that a call may add to what the worker
    has mapped before it; calls: after this many a worker is replaced, which returns what its calls leaked."""

    seconds: float = 600.0
    memory: int = 4 << 30
    calls: int = 200


class IsolationError(RuntimeError):
    """A call that did not come back: decoder_crashed, timeout or out_of_memory, and one line of detail."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Worker:
    """One disposable process. Calls from several threads run one after another."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = 0

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in the worker. The function is a module's top-level name; arguments and answer
        are pickled. Raises what the function raises, or IsolationError when it did not come back."""
        request = pickle.dumps((function, args, self.limits.memory))
        with self._lock:
            if self._process is not None and (
                self._process.poll() is not None or self._calls >= self.limits.calls
            ):
                self.close()
            process = self._process or self._start()
            self._calls += 1
            try:
                _send(_pipe(process.stdin), request)
                answer = _receive(process, time.monotonic() + self.limits.seconds)
            except TimeoutError:
                self.close()
                name = getattr(function, "__name__", "call")
                raise IsolationError(
                    Reason.TIMEOUT, f"{name} took more than {self.limits.seconds:g} s"
                ) from None
            except (BrokenPipeError, EOFError):
                status = process.wait()
                self.close()
                raise _died(status) from None
            except BaseException:
                self.close()  # interrupted between request and answer: the next call must not read this one's
                raise
        good, value = pickle.loads(answer)
        if good:
            return value  # type: ignore[no-any-return]
        if isinstance(value, MemoryError):
            raise IsolationError(Reason.OUT_OF_MEMORY, f"more than {self.limits.memory >> 20} MiB needed")
        raise value

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End the process, if there is one; the next call starts another."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                _pipe(pipe).close()
            except BrokenPipeError:
                continue  # what was buffered for a dead worker has no reader
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.isolate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        self._calls = 0
        _send(_pipe(self._process.stdin), pickle.dumps((sys.path, str(Path.cwd()))))
        _receive(self._process, time.monotonic() + _START_S)
        return self._process


def worker(limits: Limits) -> Worker:
    """This process's worker for these limits; started at its first call."""
    return _worker(limits, os.getpid())


@functools.cache
def _worker(limits: Limits, pid: int) -> Worker:
    return Worker(limits)  # keyed by pid: a forked child must not talk into its parent's pipes


def _died(status: int) -> IsolationError:
    # SIGKILL that we did not send comes from the kernel when memory runs out.
    if status == -9:
        return IsolationError(Reason.OUT_OF_MEMORY, "the worker was killed (SIGKILL)")
    what = f"signal {-status}" if status < 0 else f"exit status {status}"
    return IsolationError(Reason.DECODER_CRASHED, f"the worker ended with {what}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    fd = _pipe(process.stdout).fileno()
    size = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))[0]
    return _read(fd, size, deadline)


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# --- the worker's side ------------------------------------------------------------------------------------


def _main() -> None:
    # Answers leave by a private descriptor; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:], folder = pickle.loads(_request(0))
    os.chdir(folder)
    _send(answers, b"ready")
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while True:
        _send(answers, _answer(requests.get()))


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    """Hands requests over; ends the process at once when the parent is gone, even in the middle of a call
    (native decoders run without the interpreter's lock)."""
    while True:
        try:
            requests.put(_request(0))
        except EOFError:
            os._exit(0)


def _request(fd: int) -> bytes:
    size = _LENGTH.unpack(_read(fd, _LENGTH.size, None))[0]
    return _read(fd, size, None)


def _answer(request: bytes) -> bytes:
    try:
        function, args, memory = pickle.loads(request)  # imports what the function needs, before the limit
        _limit(memory)
        answer = (True, function(*args))
    except Exception as error:  # noqa: BLE001 - the process boundary: any error is carried to the caller
        answer = (False, _portable(error))
    _limit(None)
    return pickle.dumps(answer)


def _limit(memory: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if memory is None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else a RuntimeError with its type and text."""
    if isinstance(error, MemoryError):
        return MemoryError()
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except (TypeError, ValueError, AttributeError, pickle.PicklingError):
        pass
    where = traceback.extract_tb(error.__traceback__)[-1]
    return RuntimeError(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")


if __name__ == "__main__":
    _main()

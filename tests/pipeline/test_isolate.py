"""A call that crashes, hangs or eats memory costs one worker and gives a named error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.isolate import IsolationError, Limits, Worker
from schemas.quality import Reason


def add(a: int, b: int) -> int:
    return a + b


def my_pid() -> int:
    return os.getpid()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(seconds: float) -> None:
    time.sleep(seconds)


def allocate(mebibytes: int) -> int:
    return len(bytearray(mebibytes << 20))


def refuse() -> None:
    raise ValueError("no frames in here")


def shout() -> str:
    os.write(1, b"a library that prints to standard output\n")
    return "fine"


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


def raise_unpicklable() -> None:
    raise Odd(1, 2)


@pytest.fixture
def worker():
    made = Worker(Limits(seconds=10, memory=512 << 20, calls=100))
    yield made
    made.close()


def test_a_worker_is_reused_while_healthy_and_replaced_after_its_calls(worker):
    first = worker.call(my_pid)
    assert first != os.getpid()
    assert [worker.call(my_pid) for _ in range(3)] == [first] * 3
    short = Worker(Limits(calls=2))
    try:
        a, b, c = (short.call(my_pid) for _ in range(3))
    finally:
        short.close()
    assert a == b != c


def test_a_segfault_is_a_named_error_and_the_next_call_works(worker):
    with pytest.raises(IsolationError) as caught:
        worker.call(crash)
    assert caught.value.reason is Reason.DECODER_CRASHED and "signal 11" in str(caught.value)
    assert worker.call(add, 1, 2) == 3


def test_a_hang_is_killed_at_its_time_limit():
    patient = Limits()
    worker = Worker(patient)
    try:
        worker.call(add, 0, 0)  # the first call of a process imports this module, at its leisure
        pid, worker.limits = worker.pid, Limits(seconds=0.5)
        started = time.monotonic()
        with pytest.raises(IsolationError) as caught:
            worker.call(hang, 60)
        assert caught.value.reason is Reason.TIMEOUT and time.monotonic() - started < 10
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        worker.limits = patient
        assert worker.call(add, 1, 1) == 2
    finally:
        worker.close()


def test_memory_above_the_limit_is_a_named_error_and_below_it_is_not(worker):
    assert worker.call(allocate, 256) == 256 << 20
    with pytest.raises(IsolationError) as caught:
        worker.call(allocate, 1024)
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert worker.call(allocate, 256) == 256 << 20


def test_an_error_of_the_function_comes_back_as_itself(worker):
    with pytest.raises(ValueError, match="no frames in here"):
        worker.call(refuse)
    with pytest.raises(RuntimeError, match="Odd: 1 2"):
        worker.call(raise_unpicklable)


def test_printing_to_standard_output_does_not_disturb_the_answer(worker):
    assert worker.call(shout) == "fine"


def test_a_worker_that_died_between_calls_is_replaced(worker):
    first = worker.call(my_pid)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    assert worker.call(my_pid) != first


def test_a_worker_ends_with_a_killed_parent_in_the_middle_of_a_call():
    script = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from test_isolate import *\n"
        "w = Worker(Limits())\n"
        "print(w.call(my_pid), flush=True)\n"
        "w.call(hang, 120)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(50):
        if not _running(child):
            return
        time.sleep(0.1)
    pytest.fail(f"worker {child} outlived its parent by 5 s")


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

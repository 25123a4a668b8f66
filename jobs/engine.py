"""One supervised `vllm serve`: its command line, and a thread that starts, probes and restarts it.

vLLM lives in an environment of its own (`make setup-vlm`) and is reached over HTTP alone. An engine that
died, or that answers no more, is ended with its whole process group and started anew at the same address, so
that clients which put it aside find it again. Source: DESIGN 4 (captions); spec/faults.md V5.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, Field

import jobs.engine_guard
from pipeline.caption.frames import Limits
from pipeline.stage import one_line
from schemas.errors import UserError

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""What a program of another environment must not inherit: it would import this project's packages."""
STOP_S = jobs.engine_guard.GRACE_S + 5.0
TAIL_BYTES, TAIL_CHARACTERS = 16384, 200


class EngineError(UserError):
    """vLLM cannot be started, or does not stay up."""


class EngineConfig(BaseModel):
    """How engines are started by --serve. Nothing here changes what a caption is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    program: str = Field(
        default="", description="vLLM's program; .venv-vlm/bin/vllm beside this environment if empty"
    )
    engines: int | None = Field(
        default=None, ge=1, description="how many; all GPUs / tensor_parallel if null, 1 without GPUs"
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of one engine, of one machine")
    dtype: str = Field(default="bfloat16", description="of the weights")
    sequences: int = Field(default=64, ge=1, description="most requests that one engine works on at once")
    arguments: tuple[str, ...] = Field(default=(), description="further arguments in vLLM's own words")
    logs: str = Field(
        default="", description="folder for logs on the engine's machine; its temporary one if empty"
    )
    start_s: float = Field(default=1200, gt=0, description="most seconds from its start until it serves")
    probe_s: float = Field(default=5, gt=0, description="seconds between two probes")
    hang_s: float = Field(default=120, gt=0, description="an engine that gives no token for so long is hung")
    restarts: int = Field(default=3, ge=0, description="restarts in a row before an engine is given up")
    steady_s: float = Field(default=600, ge=0, description="after serving so long, restarts count anew")


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: a hub id or a folder, its revision, and what requests may hold."""

    model: str
    revision: str
    limits: Limits


def served_name(model: str) -> str:
    """The name that requests and captions give a model: its hub id, or the last part of its folder."""
    return Path(model).name if Path(model).is_absolute() or Path(model).is_dir() else model


def command(config: EngineConfig, program: str, served: Served, host: str, port: int) -> list[str]:
    """The command line of one engine. docs/vllm.md says why each setting is what it is."""
    return [
        program,
        "serve",
        served.model,
        *(["--revision", served.revision] if served.revision else []),
        "--served-model-name",
        served_name(served.model),
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        config.dtype,
        "--max-model-len",
        str(served.limits.context),
        "--max-num-seqs",
        str(config.sequences),
        "--tensor-parallel-size",
        str(config.tensor_parallel),
        "--limit-mm-per-prompt",
        json.dumps({"image": served.limits.max_images, "video": 0}),
        "--structured-outputs-config",
        json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
        "--generation-config",
        "vllm",
        "--mm-processor-cache-gb",
        "0",
        "--disable-uvicorn-access-log",
        *config.arguments,
    ]


def environment(base: Mapping[str, str], program: str, model: str) -> dict[str, str]:
    """What the program inherits: GPUs as they were given, nothing of this environment, no telemetry, and no
    hub where the model is a folder."""
    kept = {key: value for key, value in base.items() if key not in FOREIGN}
    kept["PATH"] = os.pathsep.join(filter(None, (str(Path(program).parent), base.get("PATH"))))
    kept |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(model).is_dir():
        kept["HF_HUB_OFFLINE"] = "1"
    return kept


def program_of(config: EngineConfig) -> str:
    """Raises EngineError when vLLM is not on this machine."""
    program = config.program or str(Path(sys.prefix).parent / ".venv-vlm" / "bin" / "vllm")
    found = shutil.which(program)
    if found is None:
        raise EngineError(
            f"{program} is no program on {socket.gethostname()}: run `make setup-vlm` there, or say where "
            "vLLM is with engines.program"
        )
    return str(Path(found).absolute())


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class State:
    """starts: how often it was started. why: of its last end, one line; "" while there was none."""

    url: str
    phase: Phase
    starts: int
    why: str = ""


class Engine:
    """Starts at once, in a thread. `state` never blocks; `stop` ends every process of the engine.

    line, env: of the program. log: every start appends to it. One that never served is given up at once: what
    keeps it from starting (a wrong name, too little memory) will not pass.
    """

    def __init__(self, config: EngineConfig, line: list[str], env: Mapping[str, str], url: str, log: Path):
        self.config, self.log = config, log
        self._line, self._env, self._url = line, dict(env), url
        self._phase, self._starts, self._why = Phase.STARTING, 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # a start and `stop` exclude each other
        self._thread = threading.Thread(target=self._supervise, name="engine", daemon=True)
        self._thread.start()

    def state(self) -> State:
        return State(self._url, self._phase, self._starts, self._why)

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            self._end()
        self._thread.join()
        self._phase = Phase.STOPPED

    # --- the thread ---

    def _supervise(self) -> None:
        in_a_row, limit = 0, 0
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._launch()
            why, served_s = self._watch()
            if self._stopping.is_set():
                return
            self._why = f"{why}; its log is {socket.gethostname()}:{self.log}{self._tail()}"
            with self._lock:
                self._end()
            in_a_row = 1 if served_s >= self.config.steady_s else in_a_row + 1
            limit = self.config.restarts if served_s > 0 else limit
            if in_a_row > limit:
                self._phase = Phase.FAILED
                return
            self._phase = Phase.STARTING

    def _launch(self) -> None:
        self._starts += 1
        # -I: the guard's folder, this package, is no place to import the standard library from.
        guarded = [sys.executable, "-I", jobs.engine_guard.__file__, *self._line]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def _watch(self) -> tuple[str, float]:
        """Until the engine is no good any more: why, and how many seconds it served."""
        started = time.monotonic()
        served: float | None = None
        with httpx.Client(base_url=self._url, timeout=self.config.hang_s, trust_env=False) as http:
            while not self._stopping.is_set():
                if self._process is None or self._process.poll() is not None:
                    return "it ended", time.monotonic() - served if served else 0.0
                if served is None:
                    if _healthy(http):
                        served = time.monotonic()
                        self._phase = Phase.SERVING
                    elif time.monotonic() - started > self.config.start_s:
                        return f"it did not serve within {self.config.start_s:g} s", 0.0
                elif fault := _fault(http, served_name(self._line[2])):
                    return fault, time.monotonic() - served
                self._stopping.wait(self.config.probe_s if served else min(1.0, self.config.probe_s))
        return "", 0.0

    def _end(self) -> None:
        """End the process group: asked first, by closing the guard's input, then for certain."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _tail(self) -> str:
        """The last line of the log that speaks of an error."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [" ".join(line.split()) for line in lines if "error" in line.lower()]
        return f"; it says: {errors[-1][-TAIL_CHARACTERS:]}" if errors else ""


def _healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def _fault(http: httpx.Client, model: str) -> str:
    """What is wrong with an engine that served before; "" when it gives a token. /health alone answers while
    the process that computes stands still."""
    try:
        health = http.get("/health")
        if health.status_code != 200:
            return f"it answers HTTP {health.status_code} at /health"
        answer = http.post("/v1/completions", json={"model": model, "prompt": ".", "max_tokens": 1})
    except httpx.TimeoutException:
        return f"it gave no token for {http.timeout.read:g} s"
    except httpx.TransportError as error:
        return f"it does not answer ({one_line(error)})"
    return f"it answers HTTP {answer.status_code}" if answer.status_code >= 500 else ""

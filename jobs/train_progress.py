"""The terminal line of a training run: step, loss, rates, and the time that is left."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jobs.train import Told
from trainer.curriculum import Stage
from trainer.metrics import Record

QUIET_S = 10.0
"""Between lines where there is no terminal."""


class Progress:
    """A live line on a terminal, a line every 10 s elsewhere, or JSON lines (one a step) on stderr."""

    def __init__(self, json_logs: bool = False) -> None:
        self.told = Told(self._say, self._begin, self._seen)
        self._json, self._console = json_logs, Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._stage: Stage | None = None
        self._expert = ""
        self._first, self._began, self._printed = 0, 0.0, 0.0

    def __enter__(self) -> Progress:
        if not self._json and self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def _say(self, line: str) -> None:
        if self._json:
            print(json.dumps({"say": line}, ensure_ascii=False), file=sys.stderr, flush=True)
        else:
            self._console.print(line, markup=False, soft_wrap=True)

    def _begin(self, stage: Stage, expert: str) -> None:
        self._stage, self._expert, self._began = stage, expert, 0.0

    def _seen(self, record: Record) -> None:
        now = time.monotonic()
        if not self._began:
            # The first step, which compiles and fills queues, says nothing of the next ones.
            self._began, self._first = now, record.step
        if self._json:
            print(json.dumps(record.row()), file=sys.stderr, flush=True)
        elif self._live is not None:
            self._live.update(Text(self._line(record, now)))
        elif now - self._printed > QUIET_S or self._stage is None or record.step + 1 == self._stage.steps:
            self._printed = now
            self._console.print(self._line(record, now), markup=False, soft_wrap=True)

    def _line(self, record: Record, now: float) -> str:
        steps = record.step + 1 if self._stage is None else self._stage.steps
        done = record.step - self._first
        left = human((now - self._began) / done * (steps - record.step - 1)) if done else "?"
        name = "" if self._stage is None else f"stage {self._stage.name} "
        return f"{name}{self._expert} {record.step + 1}/{steps}: {record.line()}; {left} left"


def human(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"

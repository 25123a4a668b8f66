"""Live progress of a run: per stage done, rejected, failed, rate; and the time that is left."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pipeline.stage import Receipt
from schemas.quality import Status

_QUIET_S = 10.0


@dataclass
class Progress:
    """Counts receipts and draws them: a live table on a terminal, a line every 10 s elsewhere, or JSON lines.

    `total` is the number of clips the run has to look at; `finished` those that came to their end.
    """

    stages: tuple[str, ...]
    json_logs: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True))
    phase: str = "start"
    total: int = 0
    finished: int = 0
    counts: Counter[tuple[str, Status]] = field(default_factory=Counter)
    _started: float = field(default_factory=time.monotonic)
    _entered: float = field(default_factory=time.monotonic)
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    _printed: float = 0.0
    _live: Live | None = None

    def __enter__(self) -> Progress:
        if not self.json_logs and self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.__exit__(None, None, None)
            self._live = None

    def receipts(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            self.counts[receipt.stage, receipt.status] += 1
        self.tick()

    def clip_finished(self) -> None:
        """One clip came to its end in this run."""
        self.finished += 1
        self._ends.append(time.monotonic())

    def enter(self, phase: str) -> None:
        self.phase, self._entered = phase, time.monotonic()
        self.tick(force=True)

    def tick(self, force: bool = False) -> None:
        now = time.monotonic()
        if self._live:
            self._live.update(self._table())
        elif force or now - self._printed > _QUIET_S:
            self._printed = now
            if self.json_logs:
                print(json.dumps(self.record()), file=sys.stderr, flush=True)
            else:
                self.console.print(self._line(), markup=False, highlight=False)

    def rate(self) -> float:
        """Clips finished per second, over the last few hundred."""
        if len(self._ends) < 2:
            return 0.0
        return (len(self._ends) - 1) / max(1e-9, time.monotonic() - self._ends[0])

    def eta_s(self) -> float | None:
        rate = self.rate()
        return (self.total - self.finished) / rate if rate else None

    def record(self) -> dict[str, object]:
        """The state as one flat JSON object."""
        eta = self.eta_s()
        return {
            "phase": self.phase,
            "elapsed_s": round(time.monotonic() - self._started, 1),
            "clips": self.total,
            "finished": self.finished,
            "clips_per_s": round(self.rate(), 3),
            "eta_s": None if eta is None else round(eta),
            "stages": {stage: {str(s): self.counts[stage, s] for s in Status} for stage in self.stages},
        }

    def _line(self) -> str:
        parts = [f"{s} {self.counts[s, Status.OK]}" for s in self.stages if self.counts[s, Status.OK]]
        bad = {s: sum(self.counts[st, s] for st in self.stages) for s in (Status.REJECTED, Status.FAILED)}
        return (
            f"[{self.phase}] {self.finished}/{self.total} clips, {_human(self.eta_s())} left, "
            f"{bad[Status.REJECTED]} rejected, {bad[Status.FAILED]} failed; " + ", ".join(parts)
        )

    def _table(self) -> Table:
        table = Table(
            title=f"{self.phase}: {self.finished}/{self.total} clips, {self.rate():.2f}/s, "
            f"{_human(self.eta_s())} left",
            title_justify="left",
        )
        table.add_column("stage")
        for name in ("done", "rejected", "failed", "per s"):
            table.add_column(name, justify="right")
        elapsed = max(1e-9, time.monotonic() - self._entered)
        for stage in self.stages:
            n = [self.counts[stage, s] for s in (Status.OK, Status.REJECTED, Status.FAILED)]
            table.add_row(stage, *(str(x) for x in n), f"{sum(n) / elapsed:.2f}")
        return table


def _human(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{secs:02d}s"

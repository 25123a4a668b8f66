"""Where to cut a recording: from its signals and events to segments. Pure.

Lengths are exact: presentation times in ticks, never frames at a nominal rate. Source: DESIGN 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.clips.signals import Bools, Signals, runs
from schemas.clip import ClipKind
from schemas.event import GameEvent
from schemas.segment import LeftOut, Segment
from schemas.timeline import Span

# Of two reasons for one frame the first is named.
REASONS = (
    (LeftOut.MENU, "menu"),
    (LeftOut.DEATH, "dead"),
    (LeftOut.LOADING, "loading"),
    (LeftOut.IDLE, "idle"),
)


class ClipsConfig(BaseModel):
    """How recordings are cut into clips. A recording is cut once, when it is new: a changed setting is for
    the recordings that come after."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    enabled: bool = Field(default=True, description="off: every recording is one clip as it is")
    navigation_min_s: float = Field(default=30.0, gt=0, description="shortest navigation clip, in seconds")
    navigation_max_s: float = Field(default=60.0, gt=0, description="longest navigation clip")
    event_min_s: float = Field(default=10.0, gt=0, description="shortest event clip")
    event_max_s: float = Field(default=30.0, gt=0, description="longest event clip")
    event_border_s: float = Field(
        default=2.0,
        ge=0,
        description="an event clip shows this much before its first and after its last event",
    )
    idle_s: float = Field(
        default=5.0, gt=0, description="a still picture without input that lasts longer is left out"
    )
    margin_s: float = Field(
        default=0.2,
        ge=0,
        description="left out on either side of a menu, death, loading or idle stretch, up to the next cut",
    )
    timeout_s: float = Field(
        default=14400.0, gt=0, description="wall time of one recording in the decode worker"
    )
    memory_mb: int = Field(
        default=4096, gt=0, description="address space, in MiB, that one recording may add to the worker"
    )
    worker_calls: int = Field(
        default=200, gt=0, description="recordings after which the decode worker is replaced"
    )

    @model_validator(mode="after")
    def _ordered(self) -> ClipsConfig:
        for name in ("navigation", "event"):
            least, most = getattr(self, f"{name}_min_s"), getattr(self, f"{name}_max_s")
            if least > most:
                raise ValueError(f"{name}_min_s is {least:g}, more than {name}_max_s ({most:g})")
        if 2 * self.event_border_s > self.event_max_s:
            raise ValueError("event_border_s leaves no room in event_max_s")
        return self


def segments(signals: Signals, events: Sequence[GameEvent], config: ClipsConfig) -> list[Segment]:
    """Segments that partition the F frames of a recording, in order. F > 0.

    events: in presented frames of the file. A recording with nothing to leave out or to cut, and not longer
    than a clip may be, is one clip, however short; so is one that no clip could be made of.
    """
    cutter = _Cutter(signals, events, config)
    whole = Span(0, len(signals))
    reasons = cutter.left_out() if config.enabled else []
    cuts = [int(k) for k in np.flatnonzero(signals.cut)] if config.enabled else []
    fits = not config.enabled or cutter.length(whole) <= cutter.navigation[1]
    if fits and not reasons and not cuts:
        return [cutter.as_it_is()]
    out = [Segment(start=s.start, stop=s.stop, left_out=why) for s, why in reasons]
    out += [s for run in cutter.between([s for s, _ in reasons], cuts) for s in cutter.clips(run)]
    if all(s.kind is None for s in out):
        return [cutter.as_it_is()]
    return sorted(out, key=lambda s: s.start)


class _Cutter:
    def __init__(self, signals: Signals, events: Sequence[GameEvent], config: ClipsConfig) -> None:
        self.signals = signals
        self.events = sorted((Span(e.start, e.stop) for e in events), key=lambda s: s.start)
        self.navigation = (Fraction(config.navigation_min_s), Fraction(config.navigation_max_s))
        self.event = (Fraction(config.event_min_s), Fraction(config.event_max_s))
        self.border = Fraction(config.event_border_s)
        self.margin = Fraction(config.margin_s)
        step = int(np.median(np.diff(signals.pts))) if len(signals) > 1 else 1
        # Ticks at which each frame begins; the last entry is the end of the last frame.
        self.edges: npt.NDArray[np.int64] = np.append(signals.pts, signals.pts[-1] + step)

    # --- lengths ---

    def length(self, span: Span) -> Fraction:
        """Seconds."""
        return self._between(span.start, span.stop)

    def _between(self, start: int, stop: int) -> Fraction:
        return int(self.edges[stop] - self.edges[start]) * self.signals.time_base

    def _first_at(self, start: int, seconds: Fraction) -> int:
        """The first edge at least that long (or, below 0, at most that long before) frame `start`."""
        ticks = int(self.edges[start]) + seconds / self.signals.time_base
        return int(np.searchsorted(self.edges, math.ceil(ticks)))

    def _last_at(self, start: int, seconds: Fraction) -> int:
        """The last edge at most that long behind frame `start`."""
        ticks = int(self.edges[start]) + seconds / self.signals.time_base
        return int(np.searchsorted(self.edges, math.floor(ticks), side="right")) - 1

    # --- what is left out ---

    def left_out(self) -> list[tuple[Span, LeftOut]]:
        """Stretches that no clip may hold, with their margins, in order; a frame has its first reason."""
        taken = np.zeros(len(self.signals), np.bool_)
        marks: dict[LeftOut, Bools] = {}
        for reason, column in REASONS:
            marks[reason] = getattr(self.signals, column) & ~taken
            taken |= marks[reason]
        for own in marks.values():
            for start, stop in runs(own):
                for k in self._margin(start, stop):
                    own[k] |= not taken[k]
                    taken[k] = True
        found = [(Span(a, b), reason) for reason, own in marks.items() for a, b in runs(own)]
        return sorted(found, key=lambda pair: pair[0].start)

    def _margin(self, start: int, stop: int) -> list[int]:
        """Frames within the margin of a stretch. A cut ends it: what lies beyond is another scene."""
        cut, n, out = self.signals.cut, len(self.signals), []
        k = start - 1
        while k >= 0 and not cut[k + 1] and self._between(k, start) <= self.margin:
            out.append(k)
            k -= 1
        k = stop
        while k < n and not cut[k] and self._between(stop, k + 1) <= self.margin:
            out.append(k)
            k += 1
        return out

    def between(self, taken: list[Span], cuts: list[int]) -> list[Span]:
        """What remains, divided at the cuts."""
        free = np.ones(len(self.signals), np.bool_)
        for span in taken:
            free[span.slice()] = False
        out = []
        for start, stop in runs(free):
            edges = [start, *(c for c in cuts if start < c < stop), stop]
            out += [Span(a, b) for a, b in pairwise(edges)]
        return out

    # --- what is kept ---

    def as_it_is(self) -> Segment:
        whole = Span(0, len(self.signals))
        event = bool(self.events) and self.length(whole) <= self.event[1]
        return _clip(whole, ClipKind.EVENT if event else ClipKind.NAVIGATION)

    def clips(self, run: Span) -> list[Segment]:
        """Segments of one run: frames that belong together, without a cut."""
        long = self.length(run)
        if self.navigation[0] <= long <= self.navigation[1]:
            return [_clip(run, ClipKind.NAVIGATION)]
        if long < self.event[0]:
            return [_short(run)]
        inside = [
            Span(e.start, min(e.stop, run.stop)) for e in self.events if run.start <= e.start < run.stop
        ]
        if long < self.navigation[0] and long <= self.event[1]:
            return [_clip(run, ClipKind.EVENT) if inside else _short(run)]
        out, at = [], run.start
        for span in self._around(inside, run):
            out += [*self._navigation(at, span.start), _clip(span, ClipKind.EVENT)]
            at = span.stop
        return out + self._navigation(at, run.stop)

    def _around(self, events: list[Span], run: Span) -> list[Span]:
        """Event clips of a long run, in order: neighbours share one while they fit, and lie in its middle. A
        rest that is too short for a navigation clip goes to the event clips beside it, as far as they can."""
        longest = self.event[1] - 2 * self.border
        out: list[Span] = []
        while events:
            start, stop = events[0].start, min(events[0].stop, self._last_at(events[0].start, longest))
            while len(events) > 1 and self._between(start, events[1].stop) <= longest:
                events = events[1:]
                stop = max(stop, events[0].stop)
            span = self._centred(
                Span(start, max(stop, start + 1)), out[-1].stop if out else run.start, run.stop
            )
            if span is not None:
                out.append(span)
            events = [e for e in events[1:] if not out or e.start >= out[-1].stop]
        return self._grown(out, run)

    def _centred(self, events: Span, lo: int, hi: int) -> Span | None:
        """The shortest event clip inside [lo, hi) with a border on both sides of the events; None where there
        is no room."""
        least, most = self.event
        want = max(least, self.length(events) + 2 * self.border)
        start = max(lo, self._last_at(events.start, (self.length(events) - want) / 2))
        stop = min(self._first_at(start, want), self._last_at(start, most))
        if stop > hi:
            stop, start = hi, max(lo, self._last_at(hi, -want), self._first_at(hi, -most))
        return Span(start, stop) if least <= self._between(start, stop) <= most else None

    def _grown(self, spans: list[Span], run: Span) -> list[Span]:
        out: list[Span] = []
        for i, span in enumerate(spans):
            lo = out[-1].stop if out else run.start
            hi = spans[i + 1].start if i + 1 < len(spans) else run.stop
            if self._between(lo, span.start) < self.navigation[0]:
                span = Span(max(lo, self._first_at(span.stop, -self.event[1])), span.stop)
            if self._between(span.stop, hi) < self.navigation[0]:
                span = Span(span.start, min(hi, self._last_at(span.start, self.event[1])))
            out.append(span)
        return out

    def _navigation(self, start: int, stop: int) -> list[Segment]:
        """Navigation clips of [start, stop), evenly; what is too little for one is short."""
        if start == stop:
            return []
        least, most = self.navigation
        long = self._between(start, stop)
        for count in range(math.ceil(long / most), int(long / least) + 1):
            edges = [self._nearest(start, long * i / count) for i in range(count)] + [stop]
            if all(least <= self._between(a, b) <= most for a, b in pairwise(edges)):
                return [_clip(Span(a, b), ClipKind.NAVIGATION) for a, b in pairwise(edges)]
        if long < least:
            return [_short(Span(start, stop))]
        middle = self._last_at(start, most)
        return [_clip(Span(start, middle), ClipKind.NAVIGATION), *self._navigation(middle, stop)]

    def _nearest(self, start: int, seconds: Fraction) -> int:
        left = self._last_at(start, seconds)
        near = seconds - self._between(start, left)
        return left if near <= self._between(start, left + 1) - seconds else left + 1


def _clip(span: Span, kind: ClipKind) -> Segment:
    return Segment(start=span.start, stop=span.stop, kind=kind)


def _short(span: Span) -> Segment:
    return Segment(start=span.start, stop=span.stop, left_out=LeftOut.SHORT)

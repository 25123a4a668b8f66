"""Events of a recording, mined from the game's own log by the rules of the key map.

A rule tells of a record only where the log itself says that the player could see it (a witness on screen, a
distance, a bearing); everything else is left out and counted. Nothing is looked up in the pictures.
Source: spec/worldplay2.md k; DESIGN rules 1, 4; described for users in docs/sources.md.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pipeline.alignment import align
from pipeline.sources import SourceConfig
from pipeline.sources.gameplay import entry_of
from pipeline.sources.keymap import FIELD, EventPart, EventRule, LogPart, Seen
from pipeline.sources.records import Record, field_of, number_of, read_records
from pipeline.sources.sidecar import SidecarError, read_columns
from pipeline.stage import Unit
from pipeline.store import Store
from schemas.clip import FrameTable
from schemas.event import GameEvent
from schemas.strict_json import unprintable
from schemas.timeline import Span

NO_RULE = "no_rule"
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s_-]+")


@dataclass(frozen=True)
class Mined:
    """events: what the log tells, sorted by frame. left_out: records that are not told, counted by
    "type: reason"; reasons are no_rule, short, beyond (a limit of `within`) and unseen. Of types that have a
    rule, those outside the clip are not counted."""

    events: tuple[GameEvent, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def recording_events(
    unit: Unit, source: SourceConfig, pts: npt.NDArray[np.int64], time_base: Fraction
) -> tuple[GameEvent, ...]:
    """Events of a whole source file, in presented frames [start, stop) of it; () without an event log.

    pts: int64 [F], presentation times of all its frames in ticks of time_base. Raises as `mine` does.
    """
    frames = len(pts)
    table = FrameTable(
        time_base=time_base,
        pts=pts - pts[:1],
        source_index=np.arange(frames, dtype=np.int64),
        pixels=np.zeros(frames, np.uint64),
        ok=np.ones(frames, bool),
        repeat=np.zeros(frames, bool),
    )
    return mine(unit, source, table).events


def clip_events(unit: Unit, source: SourceConfig, table: FrameTable) -> tuple[GameEvent, ...]:
    """Events that overlap a clip, in frames [start, stop) of its media file, cut to the clip."""
    return mine(unit, source, table).events


def mine(unit: Unit, source: SourceConfig, table: FrameTable) -> Mined:
    """What the event log of a unit tells of the F frames of a table; nothing without a log or a part for it.

    A record of frames lies on the first frame of the table that shows its start or something later (a halved
    clip may skip the start itself); one of seconds on the nearest frame. A witness counts as far as the table
    shows it. Raises SidecarError when the log cannot be read or lacks a field that a rule reads, KeyMapError
    when no entry claims the clip any more.
    """
    sidecar = unit.clip.events
    part = entry_of(unit, source).events if sidecar is not None else None
    if sidecar is None or part is None or len(table) == 0:
        return Mined()
    if part.counters is not None:
        told = _changes(unit.source, sidecar.path, part, part.counters, table)
        return Mined(_merged(part, told, table))
    return _records(unit.source, sidecar.path, part, table)


@dataclass(frozen=True, slots=True)
class _Told:
    """One record that a rule tells of. rule: its index."""

    span: Span
    rule: int
    text: str


def _records(source: Store, path: str, part: EventPart, table: FrameTable) -> Mined:
    records = read_records(source, path, part)
    shown: dict[str, list[tuple[Record, Span]]] = defaultdict(list)
    for record in records.read:
        if (span := _span(record, part, table)) is not None:
            shown[record.type].append((record, span))
    by_type: dict[str, list[int]] = defaultdict(list)
    for i, rule in enumerate(part.rules):
        by_type[rule.type].append(i)
    told: list[_Told] = []
    left_out = Counter({f"{name}: {NO_RULE}": count for name, count in records.others.items()})
    for name, rules in by_type.items():
        for record, span in shown[name]:
            reason = ""
            for i in rules:
                rule = part.rules[i]
                reason = _against(rule, record, span, shown, table, path)
                if not reason:
                    told.append(_Told(span, i, _text(rule, record, part, path)))
                    break
            if reason:
                left_out[f"{name}: {reason}"] += 1
    return Mined(_merged(part, told, table), dict(sorted(left_out.items())))


def _span(record: Record, part: EventPart, table: FrameTable) -> Span | None:
    """Frames of the table over which a record lies; None outside it."""
    if part.clock is not None and part.clock.unit == "frame":
        first, last = int(record.start) + part.first_frame, int(record.end) + part.first_frame
        index = table.source_index
        if last < index[0] or first > index[-1]:
            return None
        start = int(np.searchsorted(index, first, side="left"))
        return Span(start, max(start + 1, int(np.searchsorted(index, last, side="right"))))
    times = table.seconds + float(table.origin)
    half = float(np.median(np.diff(times))) / 2 if len(times) > 1 else 0.0
    begin, end = record.start - part.clock_start, record.end - part.clock_start
    if end < times[0] - half or begin > times[-1] + half:
        return None
    return Span(_nearest(times, begin), _nearest(times, end) + 1)


def _nearest(times: npt.NDArray[np.float64], time: float) -> int:
    right = min(int(np.searchsorted(times, time)), len(times) - 1)
    left = max(right - 1, 0)
    return left if time - times[left] <= times[right] - time else right


def _against(
    rule: EventRule,
    record: Record,
    span: Span,
    shown: Mapping[str, list[tuple[Record, Span]]],
    table: FrameTable,
    path: str,
) -> str:
    """Why a rule does not tell of a record; "" when it does."""
    if _seconds(table, span.start, span.stop - 1) < rule.min_s:
        return "short"
    if any(abs(number_of(record, name, path)) > largest for name, largest in rule.within.items()):
        return "beyond"
    if rule.seen is not None and not _seen(
        rule.seen, record, span, shown.get(rule.seen.type, ()), table, path
    ):
        return "unseen"
    return ""


def _seen(
    seen: Seen,
    record: Record,
    span: Span,
    witnesses: Iterable[tuple[Record, Span]],
    table: FrameTable,
    path: str,
) -> bool:
    wanted = [field_of(record, name, path) for name in seen.same]
    return any(
        lies.start <= span.start
        and _seconds(table, lies.stop - 1, span.start) <= seen.within_s
        and [field_of(witness, name, path) for name in seen.same] == wanted
        and all(str(field_of(witness, name, path)) in allowed for name, allowed in seen.where.items())
        for witness, lies in witnesses
    )


def _seconds(table: FrameTable, start: int, stop: int) -> float:
    """Seconds from one frame to another; negative when it is the earlier."""
    return float(int(table.pts[stop] - table.pts[start]) * table.time_base)


def _changes(source: Store, path: str, part: EventPart, counters: LogPart, table: FrameTable) -> list[_Told]:
    """Frames at which a counter differs from the last known value before it, in the sense of its rule."""
    columns = read_columns(source, path, counters)
    alignment = align(table, counters, columns, path)
    told = []
    for i, rule in enumerate(part.rules):
        values = alignment.at(columns[rule.column])
        known = np.flatnonzero(np.isfinite(values))
        step = np.diff(values[known]) * (1 if rule.change == "rises" else -1)
        told += [_Told(Span(int(k), int(k) + 1), i, rule.text) for k in known[1:][step > 0]]
    return told


def _text(rule: EventRule, record: Record, part: EventPart, path: str) -> str:
    def words(match: re.Match[str]) -> str:
        value = field_of(record, match[2], path)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise SidecarError(f"{path} record {record.number} ({record.type}): {match[2]} is no name")
        name = part.names.get(str(value), in_words(str(value)))
        if not name or unprintable(name):
            raise SidecarError(
                f"{path} record {record.number} ({record.type}): {match[2]} {value!r:.40} is not printable: "
                f"give it words under names"
            )
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}" if match[1] else name

    return FIELD.sub(words, rule.text)


def in_words(name: str) -> str:
    """A game's name for a thing as words: "ArmorBonus" -> "armor bonus", "key_red2" -> "key red2"."""
    return _WORD_BORDER.sub(" ", name).strip().lower()


def _merged(part: EventPart, told: list[_Told], table: FrameTable) -> tuple[GameEvent, ...]:
    """Events; those of one rule that follow each other within its merge_s are one."""
    events = []
    for i, rule in enumerate(part.rules):
        groups: list[list[_Told]] = []
        last = 0
        for one in sorted((t for t in told if t.rule == i), key=lambda t: (t.span.start, t.span.stop)):
            if groups and rule.merge_s and _seconds(table, last, one.span.start) <= rule.merge_s:
                groups[-1].append(one)
                last = max(last, one.span.stop - 1)
            else:
                groups.append([one])
                last = one.span.stop - 1
        for group in groups:
            text = group[0].text if len(group) == 1 else rule.many
            stop = max(t.span.stop for t in group)
            events.append(GameEvent(group[0].span.start, stop, rule.type or rule.column, rule.category, text))
    return tuple(sorted(events, key=lambda e: (e.start, e.stop, e.name)))

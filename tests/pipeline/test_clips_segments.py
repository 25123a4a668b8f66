"""Where recordings are cut, on made-up signals: exact lengths, reasons, and what is never lost."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.clips.segments import ClipsConfig, segments
from pipeline.clips.signals import Signals
from schemas.caption import EventCategory
from schemas.clip import ClipKind
from schemas.event import GameEvent
from schemas.segment import LeftOut, Segment

NTSC = Fraction(1, 30000)  # ticks of a 29.97 fps file: a frame lasts 1001
PLAIN = ClipsConfig(margin_s=0)


def signals(frames: int, step: int = 1001, base: Fraction = NTSC, **marks: list[slice]) -> Signals:
    def column(name: str) -> np.ndarray:
        out = np.zeros(frames, bool)
        for span in marks.get(name, []):
            out[span] = True
        return out

    names = ("key", "cut", "flash", "still", "menu", "dead", "loading", "idle")
    return Signals(
        time_base=base,
        pts=np.arange(frames, dtype=np.int64) * step + 4004,
        pixels=np.arange(frames, dtype=np.uint64),
        change=np.zeros(frames, np.float32),
        covered=np.zeros(frames, np.float32),
        **{name: column(name) for name in names},
    )


def fps30(seconds: float, **marks: list[slice]) -> Signals:
    return signals(round(seconds * 30), 1, Fraction(1, 30), **marks)


def event(start: int, stop: int | None = None) -> GameEvent:
    category = EventCategory.COMPLEX_INTERACTION
    return GameEvent(start, stop or start + 1, "monster_killed", category, "an imp is killed")


def shown(made: list[Segment]) -> list[tuple[int, int, str]]:
    return [(s.start, s.stop, str(s.kind or s.left_out)) for s in made]


@pytest.mark.parametrize(
    ("seconds", "events", "kind"),
    [(0.5, 0, "navigation"), (5, 1, "event"), (30, 1, "event"), (31, 1, "navigation"), (60, 0, "navigation")],
)
def test_a_recording_with_nothing_to_cut_out_stays_whole(seconds: float, events: int, kind: str) -> None:
    made = segments(fps30(seconds), [event(3)] * events, PLAIN)
    assert shown(made) == [(0, round(seconds * 30), kind)]


def test_a_recording_longer_than_a_clip_is_divided_evenly() -> None:
    assert shown(segments(fps30(150), [], PLAIN)) == [
        (0, 1500, "navigation"),
        (1500, 3000, "navigation"),
        (3000, 4500, "navigation"),
    ]


def test_lengths_are_measured_in_presentation_times_not_nominal_frames() -> None:
    # 1798 frames of 1001/30000 s last 59.993 s, 1799 last 60.027 s.
    assert len(segments(signals(1798), [], PLAIN)) == 1
    # Two clips of 30 s would need 1800 frames, so one is as long as it may be.
    assert shown(segments(signals(1799), [], PLAIN)) == [(0, 1798, "navigation"), (1798, 1799, "short")]
    assert shown(segments(signals(1800), [], PLAIN)) == [(0, 900, "navigation"), (900, 1800, "navigation")]


def test_cuts_menus_deaths_and_loading_end_clips_at_their_own_frames() -> None:
    seen = fps30(
        200,
        cut=[slice(1200, 1201), slice(2450, 2451)],
        menu=[slice(2400, 2450)],
        loading=[slice(3660, 3670)],
        dead=[slice(3650, 3665)],
    )
    assert shown(segments(seen, [], PLAIN)) == [
        (0, 1200, "navigation"),
        (1200, 2400, "navigation"),
        (2400, 2450, "menu"),
        (2450, 3650, "navigation"),
        (3650, 3665, "death"),
        (3665, 3670, "loading"),
        (3670, 4835, "navigation"),
        (4835, 6000, "navigation"),
    ]


def test_margins_surround_what_is_left_out_and_never_cross_a_cut() -> None:
    seen = fps30(200, menu=[slice(1200, 1260)], loading=[slice(3000, 3100)], cut=[slice(3000, 3001)])
    made = segments(seen, [], ClipsConfig(margin_s=0.2))
    assert [(s.start, s.stop, s.left_out) for s in made if s.kind is None] == [
        (1194, 1266, LeftOut.MENU),
        (3000, 3106, LeftOut.LOADING),
    ]


def test_a_run_of_10_to_30_s_is_kept_for_its_event_and_left_out_without_one() -> None:
    seen = fps30(60, cut=[slice(1200, 1201)])
    assert shown(segments(seen, [], PLAIN))[1] == (1200, 1800, "short")
    assert shown(segments(seen, [event(1500)], PLAIN))[1] == (1200, 1800, "event")
    # An event on the other side of the cut is not its own.
    assert shown(segments(seen, [event(1190, 1300)], PLAIN))[1] == (1200, 1800, "short")


def test_a_long_run_gives_event_clips_around_its_events_and_navigation_between_them() -> None:
    seen = fps30(150)
    made = segments(seen, [event(2100), event(2250)], PLAIN)
    clips = [s for s in made if s.kind is ClipKind.EVENT]
    assert len(clips) == 1
    assert clips[0].start + 60 <= 2100 and clips[0].stop >= 2251 + 60
    assert 300 <= clips[0].stop - clips[0].start <= 900
    assert all(s.kind for s in made)
    assert {s.stop - s.start <= 1800 for s in made} == {True}


def test_a_recording_that_no_clip_can_be_made_of_is_kept_whole() -> None:
    assert shown(segments(fps30(12, cut=[slice(100, 101)]), [], PLAIN)) == [(0, 360, "navigation")]
    assert shown(segments(fps30(10, menu=[slice(0, 300)]), [], PLAIN)) == [(0, 300, "navigation")]


def test_cutting_can_be_switched_off() -> None:
    off = ClipsConfig(enabled=False)
    seen = fps30(200, cut=[slice(100, 101)], menu=[slice(500, 800)])
    assert shown(segments(seen, [], off)) == [(0, 6000, "navigation")]


def test_lengths_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="navigation_min_s is 70, more than navigation_max_s"):
        ClipsConfig(navigation_min_s=70)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_segments_partition_the_recording_and_keep_every_length(data: st.DataObject) -> None:
    frames = data.draw(st.integers(1, 6000))
    spans = st.lists(
        st.tuples(st.integers(0, frames - 1), st.integers(1, 400)).map(lambda t: slice(t[0], t[0] + t[1])),
        max_size=4,
    )
    marks = {name: data.draw(spans) for name in ("menu", "dead", "loading", "idle")}
    cuts = [slice(k, k + 1) for k in data.draw(st.lists(st.integers(0, frames - 1), max_size=6))]
    step, base = data.draw(st.sampled_from([(1001, NTSC), (1, Fraction(1, 30)), (512, Fraction(1, 17920))]))
    seen = signals(frames, step, base, cut=cuts, **marks)
    events = [
        event(k, k + d)
        for k, d in data.draw(
            st.lists(st.tuples(st.integers(0, frames - 1), st.integers(1, 900)), max_size=8)
        )
    ]
    made = segments(seen, events, ClipsConfig(margin_s=data.draw(st.sampled_from([0, 0.2, 1]))))
    assert [made[0].start, made[-1].stop] == [0, frames]
    assert all(a.stop == b.start for a, b in pairwise(made))
    if len(made) == 1:
        return
    out = seen.menu | seen.dead | seen.loading | seen.idle
    for s in made:
        length = (s.stop - s.start) * step * base
        if s.kind is None:
            continue
        assert not out[s.start : s.stop].any() and not seen.cut[s.start + 1 : s.stop].any()
        least, most = (30, 60) if s.kind is ClipKind.NAVIGATION else (10, 30)
        assert least <= length <= most
        if s.kind is ClipKind.EVENT:
            assert any(s.start <= e.start < s.stop for e in events)


def test_events_that_fill_the_longest_event_clip_are_kept_at_any_rate() -> None:
    # 26 s of events and 2 s on either side are exactly the longest clip: at 29.97 fps it ends a frame early.
    for seen in (signals(4000), signals(4000, 512, Fraction(1, 17920))):
        second = Fraction(1) / ((seen.pts[1] - seen.pts[0]) * seen.time_base)
        first, last = 1500, 1500 + int(26 * second)
        made = segments(seen, [event(first), event(last - 1, last)], PLAIN)
        (clip,) = [s for s in made if s.kind is ClipKind.EVENT]
        assert clip.start < first - second and clip.stop > last + second

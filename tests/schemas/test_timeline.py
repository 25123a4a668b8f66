"""Windows, the 16 fps grid, latents, chunks and caption intervals. Source: faults W1, W5."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.timeline import (
    GRID_RATE,
    Span,
    TimelineError,
    chunk_latents,
    chunks_in,
    grid,
    interval_at,
    interval_of_latents,
    intervals,
    latent_ends,
    latent_entries,
    latents_of,
    latents_time,
    nearest,
    windows,
)

RATES = st.sampled_from(
    [Fraction(24000, 1001), Fraction(24), Fraction(25), Fraction(30000, 1001), Fraction(30), Fraction(35),
     Fraction(16), Fraction(60000, 1001), Fraction(21)]
)  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "count", "leftover"),
    [(0, 0, 0), (149, 0, 149), (150, 1, 0), (289, 2, 139), (290, 2, 0), (850, 6, 0), (900, 7, 50),
     (1125, 8, 135), (1800, 13, 110), (9000, 65, 30)],
)  # fmt: skip
def test_windows_count_and_leftover(frames: int, count: int, leftover: int) -> None:
    plan = windows(frames)
    assert (len(plan.spans), plan.leftover) == (count, leftover)
    if leftover and count:
        assert plan.spans[-1] == Span(frames - 150, frames)


@given(st.integers(0, 5000))
def test_windows_cover_every_frame_at_multiples_of_140(frames: int) -> None:
    plan = windows(frames)
    if frames < 150:
        assert plan.spans == () and plan.leftover == frames
        return
    covered = np.zeros(frames, bool)
    for span in plan.spans:
        assert len(span) == 150
        covered[span.slice()] = True
    assert covered.all()
    regular = plan.spans[:-1] if plan.leftover else plan.spans
    assert [s.start for s in regular] == [140 * i for i in range(len(regular))]
    assert frames - regular[-1].stop == plan.leftover


def test_illegal_windows_are_refused() -> None:
    with pytest.raises(TimelineError):
        windows(-1)
    with pytest.raises(TimelineError):
        windows(300, 150, 150)
    with pytest.raises(TimelineError):
        Span(3, 3)


@given(RATES, st.integers(1, 1200))
@settings(max_examples=60)
def test_grid_takes_the_nearest_frame_and_is_trimmed_to_whole_chunks(fps: Fraction, frames: int) -> None:
    time_base = 1 / (fps * 512)
    g = grid(np.arange(frames) * 512, time_base)
    if not len(g.frames):
        assert Fraction(frames - 1) / fps < Fraction(12, 16)
        return
    assert (len(g.frames) + 3) % 16 == 0 and g.latents == 4 * (len(g.frames) + 3) // 16
    times = [Fraction(k) / fps for k in range(frames)]
    half = 1 / (2 * fps)
    for entry, frame in enumerate(g.frames.tolist()):
        want = Fraction(entry, GRID_RATE)
        assert frame == nearest(times, want)
        assert abs(times[frame] - want) <= half
        assert g.jitter_s[entry] == pytest.approx(float(times[frame] - want), abs=1e-12)
    assert times[-1] - Fraction(len(g.frames) - 1, GRID_RATE) < Fraction(16, GRID_RATE)


def test_grid_of_a_35_fps_clip_of_the_pack() -> None:
    g = grid(np.arange(715) * 512, Fraction(1, 17920))
    assert (len(g.frames), g.latents) == (317, 80)
    assert latent_ends(g.frames)[:4].tolist() == [0, 9, 17, 26]
    assert np.abs(g.jitter_s).max() <= 1 / 70


def test_an_equal_distance_takes_the_earlier_frame() -> None:
    # 24 fps: grid entry 1 (1/16 s) lies exactly between frames 1 (1/24) and 2 (2/24).
    assert grid(np.arange(48), Fraction(1, 24)).frames[:3].tolist() == [0, 1, 3]


@given(st.lists(st.integers(1, 9), min_size=30, max_size=200), st.integers(0, 10**9))
@settings(max_examples=40)
def test_grid_depends_on_times_alone_not_on_their_origin(steps: list[int], origin: int) -> None:
    pts = np.cumsum([0, *steps])
    a, b = grid(pts, Fraction(1, 90)), grid(pts + origin, Fraction(1, 90))
    assert np.array_equal(a.frames, b.frames) and np.all(np.diff(a.frames) >= 0)
    assert a.repeats == int(np.count_nonzero(np.diff(a.frames) == 0))


def test_times_that_do_not_increase_are_refused() -> None:
    with pytest.raises(TimelineError):
        grid([0, 512, 512], Fraction(1, 17920))


@pytest.mark.parametrize(("entries", "latents"), [(13, 4), (125, 32), (1277, 320)])
def test_latents_of_whole_chunks(entries: int, latents: int) -> None:
    assert latents_of(entries) == latents


@given(st.integers(0, 3000))
def test_only_whole_chunks_have_latents(entries: int) -> None:
    m = chunks_in(entries)
    assert 16 * m - 3 <= entries or m == 0
    assert 16 * (m + 1) - 3 > entries
    if m == 0 or entries != 16 * m - 3:
        with pytest.raises(TimelineError):
            latents_of(entries)


def test_latents_partition_the_grid() -> None:
    spans = [latent_entries(k) for k in range(32)]
    assert spans[0] == Span(0, 1) and spans[1] == Span(1, 5) and spans[-1].stop == 125
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert latents_time(chunk_latents(0)) == (0, Fraction(13, 16))
    with pytest.raises(TimelineError):
        latent_entries(-1)


@given(st.fractions(min_value=Fraction(1, 100), max_value=400))
def test_intervals_partition_the_clip(duration: Fraction) -> None:
    parts = intervals(duration)
    assert parts[0][0] == 0 and parts[-1][1] == duration
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(b - a == 5 for a, b in parts[:-1]) and 0 < parts[-1][1] - parts[-1][0] <= 5
    for i, (a, b) in enumerate(parts):
        assert interval_at(duration, a) == interval_at(duration, (a + b) / 2) == i


def test_a_chunk_takes_the_interval_that_holds_its_middle() -> None:
    # Chunk 5 covers entries 77..92 (4.8125-5.8125 s): its middle, 5.3125 s, lies in the second interval.
    assert interval_of_latents(Fraction(10), chunk_latents(5)) == 1
    assert interval_of_latents(Fraction(10), chunk_latents(4)) == 0
    with pytest.raises(TimelineError):
        interval_at(Fraction(10), Fraction(10))

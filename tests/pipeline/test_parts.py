"""A part of a recording: decoded from a key frame inside the file, and still the frames of the whole pass."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from odd_media import flip_bits

from pipeline.alignment import align
from pipeline.damage import END
from pipeline.frames import Part, frame_pass
from pipeline.sources.keymap import LogPart
from schemas.clip import FrameTable

# Plain, long groups with B-frames and an edit list, a clock of milliseconds, no index, a container without
# presentation times, an open group of HEVC, variable rate.
FILES = [
    "nav05_keys_deathmatch.mp4",
    "odd_bframes_editlist.mp4",
    "odd_start1p5.mkv",
    "odd_fragmented.mp4",
    "odd_mpeg4.avi",
    "odd_hevc10.mp4",
    "odd_vfr.mp4",
]


class Keys:
    def __init__(self):
        self.key = []

    def see(self, index, picture):
        self.key.append(bool(picture.frame.key_frame))


def part_of(whole, keys, start, stop):
    behind = np.flatnonzero(keys[: start + 1])
    key = int(whole.pts[behind[-1]]) if len(behind) else None
    return Part(int(whole.pts[start]), int(whole.pts[stop]) if stop < len(whole) else END, key)


@pytest.mark.parametrize("name", FILES)
def test_a_part_shows_the_frames_of_the_whole_pass(footage, name):
    seen = Keys()
    whole = frame_pass(footage / name, [seen])
    n = len(whole)
    for start, stop in [(0, 20), (13, 35), (n // 2, n - 3), (n - 7, n)]:
        part = frame_pass(footage / name, part=part_of(whole, seen.key, start, stop))
        assert np.array_equal(part.pixels, whole.pixels[start:stop])
        assert np.array_equal(part.pts, whole.pts[start:stop])
        assert part.ok.all() and not part.report.damaged and not part.report.lost
        assert part.report.missing_packets == 0


def test_a_part_reads_no_more_than_it_needs(footage):
    seen = Keys()
    whole = frame_pass(footage / "nav05_keys_deathmatch.mp4", [seen])
    start = int(np.flatnonzero(seen.key)[1])
    part = frame_pass(footage / "nav05_keys_deathmatch.mp4", part=part_of(whole, seen.key, start, start + 10))
    assert part.report.packets < 30


def test_damage_inside_a_part_is_told_and_damage_elsewhere_is_not(footage, tmp_path):
    path = flip_bits(footage / "nav05_keys_deathmatch.mp4", tmp_path / "a.mp4", bits=1, seed=3)
    seen = Keys()
    whole = frame_pass(path, [seen])
    bad = np.flatnonzero(~whole.ok)
    assert len(bad)
    hit = frame_pass(path, part=part_of(whole, seen.key, int(bad[0]), int(bad[-1]) + 1))
    assert not hit.ok.all()
    clean = np.flatnonzero(whole.ok & (np.arange(len(whole)) > bad[-1] + 40))
    if len(clean) > 20:
        free = frame_pass(path, part=part_of(whole, seen.key, int(clean[0]), int(clean[-1]) + 1))
        assert free.ok.all()


INPUTS = ({"column": "a", "action": "yaw", "unit": "count", "sign": 1},)


def table(frames, origin, first):
    n = np.arange(frames)
    no = np.zeros(frames, np.bool_)
    return FrameTable(Fraction(1, 30), n, n + first, n.astype(np.uint64), ~no, no, origin)


def test_log_rows_of_a_part_are_those_of_its_own_frames():
    by_frame = LogPart(file="x.csv", row="next", inputs=INPUTS)
    rows = {"a": np.arange(1000.0)}
    assert align(table(60, Fraction(300, 30), 300), by_frame, rows, "x").at(rows["a"])[[0, -1]].tolist() == [
        300,
        359,
    ]
    by_time = LogPart(file="x.csv", row="next", time="t", inputs=INPUTS)
    rows = {"t": np.arange(1000) / 30, "a": np.arange(1000.0)}
    found = align(table(60, Fraction(300, 30), 300), by_time, rows, "x")
    assert found.at(rows["a"])[[0, -1]].tolist() == [300, 359]
    assert found.drift_frames == 0

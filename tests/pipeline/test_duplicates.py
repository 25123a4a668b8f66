"""Near-duplicates: any copy of the same footage, and nothing else; no footage in two splits."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from av.video.reformatter import VideoReformatter

from pipeline.frames import frame_pass
from pipeline.picture import Picture
from pipeline.quality.duplicates import HashTable, compare, drop, find_shared
from pipeline.quality.hashes import ClipHashes, Hashes, from_text, to_text


class Part:
    """Shows an observer the frames [start, stop) of a pass as a clip of its own."""

    def __init__(self, hashes: Hashes, start: int, stop: int) -> None:
        self.hashes, self.start, self.stop = hashes, start, stop

    def see(self, index: int, picture: Picture) -> None:
        if self.start <= index < self.stop:
            self.hashes.see(index - self.start, picture)


def hashed(path: Path, start: int = 0, stop: int = 1 << 30) -> ClipHashes:
    observer = Hashes()
    frame_pass(path, (Part(observer, start, stop),))
    return observer.hashes()


def same(a: ClipHashes, b: ClipHashes) -> bool:
    return compare(a.ms.astype(np.int64), a.bits, b.ms.astype(np.int64), b.bits) is not None


def table_of(clips: list[ClipHashes]) -> HashTable:
    return HashTable(
        np.cumsum([0, *(len(c) for c in clips)]),
        np.concatenate([c.ms for c in clips]),
        np.concatenate([c.bits for c in clips]),
    )


def dropped(clips: list[ClipHashes], split: str = "", eligible: list[bool] | None = None) -> dict[int, int]:
    table = table_of(clips)
    kept = np.array(eligible or [True] * len(clips))
    return drop(table, find_shared(table), kept, split or "t" * len(clips), 0.5)


@pytest.fixture(scope="module")
def nav02(footage: Path) -> ClipHashes:
    return hashed(footage / "nav02_mouse_map02.mp4")


COPIES = ["odd_h264.mkv", "odd_1080p.mp4", "odd_64x36.mp4", "odd_hevc10.mp4", "odd_mpeg4.avi", "odd_vfr.mp4"]


@pytest.mark.parametrize("name", COPIES)
def test_a_reencode_another_size_depth_or_frame_timing_is_the_same_footage(
    footage: Path, nav02: ClipHashes, name: str
) -> None:
    assert same(nav02, hashed(footage / name))


@pytest.mark.parametrize("name", ["q_blur_s4", "q_compress_crf38", "q_dark_035", "q_upscaled_from160"])
def test_a_blurred_darkened_or_badly_compressed_copy_is_the_same_footage(footage: Path, name: str) -> None:
    assert same(hashed(footage / "q_ref_crf18.mp4"), hashed(footage / f"{name}.mp4"))


@pytest.mark.soak  # 17 s
def test_distinct_clips_are_not_duplicates_even_of_one_map(footage: Path, nav02: ClipHashes) -> None:
    names = [
        "loop01_rewind_map02",
        "nav05_keys_deathmatch",
        "loop03_turn180_deathmatch_offpath",
        "q_ref_crf18",
    ]
    names += ["nonloop01_oneway_drop_e1m1", "event09_pickup_shotgun_e1m1", "bad04_menu", "odd_short_140f"]
    clips = [nav02, *(hashed(footage / f"{n}.mp4") for n in names)]
    assert not any(same(a, b) for a, b in itertools.combinations(clips, 2))


def test_a_walk_and_its_way_back_are_two_visits_to_one_corridor(footage: Path) -> None:
    path = footage / "loop01_rewind_map02.mp4"
    assert not same(hashed(path, 0, 544), hashed(path, 544))


def test_another_cut_smaller_marked_and_at_another_rate_is_the_same_footage(
    footage: Path, nav02: ClipHashes, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.mp4"
    reencode(footage / "nav02_mouse_map02.mp4", copy, 333, 900)
    clip = hashed(copy)
    found = compare(nav02.ms.astype(np.int64), nav02.bits, clip.ms.astype(np.int64), clip.bits)
    assert found is not None and found.ms > 0.8 * int(clip.ms[-1])


def reencode(source: Path, target: Path, start: int, stop: int) -> None:
    """480x270 with a logo in the corner, every seventh frame left out, crf 30."""
    with av.open(str(source)) as held, av.open(str(target), "w") as made:
        stream = made.add_stream("libx264", rate=30, options={"crf": "30"})
        stream.width, stream.height, stream.time_base = 480, 270, Fraction(1, 1000)
        stream.codec_context.time_base = Fraction(1, 1000)
        for index, frame in enumerate(held.decode(video=0)):
            if not start <= index < stop or index % 7 == 0:
                continue
            rgb = cv2.resize(frame.to_ndarray(format="rgb24"), (480, 270), interpolation=cv2.INTER_AREA)
            cv2.putText(rgb, "LOGO", (400, 30), cv2.FONT_HERSHEY_SIMPLEX, 0.9, (255, 255, 255), 2)
            shown = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            shown.pts, shown.time_base = round((index - start) * 1000 / 35), Fraction(1, 1000)
            made.mux(stream.encode(shown))
        made.mux(stream.encode())


def test_black_and_flat_pictures_give_no_hash_and_a_still_gives_one() -> None:
    assert len(drawn([np.zeros((90, 160), np.uint8)] * 60)) == 0
    assert len(drawn([np.full((90, 160), 3 * i, np.uint8) for i in range(60)])) == 0
    still = (np.indices((90, 160)).sum(0) % 97).astype(np.uint8) * 2
    assert len(drawn([still] * 60)) == 1


def drawn(pictures: list[np.ndarray]) -> ClipHashes:
    observer, scaler = Hashes(), VideoReformatter()
    for index, gray in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(np.dstack([gray] * 3), format="rgb24").reformat(format="yuv420p")
        frame.pts, frame.time_base = index, Fraction(1, 30)
        observer.see(index, Picture(frame, scaler))
    return observer.hashes()


def test_hashes_come_back_from_a_receipt_as_they_were(nav02: ClipHashes) -> None:
    back = from_text(to_text(nav02))
    assert np.array_equal(back.ms, nav02.ms) and np.array_equal(back.bits, nav02.bits)
    assert 1.0 < len(nav02) / (nav02.ms[-1] / 1000) < 2.5


# --- in a corpus ------------------------------------------------------------------------------------------


def footage_of(seed: int, count: int = 200) -> ClipHashes:
    rng = np.random.default_rng(seed)
    return ClipHashes(
        np.cumsum(rng.integers(300, 900, count)).astype(np.uint32), rng.integers(0, 2**64, count, np.uint64)
    )


def cut(footage: ClipHashes, start: int, stop: int) -> ClipHashes:
    return ClipHashes(footage.ms[start:stop] - footage.ms[start], footage.bits[start:stop])


def test_of_forty_copies_the_first_stands_for_all() -> None:
    film = footage_of(1)
    clips = [footage_of(2), *([film] * 40), footage_of(3)]
    assert dropped(clips) == dict.fromkeys(range(2, 41), 1)


def test_a_corpus_finds_the_pairs_that_comparing_all_of_them_finds(nav02: ClipHashes) -> None:
    rng = np.random.default_rng(5)
    clips = [footage_of(s, 40) for s in range(300)]
    for _ in range(60):
        of = clips[int(rng.integers(300))]
        flips = np.array(
            [np.bitwise_or.reduce(1 << rng.integers(0, 64, 3).astype(np.uint64)) for _ in of.bits]
        )
        clips.append(cut(ClipHashes(of.ms, of.bits ^ flips), 5, 40))
    found = {(a, b) for a, near in find_shared(table_of(clips)).items() for b in near if a < b}
    assert found == {(a, b) for a, b in itertools.combinations(range(360), 2) if same(clips[a], clips[b])}
    assert len(found) >= 60


def test_other_cuts_of_one_film_leave_no_footage_unseen() -> None:
    """Clips 0-2 are one source's, 3 and 4 another's, whose cuts lie between."""
    film = footage_of(4)
    clips = [cut(film, 0, 60), cut(film, 60, 120), cut(film, 120, 180), cut(film, 30, 90), cut(film, 90, 150)]
    assert set(dropped(clips)) == {3, 4}


def test_a_clip_stays_that_shows_much_more_than_its_copy() -> None:
    film = footage_of(6)
    assert dropped([cut(film, 0, 20), cut(film, 0, 100)]) == {}
    assert dropped([cut(film, 0, 100), cut(film, 0, 20)]) == {1: 0}


def test_no_footage_is_left_in_two_splits_however_little_is_shared() -> None:
    film = footage_of(7)
    clips = [cut(film, 0, 60), cut(film, 50, 110)]
    assert dropped(clips, "tt") == {}
    assert dropped(clips, "tv") == {1: 0}


def test_no_footage_is_left_in_two_splits_over_a_third_clip_kept_or_not() -> None:
    film = footage_of(8)
    clips = [cut(film, 0, 60), cut(film, 50, 110), cut(film, 100, 160)]
    assert dropped(clips, "ttv") == {2: 0}
    assert dropped(clips, "ttv", eligible=[True, False, True]) == {2: 0}
    assert dropped([clips[0], clips[2]], "tv") == {}


def test_what_is_refused_for_its_quality_stands_for_nothing() -> None:
    film = footage_of(9)
    assert dropped([film, film, film], eligible=[False, True, True]) == {2: 1}

"""Ingest: clean sources stay as they are; anything else becomes a media file that shows the same frames."""

from __future__ import annotations

import hashlib
import json
import os
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from av.video.reformatter import VideoReformatter
from odd_media import backgrounds, copy_into, cut, cut_off, flip_bits, footage, index_first, number_of, write

from pipeline import media as media_module
from pipeline.frames import frame_pass
from pipeline.gates import Gates, GatesConfig
from pipeline.ingest import Ingest, IngestConfig, held_runs, picture_step
from pipeline.isolate import IsolationError, Limits, Worker, worker
from pipeline.media import FramesDiffer, MediaTable, Reader, media, pack, read_frames, read_table, unpack
from pipeline.picture import native_planes
from pipeline.stage import Unit, run_unit
from pipeline.store import Store, sha256_file
from pipeline.timing import plan
from pipeline.working_copy import geometry, upright
from schemas.clip import Clip
from schemas.quality import Reason, Status


def unit_of(path: Path, corpus: Path, **changes) -> Unit:
    sha = sha256_file(path)
    values = {
        "clip_id": sha[:16],
        "recording_id": sha[:16],
        "source_path": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha,
    }
    return Unit(Clip(**(values | changes)), "g0000-p00000", Store(str(path.parent)), Store(str(corpus)))


class Done:
    """A clip that went through ingest: receipt, report, table, and the pictures of its media file."""

    def __init__(self, path: Path, corpus: Path, **config):
        self.unit = unit_of(path, corpus)
        self.receipt = run_unit(Ingest(IngestConfig(**config)), self.unit)
        self.facts = self.receipt.facts
        self.after = Unit(
            self.unit.clip, self.unit.partition, self.unit.source, self.unit.corpus, {"ingest": self.receipt}
        )
        self.report = json.loads(self.after.corpus.read(self.receipt.output("report.json").path))

    @property
    def frames(self):
        return read_frames(self.after)

    def pictures(self):
        with media(self.after) as path:
            return Reader(path, read_table(self.after)).read(range(len(self.frames)))

    def gates(self, **config):
        return run_unit(Gates(GatesConfig(**config)), self.after)


@pytest.fixture(scope="session")
def pictures():
    return backgrounds()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="session")
def of_pack(corpus):
    done: dict[str, Done] = {}

    def get(name: str) -> Done:
        if name not in done:
            done[name] = Done(footage(name), corpus)
        return done[name]

    return get


@pytest.fixture(scope="session")
def content():
    """Luma of nav02 at 16x9."""

    class Thumbs:
        def __init__(self):
            self.seen = []

        def see(self, index, picture):
            self.seen.append(thumb(picture.rgb))

    thumbs = Thumbs()
    frame_pass(footage("odd_bframes_editlist.mp4"), [thumbs])
    return np.stack(thumbs.seen)


def thumb(rgb):
    gray = cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)
    return cv2.resize(gray, (16, 9), interpolation=cv2.INTER_AREA).astype(np.float32)


# --- the pack ---------------------------------------------------------------------------------------------

PACK = [
    # name, working copy, why, frames, rate, size, windows
    ("nav05_keys_deathmatch.mp4", "none", "", 715, Fraction(35), (640, 360), 6),
    ("odd.clip.v2.final.mp4", "none", "", 280, Fraction(35), (640, 360), 2),
    ("odd_bframes_editlist.mp4", "none", "", 280, Fraction(35), (640, 360), 2),
    ("odd_64x36.mp4", "none", "", 210, Fraction(35), (64, 36), 2),
    ("odd_1080p.mp4", "none", "", 210, Fraction(35), (1920, 1080), 2),
    ("odd_exactly_150f.mp4", "none", "", 150, Fraction(35), (640, 360), 1),
    ("odd_short_140f.mp4", "none", "", 140, Fraction(35), (640, 360), 0),
    ("odd_1frame.mp4", "none", "", 1, Fraction(35), (640, 360), 0),
    ("odd_long_5min.mp4", "none", "", 9000, Fraction(30), (320, 180), 65),
    ("cosmos_test_video_30s.mp4", "none", "", 720, Fraction(24), (854, 480), 6),
    ("vipe_cosmos-example.mp4", "none", "", 81, Fraction(16), (1280, 720), 0),
    ("tc_h265_video.mp4", "none", "", 10, Fraction(10), (128, 128), 0),
    ("odd_h264.mkv", "remux", "container,no_index", 210, Fraction(35), (640, 360), 2),
    ("odd_h264.mov", "remux", "container", 210, Fraction(35), (640, 360), 2),
    ("odd_start1p5.mkv", "remux", "container,start,no_index", 210, Fraction(35), (640, 360), 2),
    ("odd_fragmented.mp4", "remux", "start,no_index", 280, Fraction(35), (640, 360), 2),
    ("odd_with_audio_shorter.mp4", "remux", "streams", 210, Fraction(35), (640, 360), 2),
    (
        "decord_flipping_a_pancake.mkv",
        "remux",
        "container,streams,no_index",
        310,
        Fraction(30),
        (426, 240),
        3,
    ),
    ("tc_nasa_13013.mp4", "remux", "streams", 390, Fraction(30000, 1001), (480, 270), 3),
    ("decord_video_0.mov", "remux", "container", 3, Fraction(30), (568, 320), 0),
    ("decord_video_180.mov", "encode", "container,rotation", 3, Fraction(30), (568, 320), 0),
    ("decord_video_90.mov", "encode", "container,rotation", 3, Fraction(30), (320, 568), 0),
    ("odd_rot90_meta.mp4", "encode", "rotation", 280, Fraction(35), (360, 640), 2),
    ("odd_vfr.mp4", "encode", "vfr", 280, Fraction(35), (640, 360), 2),
    ("odd_60fps.mp4", "encode", "fps", 140, Fraction(30), (640, 360), 0),
    ("odd_637x359_yuv444.mp4", "encode", "pixel_format,odd_size", 210, Fraction(35), (636, 358), 2),
    ("odd_hevc10.mp4", "encode", "pixel_format", 210, Fraction(35), (640, 360), 2),
    ("odd_mpeg4.avi", "encode", "container,codec", 175, Fraction(35), (640, 360), 2),
    ("odd_anim.gif", "encode", "container,codec,pixel_format", 40, Fraction(10), (320, 180), 0),
    ("tc_bt709_full_range.mp4", "encode", "full_range", 30, Fraction(30), (1280, 720), 0),
    ("tc_h264_10bits.mp4", "encode", "pixel_format", 30, Fraction(30), (200, 200), 0),
    ("decord_corrupted.mp4", "encode", "header_count,damage", 50, Fraction(10), (1280, 720), 0),
]


@pytest.mark.parametrize("name, copy, why, frames, rate, size, windows", PACK, ids=[p[0] for p in PACK])
def test_pack_clips_get_the_media_file_of_the_policy(of_pack, name, copy, why, frames, rate, size, windows):
    done = of_pack(name)
    facts, table = done.facts, done.frames
    assert done.receipt.status is Status.OK
    assert (facts["working_copy"], facts["why"]) == (copy, why) and done.receipt.has("media.mp4") == (
        copy != "none"
    )
    assert facts["frames"] == len(table) == frames and Fraction(facts["fps_num"], facts["fps_den"]) == rate
    assert (facts["width"], facts["height"]) == size and facts["windows"] == windows
    with media(done.after) as path:
        decoded = frame_pass(path)
        reader = Reader(path, read_table(done.after))
        shape = reader.read([frames - 1]).shape
    assert np.array_equal(decoded.pixels, table.pixels) and shape == (1, size[1], size[0], 3)
    assert np.array_equal(decoded.pts, table.pts) and decoded.report.stream.time_base == table.time_base
    if copy != "none":
        step = 1 / (rate * table.time_base)
        assert np.array_equal(table.pts, np.arange(frames) * int(step)) and step.denominator == 1


@pytest.mark.parametrize(
    "name, reason",
    [
        ("odd_zero_byte.mp4", Reason.EMPTY_FILE),
        ("odd_garbage.mp4", Reason.NOT_A_VIDEO),
        ("odd_truncated_no_moov.mp4", Reason.TRUNCATED),
        ("tc_audio_only.mp3", Reason.NO_VIDEO_STREAM),
    ],
)
def test_what_cannot_be_decoded_is_rejected_with_its_reason_and_a_report(of_pack, name, reason):
    done = of_pack(name)
    assert done.receipt.status is Status.REJECTED
    (line,) = done.receipt.reasons
    assert line.split(":")[0] == reason and "\n" not in line and done.report["rejected"] == line
    assert not done.receipt.has("frames.parquet")


@pytest.mark.parametrize("name", ["odd_vfr.mp4", "odd_60fps.mp4", "odd_hevc10.mp4", "odd_mpeg4.avi"])
def test_encoded_copies_show_the_content_in_order(of_pack, content, name):
    done, source = of_pack(name), frame_pass(footage(name))
    at = source.pts * source.report.stream.time_base.numerator / source.report.stream.time_base.denominator
    # Content frame k was shown at k/35 s; the 60 fps clip shows the same frames faster.
    content_of = np.rint(at * (60 if name == "odd_60fps.mp4" else 35)).astype(int)
    for k, picture in enumerate(done.pictures()):
        want = content_of[done.frames.source_index[k]]
        near = int(np.argmin(np.abs(content - thumb(picture)).mean((1, 2))))
        same = max(near, want) < 45 or np.abs(content[near] - content[want]).mean() < 1
        assert near == want or same, f"frame {k} shows content {near}, not {want}"


def test_a_variable_rate_source_maps_each_slot_to_the_frame_nearest_in_time(of_pack):
    done = of_pack("odd_vfr.mp4")
    source = frame_pass(footage("odd_vfr.mp4"))
    at = source.pts * source.report.stream.time_base
    for k, index in enumerate(done.frames.source_index):
        want = min(range(len(at)), key=lambda i: (abs(at[i] - Fraction(k, 35)), i))
        assert index == want
    assert done.facts["source_frames"] == 224 and done.report["source"]["pts_gaps"] > 0


def test_a_variable_rate_source_is_rejected_where_the_setting_says_so(tmp_path):
    done = Done(footage("odd_vfr.mp4"), tmp_path, vfr="reject")
    assert done.receipt.status is Status.REJECTED and done.receipt.reasons[0].startswith("vfr: ")
    assert done.facts["source_frames"] == 224 and done.report["source"]["frames"] == 224


def test_a_60_fps_source_keeps_its_even_frames(of_pack):
    assert of_pack("odd_60fps.mp4").frames.source_index.tolist() == list(range(0, 280, 2))
    assert of_pack("odd_60fps.mp4").gates().reasons[0].startswith("too_short: 140 frames")


@pytest.mark.parametrize("name", ["odd_rot90_meta.mp4", "decord_video_180.mov", "decord_video_90.mov"])
def test_rotated_sources_are_stored_upright(of_pack, name):
    """D6: the same picture as a reader that applies the tag itself."""
    reader = cv2.VideoCapture(str(footage(name)))
    reader.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)
    upright = reader.read()[1][:, :, ::-1]
    reader.release()
    shown = of_pack(name).pictures()[0]
    assert shown.shape == upright.shape
    assert psnr(shown, upright) > 42 and of_pack(name).facts["rotation"] % 180 in (0, 90)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2))


@pytest.mark.parametrize(
    "name",
    ["odd_vfr.mp4", "odd_637x359_yuv444.mp4", "odd_anim.gif", "odd_hevc10.mp4", "odd_mpeg4.avi"]
    + ["odd_rot90_meta.mp4", "tc_bt709_full_range.mp4", "tc_h264_10bits.mp4", "decord_video_90.mov"],
)
def test_encoded_copies_are_within_42_db_of_the_source_as_8_bit_420(of_pack, name):
    class Planes:
        def __init__(self, shape=None):
            self.shape, self.scaler, self.seen = shape, VideoReformatter(), []

        def see(self, index, picture):
            planes = (
                upright(picture.frame, self.shape, self.scaler)
                if self.shape
                else native_planes(picture.frame)
            )
            self.seen.append([p.astype(np.int16) for p in planes])

    done = of_pack(name)
    source = Planes(geometry(frame_pass(footage(name)).report.stream))
    frame_pass(footage(name), [source])
    shown = Planes()
    with media(done.after) as path:
        frame_pass(path, [shown])
    for k in range(0, len(shown.seen), 7):
        for a, b in zip(shown.seen[k], source.seen[done.frames.source_index[k]], strict=True):
            assert psnr(a, b) >= 42


def test_full_range_colours_survive_the_copy(of_pack):
    """Full-range BT.709 becomes limited BT.709 and looks the same in RGB."""
    reader = cv2.VideoCapture(str(footage("tc_bt709_full_range.mp4")))
    source = reader.read()[1][:, :, ::-1].astype(np.float64)
    reader.release()
    shown = of_pack("tc_bt709_full_range.mp4").pictures()[0]
    assert psnr(shown, source) > 40
    # A wrong range moves a channel's mean by 4 levels and more.
    assert np.abs((shown - source).mean((0, 1))).max() < 1.5


def test_an_untagged_source_is_bt601_and_its_colours_survive_the_copy(tmp_path, pictures):
    """Patches of pure colour: a matrix that is tagged and not converted moves them by up to 30 levels."""
    patches = [p.copy() for p in pictures[:10]]
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30)]
    for picture in patches:
        for n, colour in enumerate(colours):
            picture[40:100, 80 * n : 80 * n + 80] = colour
    path = write(tmp_path / "a.avi", patches, count=10, codec="mpeg4")

    class Last:
        def see(self, index, picture):
            self.rgb = picture.rgb

    last = Last()
    frame_pass(path, [last])
    shown = Done(path, tmp_path / "corpus").pictures()[-1]
    for n in range(len(colours)):
        inside = np.s_[60:80, 80 * n + 20 : 80 * n + 60]
        assert np.abs(shown[inside].mean((0, 1)) - last.rgb[inside].mean((0, 1))).max() < 3


def test_a_stream_copy_shows_the_same_bits_as_its_source(of_pack):
    done = of_pack("odd_start1p5.mkv")
    assert np.array_equal(frame_pass(footage("odd_start1p5.mkv")).pixels, done.frames.pixels)
    assert done.facts["first_pts_s"] == 1.5 and done.frames.pts[0] == 0


def test_the_frozen_run_is_listed(of_pack):
    """Measured: the picture of frames 140..244 is already that of frame 139, so the run is [139, 245)."""
    done = of_pack("bad05_frozen_140_245.mp4")
    assert [139, 245] in done.report["frozen"] and done.facts["longest_frozen"] == 106
    assert done.facts["repeats"] == 92  # bit-equal; the encoder refines the others by up to 0.017 levels


def test_tripled_frames_are_found_and_rejected_by_their_effective_rate(of_pack):
    done = of_pack("bad07_duplicated_x3.mp4")
    assert done.facts["picture_step"] == 3
    gates = done.gates()
    assert gates.facts["effective_fps"] == pytest.approx(11.667, abs=1e-3)
    assert gates.reasons == ("below_grid_rate: 35.000 fps, every picture shown 3 times; 16 is the least",)
    assert of_pack("nav05_keys_deathmatch.mp4").facts["picture_step"] == 1


def test_windows_of_the_five_minute_clip_and_its_left_over_are_listed(of_pack):
    done = of_pack("odd_long_5min.mp4")
    spans = [(w["start"], w["stop"]) for w in done.report["windows"]]
    assert (
        len(spans) == 65
        and spans[:2] == [(0, 150), (140, 290)]
        and spans[-2:] == [(8820, 8970), (8850, 9000)]
    )
    assert done.facts["leftover"] == 30 and {w["verdict"] for w in done.report["windows"]} == {"ok"}


# --- made clips -------------------------------------------------------------------------------------------

MADE = [
    # id, file, options, working copy, reasons that must be among why
    ("ts", "a.ts", {"b_frames": 2}, "remux", {"container", "start"}),
    ("late ts", "b.ts", {"time": lambda k: k + 450}, "remux", {"start"}),
    ("webm", "a.webm", {"codec": "libvpx-vp9"}, "encode", {"codec"}),
    ("avi", "a.avi", {"b_frames": 2}, None, {"container"}),
    ("23.976 mp4", "a.mp4", {"rate": Fraction(24000, 1001), "b_frames": 2}, "none", set()),
    ("23.976 mkv", "a.mkv", {"rate": Fraction(24000, 1001), "b_frames": 2}, "remux", {"container"}),
    ("non-ASCII", "clip é 日本.v2.mp4", {}, "none", set()),
]


@pytest.mark.parametrize("name, options, copy, why", [m[1:] for m in MADE], ids=[m[0] for m in MADE])
def test_made_clips_keep_their_frames_in_order(tmp_path, pictures, name, options, copy, why):
    done = Done(write(tmp_path / name, pictures, count=48, **options), tmp_path / "corpus")
    assert done.receipt.status is Status.OK and copy in (None, done.facts["working_copy"])
    assert why <= set(done.facts["why"].split(","))
    assert [number_of(p) for p in done.pictures()] == list(range(48))
    rate = options.get("rate", Fraction(30))
    assert Fraction(done.facts["fps_num"], done.facts["fps_den"]) == rate
    assert done.frames.pts[0] == 0 and done.facts["bad_frames"] == 0


@pytest.mark.parametrize(
    "aspect, size", [(Fraction(4, 3), (426, 180)), (Fraction(3, 4), (320, 240))], ids=["wide", "tall"]
)
def test_anamorphic_pixels_become_square(tmp_path, pictures, aspect, size):
    done = Done(write(tmp_path / "a.mp4", pictures, count=24, aspect=aspect), tmp_path / "corpus")
    assert done.facts["why"] == "anamorphic" and (done.facts["width"], done.facts["height"]) == size
    assert [number_of(p) for p in done.pictures()] == list(range(24))


@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_a_red_corner_is_where_the_display_matrix_puts_it(tmp_path, pictures, rotation):
    """D6: red lies top left in the stored picture; the tag turns counterclockwise."""
    marked = [p.copy() for p in pictures[:20]]
    for picture in marked:
        picture[:40, :40] = (255, 0, 0)
    done = Done(write(tmp_path / "r.mp4", marked, count=20, rotation=rotation), tmp_path / "corpus")
    row, column = {90: (-10, 10), -90: (10, -10), 180: (-10, -10)}[rotation]
    shown = done.pictures()[0]
    red = shown[row, column]
    assert shown.shape[:2] == ((180, 320) if rotation == 180 else (320, 180))
    assert red[0] > 200 and red[1] < 60 and red[2] < 60


def test_an_edit_list_cut_is_planned_by_what_it_shows(tmp_path, pictures):
    """D2: 120 of 180 counted frames are shown: no window of 150, reason too_short, both counts kept."""
    whole = write(tmp_path / "w.mp4", pictures, count=300, gop=100, b_frames=3)
    done = Done(cut(whole, tmp_path / "c.mp4", first=160), tmp_path / "corpus")
    assert done.facts["frames"] == 140 and done.facts["header_frames"] > 140 and done.facts["windows"] == 0
    assert done.facts["working_copy"] == "encode" and "header_count" in done.facts["why"]
    assert [number_of(p) for p in done.pictures()] == list(range(160, 300))
    assert done.gates().reasons[0].startswith("too_short: 140 frames")


def test_damage_rejects_the_windows_that_it_touches_and_no_other(tmp_path, pictures):
    """D4: 600 frames, a key frame every 60; damage in one group spoils one or two windows of five."""
    whole = write(tmp_path / "w.mp4", pictures, count=600, gop=60)
    done = Done(flip_bits(whole, tmp_path / "d.mp4", bits=3, seed=2), tmp_path / "corpus")
    table, facts = done.frames, done.facts
    assert facts["working_copy"] == "encode" and facts["frames"] == 600 and 0 < facts["bad_frames"] < 300
    verdicts = {w["start"]: w["verdict"] for w in done.report["windows"]}
    for start, verdict in verdicts.items():
        assert (verdict == "ok") == bool(table.ok[start : start + 150].all())
    assert 0 < facts["windows_damaged"] < len(verdicts) == facts["windows"]
    gates = done.gates()
    assert gates.status is Status.REJECTED and gates.reasons[0].startswith("decode_damage: ")
    assert done.gates(max_bad_frames=600).status is Status.OK
    good = table.ok
    numbers = np.array([number_of(p) for p in done.pictures()])
    assert np.array_equal(numbers[good], np.flatnonzero(good))


def test_a_file_that_is_cut_off_is_kept_and_the_gates_reject_it(tmp_path, pictures):
    whole = index_first(write(tmp_path / "w.mp4", pictures, count=300, gop=60), tmp_path / "i.mp4")
    done = Done(cut_off(whole, tmp_path / "t.mp4", 0.7), tmp_path / "corpus")
    assert done.facts["header_frames"] == 300 and done.facts["missing_packets"] > 50
    assert 150 < done.facts["frames"] < 250
    assert done.gates().reasons[0].startswith("decode_damage: ")


def test_a_negative_first_time_becomes_zero(tmp_path, pictures):
    plain = write(tmp_path / "a.mp4", pictures, count=30)
    done = Done(copy_into(plain, tmp_path / "n.ts", "mpegts", Fraction(-1, 3)), tmp_path / "corpus")
    assert done.facts["first_pts_s"] < 0 and done.frames.pts[0] == 0
    assert [number_of(p) for p in done.pictures()] == list(range(30))


def test_the_same_source_and_settings_give_the_same_bytes(of_pack, tmp_path):
    for name in ("odd_anim.gif", "odd_h264.mkv"):
        first = of_pack(name).receipt
        second = Done(footage(name), tmp_path / "b").receipt
        assert [(o.name, o.sha256) for o in first.outputs] == [(o.name, o.sha256) for o in second.outputs]
        assert len(first.outputs) == 3 and first.content == second.content


# --- the stage's edges ------------------------------------------------------------------------------------


def test_a_source_that_changed_since_discovery_fails_by_name(tmp_path):
    path = footage("odd_1frame.mp4")
    for changes in ({"bytes": 1}, {"sha256": hashlib.sha256(b"").hexdigest()}):
        receipt = run_unit(Ingest(IngestConfig()), unit_of(path, tmp_path, **changes))
        assert receipt.status is Status.FAILED and receipt.reasons[0].startswith("source_changed: ")


def test_a_missing_source_fails_by_name(tmp_path):
    unit = unit_of(footage("odd_1frame.mp4"), tmp_path, source_path="gone.mp4")
    receipt = run_unit(Ingest(IngestConfig()), unit)
    assert receipt.status is Status.FAILED and receipt.reasons[0].startswith("source_unreadable: ")


@pytest.mark.parametrize("reason", [Reason.DECODER_CRASHED, Reason.TIMEOUT, Reason.OUT_OF_MEMORY])
def test_a_worker_that_does_not_come_back_fails_by_name(tmp_path, monkeypatch, reason):
    def lost(self, function, *args):
        raise IsolationError(reason, "as told")

    monkeypatch.setattr(Worker, "call", lost)
    receipt = run_unit(Ingest(IngestConfig()), unit_of(footage("odd_1frame.mp4"), tmp_path))
    assert receipt.status is Status.FAILED and receipt.reasons == (f"{reason}: as told",)


def test_the_time_limit_of_the_settings_reaches_the_worker(tmp_path):
    config = IngestConfig(timeout_s=0.01, worker_calls=1)
    receipt = run_unit(Ingest(config), unit_of(footage("odd_1080p.mp4"), tmp_path))
    assert receipt.reasons[0].startswith("timeout: ")


def test_the_memory_limit_of_the_settings_reaches_the_worker(tmp_path):
    config = IngestConfig(memory_mb=8)
    receipt = run_unit(Ingest(config), unit_of(footage("odd_1080p.mp4"), tmp_path))
    assert receipt.status is Status.FAILED
    assert receipt.reasons[0].split(":")[0] in (Reason.OUT_OF_MEMORY, Reason.DECODER_CRASHED)


# --- table and reader -------------------------------------------------------------------------------------


def test_random_access_gives_the_bits_of_sequential_reading(of_pack):
    """D1: in any order, and for a window."""

    class Rgb:
        def __init__(self):
            self.seen = []

        def see(self, index, picture):
            self.seen.append(picture.rgb)

    done = of_pack("odd_vfr.mp4")
    rgb = Rgb()
    with media(done.after) as path:
        frame_pass(path, [rgb])
        reader = Reader(path, read_table(done.after))
        order = np.random.default_rng(0).permutation(len(rgb.seen))[:40]
        assert np.array_equal(reader.read(order), np.stack(rgb.seen)[order])
        assert np.array_equal(reader.read(range(130, 280)), np.stack(rgb.seen[130:280]))
        with pytest.raises(IndexError, match="not all inside"):
            reader.read([len(rgb.seen)])


def test_a_reader_refuses_a_file_that_shows_other_frames(of_pack, tmp_path, pictures):
    done = of_pack("odd_h264.mkv")
    table = read_table(done.after)
    with media(done.after) as path, pytest.raises(FramesDiffer, match="counts 210 frames, the table 280"):
        Reader(path, read_table(of_pack("odd.clip.v2.final.mp4").after))
    # The same number of frames, one of them another: found when a read comes near it.
    moved = MediaTable(table.frames, table.change, {**table.rgb, 96: table.rgb[80]})
    with media(done.after) as path:
        reader = Reader(path, moved)
        reader.read([3])
        with pytest.raises(FramesDiffer, match="frame 96"):
            reader.read([99])


def test_a_reader_refuses_a_source_that_decord_reads_wrong(tmp_path, pictures):
    """An edit-list cut: decord shows the hidden frames or repeats the tail, silently."""
    whole = write(tmp_path / "w.mp4", pictures, count=180, gop=100, b_frames=3)
    done = Done(cut(whole, tmp_path / "c.mp4", first=41), tmp_path / "corpus")
    with pytest.raises(FramesDiffer):
        Reader(tmp_path / "c.mp4", read_table(done.after)).read(range(len(done.frames)))


def test_the_table_survives_its_file_and_another_schema_is_refused(of_pack, monkeypatch):
    table = read_table(of_pack("odd_vfr.mp4").after)
    again = unpack(pack(table))
    assert pack(again) == pack(table)
    for name in ("pts", "source_index", "pixels", "ok", "repeat"):
        assert np.array_equal(getattr(again.frames, name), getattr(table.frames, name))
    assert again.frames.time_base == table.frames.time_base and again.rgb == table.rgb
    assert set(table.rgb) == {*range(0, 280, 16), 279}
    data = pack(table)
    monkeypatch.setattr(media_module, "SCHEMA_VERSION", 99)
    with pytest.raises(ValueError, match="run ingest again"):
        read_frames(data)


# --- arithmetic -------------------------------------------------------------------------------------------


def test_runs_of_one_picture_begin_with_the_frame_that_is_held():
    assert held_runs(np.array([0, 0, 1, 1, 0, 1], bool)) == [(1, 4), (4, 6)]
    assert held_runs(np.zeros(3, bool)) == []
    assert picture_step(np.tile([False, True, True], 20)) == 3


def timing(pts, rates=(), max_fps=40.0, damaged=(), base=Fraction(1, 1000)):
    pts = np.asarray(pts, np.int64)
    ok = np.ones(len(pts), bool)
    for a, b in damaged:
        ok &= (pts < a) | (pts >= b)
    return plan(pts, ok, damaged, base, rates, max_fps)


def test_a_millisecond_clock_is_constant_at_its_exact_rate():
    pts = [round(k * 1001 / 24) for k in range(500)]
    got = timing(pts, rates=[Fraction(24000, 1001)])
    assert (
        got.constant and got.rate == Fraction(24000, 1001) and got.source_index.tolist() == list(range(500))
    )


def test_a_header_rate_that_the_times_contradict_is_not_believed():
    got = timing([40 * k for k in range(100)], rates=[Fraction(30)])
    assert got.constant and got.rate == 25


def test_a_dropped_frame_is_variable_rate_but_a_lost_one_is_damage():
    pts = [40 * k for k in range(100) if k != 50]
    assert not timing(pts).constant
    lost = timing(pts, damaged=[(1900, 2200)])
    assert lost.constant and len(lost.ok) == 100
    assert np.flatnonzero(~lost.ok).tolist() == list(range(48, 55))  # 1920 .. 2160 ms, the hole among them
    alone = timing(pts, damaged=[(2000, 2040)])
    assert alone.constant and np.flatnonzero(~alone.ok).tolist() == [50] and alone.source_index[50] == 49


def test_of_two_frames_equally_near_a_slot_shows_the_earlier():
    # Median step 40 ms; slot 3, at 120 ms, lies between frames at 100 and 140 ms.
    got = timing([0, 40, 80, 100, 140, 180, 220, 260])
    assert not got.constant and got.rate == 25 and got.source_index[3] == 3


def test_rates_above_the_maximum_are_halved_until_they_are_not():
    got = timing([10 * k for k in range(101)])
    assert got.rate == 25 and got.factor == 4 and got.source_index.tolist() == list(range(0, 101, 4))


def test_one_frame_has_the_rate_of_its_header():
    got = timing([1500], rates=[Fraction(35)])
    assert got.constant and got.rate == 35 and got.source_index.tolist() == [0]


def test_ingest_leaves_no_worker_behind_in_a_forked_child():
    mine = worker(Limits())
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"y" if worker(Limits()) is not mine else b"n")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"y"
    os.close(reader), os.close(writer)


def test_streams_of_the_media_file_are_one(of_pack):
    with media(of_pack("tc_nasa_13013.mp4").after) as path, av.open(str(path)) as container:
        assert [s.type for s in container.streams] == ["video"]

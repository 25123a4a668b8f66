"""Strict decode: the right frames in the right order with their own times, or a named refusal."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import psutil
import pytest
from av.video.reformatter import VideoReformatter
from odd_media import (
    FOOTAGE,
    backgrounds,
    copy_into,
    cut,
    cut_off,
    flip_bits,
    footage,
    index_first,
    number_of,
    write,
)

from pipeline.damage import Packets
from pipeline.frames import MediaError, frame_pass
from pipeline.picture import Picture
from schemas.quality import Reason

ROWS = list(csv.DictReader((FOOTAGE / "manifest.csv").open()))
REFUSED = {
    "odd_zero_byte.mp4": Reason.EMPTY_FILE,
    "odd_garbage.mp4": Reason.NOT_A_VIDEO,
    "odd_truncated_no_moov.mp4": Reason.TRUNCATED,
    "tc_audio_only.mp3": Reason.NO_VIDEO_STREAM,
    "vpt_actions_Player729.jsonl": Reason.NOT_A_VIDEO,
}
# Where the manifest's packet count is not the number of frames: one packet is beyond recovery; the manifest
# counts stream 0, ffmpeg's best is stream 3.
COUNTS = {"decord_corrupted.mp4": 49, "tc_nasa_13013.mp4": 390}


class Numbers:
    def __init__(self):
        self.seen = []

    def see(self, index, picture):
        assert index == len(self.seen)
        self.seen.append(number_of(picture.rgb))


class Thumbs:
    """Luma at 16x9: small enough that a scaler's aliasing does not look like motion."""

    def __init__(self):
        self.seen = []

    def see(self, index, picture):
        self.seen.append(cv2.resize(picture.gray, (16, 9), interpolation=cv2.INTER_AREA).astype(np.float32))


@pytest.fixture(scope="session")
def pictures():
    return backgrounds()


@pytest.fixture(scope="session")
def long_gop(tmp_path_factory, pictures):
    """300 numbered frames, a key frame every 100, 3 B-frames."""
    return write(tmp_path_factory.mktemp("long") / "long.mp4", pictures, count=300, gop=100, b_frames=3)


@pytest.fixture(scope="session")
def content():
    """Thumbs of nav02, the content of every odd_ clip from frame 0."""
    thumbs = Thumbs()
    path = footage("nav02_mouse_map02.mp4")
    frame_pass(path, [thumbs])
    return np.stack(thumbs.seen[:330])


@pytest.mark.parametrize("row", ROWS, ids=[r["file"] for r in ROWS])
def test_every_clip_of_the_pack_gives_its_frames_or_its_named_refusal(row):
    name = row["file"]
    if name in REFUSED:
        with pytest.raises(MediaError) as caught:
            frame_pass(footage(name))
        assert caught.value.reason is REFUSED[name] and "\n" not in str(caught.value)
        return
    decoded = frame_pass(footage(name))
    assert len(decoded) == COUNTS.get(name, int(row["packets"]))
    assert np.all(np.diff(decoded.pts) > 0)
    assert decoded.ok.all() == (name != "decord_corrupted.mp4")


def _matches(thumbs, content, expected):
    """Every thumb is nearest to the content frame expected for it, or to one that looks the same: the view
    hardly moves in the first 45 frames; later, neighbours differ by more than 1 level."""
    exact = 0
    for k, (thumb, want) in enumerate(zip(thumbs, expected, strict=True)):
        near = int(np.argmin(np.abs(content - thumb).mean((1, 2))))
        exact += near == want
        same = max(near, want) < 45 or np.abs(content[near] - content[want]).mean() < 1
        assert near == want or same, f"frame {k} shows content {near}, not {want}"
    assert exact >= 0.7 * (len(thumbs) - 45)


@pytest.mark.parametrize(
    "name",
    [
        "odd_bframes_editlist.mp4",
        "odd_fragmented.mp4",
        "odd_h264.mkv",
        "odd_h264.mov",
        "odd_start1p5.mkv",
        "odd_mpeg4.avi",
        "odd_hevc10.mp4",
        "odd_637x359_yuv444.mp4",
        "odd_1080p.mp4",
        "odd_60fps.mp4",
        "odd_with_audio_shorter.mp4",
        "odd.clip.v2.final.mp4",
        "odd_exactly_150f.mp4",
        "odd_1frame.mp4",
    ],
)
def test_frames_of_odd_containers_and_codecs_come_in_content_order(name, content):
    thumbs = Thumbs()
    decoded = frame_pass(footage(name), [thumbs])
    _matches(thumbs.seen, content, range(len(decoded)))


def test_frames_of_a_64x36_clip_come_in_content_order():
    """Its scaler did not filter: the content is scaled the same way, and compared pixel by pixel."""

    class Small:
        def __init__(self):
            self.seen = []

        def see(self, index, picture):
            small = picture.frame.reformat(64, 36, "gray", interpolation="BICUBIC")
            self.seen.append(small.to_ndarray().astype(np.float32))

    content, small = Small(), Small()
    frame_pass(footage("odd_bframes_editlist.mp4"), [content])
    frame_pass(footage("odd_64x36.mp4"), [small])
    told = np.stack(content.seen)
    near = [int(np.argmin(np.abs(told - t).mean((1, 2)))) for t in small.seen]
    off = np.abs(np.array(near) - np.arange(210))[45:]  # before, the view stands
    assert (
        np.median(off) == 0 and (off == 0).mean() > 0.9
    )  # its 12 kB leave some frames like their neighbours


def test_a_rotation_tag_is_reported_and_the_stored_pictures_are_in_order(content):
    thumbs = Thumbs()
    decoded = frame_pass(footage("odd_rot90_meta.mp4"), [thumbs])
    assert decoded.report.stream.rotation == 90
    _matches(thumbs.seen, content, range(280))


def test_variable_rate_frames_carry_their_own_times(content):
    thumbs = Thumbs()
    decoded = frame_pass(footage("odd_vfr.mp4"), [thumbs])
    at = decoded.pts * decoded.report.stream.time_base.numerator / decoded.report.stream.time_base.denominator
    _matches(thumbs.seen, content, np.rint(at * 35).astype(int))


def test_gif_frames_come_in_content_order(content):
    thumbs = Thumbs()
    frame_pass(footage("odd_anim.gif"), [thumbs])
    # Made from 35 fps by rounding times to tenths: slot k shows the last frame that rounds into it.
    _matches(thumbs.seen, content, [int(3.5 * k + 1.75) for k in range(40)])


@pytest.mark.parametrize("stream, frames, size", [(0, 325, (320, 180)), (3, 390, (480, 270))])
def test_streams_of_one_file_give_the_recorded_times(stream, frames, size):
    decoded = frame_pass(footage("tc_nasa_13013.mp4"), stream=stream)
    info = decoded.report.stream
    told = json.loads(footage(f"tc_nasa_13013.stream{stream}.frames.json").read_text())
    told = [float(f["pts_time"]) for f in (told["frames"] if isinstance(told, dict) else told)]
    assert len(decoded) == frames and (info.width, info.height) == size
    assert np.abs(decoded.pts * float(info.time_base) - told).max() < 1e-6


def test_the_best_video_stream_is_chosen():
    assert frame_pass(footage("tc_nasa_13013.mp4")).report.stream.index == 3


def test_a_stream_that_is_not_video_is_refused():
    with pytest.raises(MediaError, match="no video stream 4 among"):
        frame_pass(footage("tc_nasa_13013.mp4"), stream=4)


def test_full_range_and_tagged_matrix_reach_rgb():
    """The same bytes as OpenCV's own ffmpeg gives."""

    class First:
        def see(self, index, picture):
            if index == 0:
                self.rgb = picture.rgb

    first = First()
    frame_pass(footage("tc_bt709_full_range.mp4"), [first])
    reader = cv2.VideoCapture(str(footage("tc_bt709_full_range.mp4")))
    reference = reader.read()[1][:, :, ::-1]
    reader.release()
    assert np.array_equal(first.rgb, reference)


def test_the_pixel_hash_ignores_strides_and_sees_one_changed_sample(tmp_path, pictures):
    # 318 wide: the decoder pads its rows to a multiple of 32.
    path = write(tmp_path / "odd.mkv", pictures, count=3, codec="ffv1", size=(318, 180))
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    before = Picture(frame, VideoReformatter()).pixels()
    plane = frame.planes[0]
    data = bytearray(bytes(plane))
    assert plane.line_size > 318
    data[plane.line_size - 1] ^= 255  # padding
    frame.make_writable()
    frame.planes[0].update(bytes(data))
    assert Picture(frame, VideoReformatter()).pixels() == before
    data[317] ^= 1
    frame.planes[0].update(bytes(data))
    assert Picture(frame, VideoReformatter()).pixels() != before


CONTAINERS = [
    ("transport stream", "a.ts", {"b_frames": 2}),
    ("webm vp9", "a.webm", {"codec": "libvpx-vp9"}),
    ("webm vp8", "b.webm", {"codec": "libvpx"}),
    ("avi with B-frames", "a.avi", {"b_frames": 2}),
    ("flv", "a.flv", {"b_frames": 2}),
    ("motion jpeg", "m.avi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
    ("23.976 in mkv", "c.mkv", {"rate": Fraction(24000, 1001), "b_frames": 2}),
    ("non-ASCII name", "clip é 日本.v2.mp4", {}),
]


@pytest.mark.parametrize("name, options", [c[1:] for c in CONTAINERS], ids=[c[0] for c in CONTAINERS])
def test_made_containers_show_every_numbered_frame_once_in_order(tmp_path, pictures, name, options):
    numbers = Numbers()
    decoded = frame_pass(write(tmp_path / name, pictures, count=48, **options), [numbers])
    assert numbers.seen == list(range(48)) and decoded.ok.all() and decoded.report.lost == 0


def test_a_negative_first_time_is_kept(tmp_path, pictures):
    plain = write(tmp_path / "a.mp4", pictures, count=30)
    path = copy_into(plain, tmp_path / "a.ts", "mpegts", Fraction(-1, 3))
    numbers = Numbers()
    decoded = frame_pass(path, [numbers])
    assert decoded.pts[0] < 0 and numbers.seen == list(range(30))


def test_an_elementary_stream_without_times_is_refused(tmp_path, pictures):
    with pytest.raises(MediaError, match="no_frames: 10 packets give no frame with a time"):
        frame_pass(write(tmp_path / "a.h264", pictures, count=10))


def test_variable_rate_shows_frame_k_at_its_own_time(tmp_path, pictures):
    """D1: 150 frames of 33 ms, then 150 of 66 ms."""
    times = [33 * k if k < 150 else 150 * 33 + 66 * (k - 150) for k in range(300)]
    path = write(
        tmp_path / "v.mp4",
        pictures,
        count=300,
        time=times.__getitem__,
        time_base=Fraction(1, 1000),
    )
    numbers = Numbers()
    decoded = frame_pass(path, [numbers])
    assert numbers.seen == list(range(300))
    assert np.allclose(
        decoded.pts * float(decoded.report.stream.time_base), np.array(times) / 1000, atol=1e-4
    )


def test_packets_that_an_edit_list_hides_are_counted_and_not_shown(tmp_path, long_gop):
    """D2: the header counts them, the frame table does not."""
    numbers = Numbers()
    decoded = frame_pass(cut(long_gop, tmp_path / "cut.mp4", first=141), [numbers])
    report = decoded.report
    assert numbers.seen == list(range(141, 300)) and len(set(decoded.pixels.tolist())) == 159
    assert report.stream.header_frames == report.packets == 159 + report.hidden and report.hidden > 0
    assert decoded.ok.all() and report.missing_packets == 0


@pytest.mark.parametrize("bits", [3, 40])
@pytest.mark.parametrize("seed", range(6))
def test_bit_damage_is_marked_up_to_the_next_key_frame(tmp_path, long_gop, bits, seed):
    """D4: no frame moves, what the decoder noticed is marked, and all it spoils is marked with it."""
    whole, keys = frame_pass(long_gop), _key_times(long_gop)
    decoded = frame_pass(flip_bits(long_gop, tmp_path / "bad.mp4", bits, seed))
    report = decoded.report
    truth = dict(zip(whole.pts.tolist(), whole.pixels.tolist(), strict=True))
    assert set(decoded.pts.tolist()) <= set(truth)
    assert len(whole) - len(decoded) == report.lost
    wrong = np.array(
        [truth[t] != p for t, p in zip(decoded.pts.tolist(), decoded.pixels.tolist(), strict=True)]
    )
    noticed = report.flagged + report.bad_packets + report.lost
    assert bool(noticed) == bool(report.damaged) and wrong.any()
    for _, stop in report.damaged:
        assert stop > whole.pts[-1] or stop in keys
    # What slips through: a flip that still reads as legal syntax (measured: 8 of 40 single flips).
    if bits == 40:
        assert (wrong & ~decoded.ok).sum() >= 0.9 * wrong.sum()


@dataclass
class FakePacket:
    pts: int
    is_keyframe: bool = False
    dts: int | None = None
    is_discard: bool = False


def test_a_damaged_packet_spoils_the_earlier_pictures_that_are_decoded_after_it():
    """Decode order I0 P4 B2 B1 B3 | I8 B6 (open group): what P4 spoils is shown from B1 on, up to I8."""
    packets = Packets(counted=False)
    order = [0, 4, 2, 1, 3, 8, 6]
    for pts in order:
        packets.add(FakePacket(pts, is_keyframe=pts in (0, 8)))
    packets.flag(4)
    assert packets.damage(np.array(sorted(order))) == (0, ((1, 8),))
    # A presentable packet that shows no frame counts as damaged: B6 is lost, and nothing behind it is sure.
    lost, spans = packets.damage(np.array([0, 1, 2, 3, 4, 8]))
    assert lost == 1 and spans[-1][0] == 1 and spans[-1][1] > 8


def test_a_hidden_packet_without_a_frame_is_not_lost():
    packets = Packets(counted=False)
    packets.add(FakePacket(-1, is_keyframe=True, is_discard=True))
    packets.add(FakePacket(0))
    assert packets.damage(np.array([0])) == (0, ()) and packets.hidden == 1


def _key_times(path):
    with av.open(str(path)) as container:
        return {p.pts for p in container.demux(video=0) if p.size and p.is_keyframe}


def test_a_file_that_ends_early_keeps_its_frames_and_names_what_is_missing(tmp_path, long_gop):
    path = cut_off(index_first(long_gop, tmp_path / "a.mp4"), tmp_path / "b.mp4", 0.4)
    numbers = Numbers()
    decoded = frame_pass(path, [numbers])
    assert 60 < len(decoded) < 240
    assert numbers.seen == (decoded.pts // 512).tolist()  # the cut may cost a B-frame before the last frame
    assert decoded.report.stream.header_frames == 300
    assert decoded.report.missing_packets == 300 - decoded.report.packets > 0


def test_a_change_of_size_on_the_way_is_refused(tmp_path, pictures):
    later = (20).__add__
    small = write(tmp_path / "s.ts", pictures, count=20, size=(160, 90), time=later)
    large = write(tmp_path / "l.ts", pictures, count=20)
    joined = tmp_path / "j.ts"
    joined.write_bytes(large.read_bytes() + small.read_bytes())
    with pytest.raises(MediaError, match=r"decode_damage: frame \d+ is 160x90, the first is 320x180"):
        frame_pass(joined)


def test_memory_is_flat_over_500_tiny_files(tmp_path, pictures):
    """D8: within 10 % between file 50 and file 500."""
    path = write(tmp_path / "tiny.mp4", pictures, count=3)
    at = {}
    for count in range(1, 501):
        frame_pass(path)
        if count in (50, 500):
            at[count] = psutil.Process().memory_info().rss
    assert at[500] < 1.1 * at[50]


def test_memory_is_flat_over_a_five_minute_clip():
    """D8: 9,000 frames; the growth behind frame 500 is the table's columns, not pictures (87 KB each)."""

    class Memory:
        def __init__(self):
            self.at = {}

        def see(self, index, picture):
            assert picture.gray.shape == (180, 320)
            if index in (500, 8999):
                self.at[index] = psutil.Process().memory_info().rss

    memory = Memory()
    decoded = frame_pass(footage("odd_long_5min.mp4"), [memory])
    assert len(decoded) == 9000
    assert memory.at[8999] - memory.at[500] < 16 << 20


def test_observers_share_one_picture_and_see_each_frame_once():
    class Keep:
        def __init__(self):
            self.indices, self.grays = [], []

        def see(self, index, picture):
            self.indices.append(index)
            self.grays.append(id(picture.gray))

    a, b = Keep(), Keep()
    frame_pass(Path(footage("decord_video_0.mov")), [a, b])
    assert a.indices == b.indices == [0, 1, 2] and a.grays == b.grays


def test_decord_is_never_loaded_before_av() -> None:
    """Loaded first, decord's own FFmpeg shadows the one of av: VP9 then fails to open."""
    code = "import sys, jobs.config; sys.exit('decord' in sys.modules or 'av' not in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

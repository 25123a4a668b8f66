"""Clips with a number in every frame, in the containers, codecs and timings that the footage pack lacks.

Pictures are frames of a real clip at 320x180 with the frame's number as 12 black and white blocks along the
bottom, so that a test can say which frame a decoder showed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared" / "data" / "footage"))
WIDTH, HEIGHT, BITS = 320, 180, 12
_BLOCK = 24  # 12 blocks of 24 px = 288 of 320


def footage(name: str) -> Path:
    path = FOOTAGE / name
    assert path.is_file(), f"{path} is missing; set WP2_FOOTAGE to the footage folder"
    return path


def numbered(background: npt.NDArray[np.uint8], number: int) -> npt.NDArray[np.uint8]:
    """uint8 [180, 320, 3]: the picture with `number` written into it."""
    picture = background.copy()
    for bit in range(BITS):
        value = 235 if number >> bit & 1 else 16
        picture[-_BLOCK:, bit * _BLOCK : (bit + 1) * _BLOCK] = value
    return picture


def number_of(rgb: npt.NDArray[np.uint8]) -> int:
    """The number in a picture of any size with the blocks along its bottom."""
    high, wide = rgb.shape[:2]
    row = rgb[round(high * (1 - _BLOCK / 2 / HEIGHT)), :, 1]
    at = [(bit + 0.5) * _BLOCK / WIDTH * wide for bit in range(BITS)]
    return sum(1 << bit for bit, x in enumerate(at) if row[int(x)] > 126)


def backgrounds(count: int = 100) -> list[npt.NDArray[np.uint8]]:
    """The first moving frames of a real clip, uint8 [180, 320, 3]."""
    with av.open(str(footage("nav02_mouse_map02.mp4"))) as container:
        frames: Iterator[av.VideoFrame] = container.decode(video=0)
        shown = [f.reformat(WIDTH, HEIGHT, "rgb24").to_ndarray() for f, _ in zip(frames, range(count + 40))]
    return shown[40:]


def write(
    path: Path,
    pictures: Sequence[npt.NDArray[np.uint8]],
    *,
    count: int = 60,
    rate: Fraction = Fraction(30),
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 30,
    b_frames: int = 0,
    container: str | None = None,
    time: Callable[[int], int] = lambda k: k,
    time_base: Fraction | None = None,
    aspect: Fraction | None = None,
    rotation: int = 0,
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> Path:
    """Encode `count` numbered pictures; picture k is presented at time(k) ticks of time_base (1/rate)."""
    options = {"crf": "20", "preset": "veryfast", "threads": "1"} if codec == "libx264" else {}
    if codec == "libvpx-vp9":
        options = {"crf": "30", "b": "0", "cpu-used": "8", "deadline": "realtime"}
    options |= {"g": str(gop), "bf": str(b_frames)} if codec == "libx264" else {"g": str(gop)}
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.time_base = time_base or 1 / rate
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        for k in range(count):
            picture = numbered(pictures[k % len(pictures)], k)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(*size, pix_fmt)
            frame.pts, frame.time_base = time(k), time_base or 1 / rate
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def cut(source: Path, target: Path, first: int) -> Path:
    """A stream-copy cut that shows frames from `first` on: an edit list hides what lies before it."""
    with av.open(str(source)) as container, av.open(str(target), "w", format="mp4") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        packets = [p for p in container.demux(stream) if p.size]
        times = sorted(p.pts for p in packets)
        start = times[first]
        key = max(i for i, p in enumerate(packets) if p.is_keyframe and p.pts <= start)
        for packet in packets[key:]:
            packet.pts, packet.dts = packet.pts - start, packet.dts - start
            packet.stream = copy
            out.mux(packet)
    return target


def copy_into(source: Path, target: Path, container: str, shift_s: Fraction = Fraction(0)) -> Path:
    """The same packets in another container, `shift_s` later."""
    options = {"avoid_negative_ts": "disabled"}
    with av.open(str(source)) as read, av.open(str(target), "w", format=container, options=options) as out:
        stream = read.streams.video[0]
        copy = out.add_stream_from_template(stream)
        shift = int(shift_s / stream.time_base)
        for packet in read.demux(stream):
            if packet.size:
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                packet.stream = copy
                out.mux(packet)
    return target


def flip_bits(source: Path, target: Path, bits: int, seed: int) -> Path:
    """Flip bits of the media data of an mp4, drawn from `seed`; the index stays whole."""
    data = bytearray(source.read_bytes())
    start, stop = _media_data(data)
    rng = random.Random(seed)
    for _ in range(bits):
        at = rng.randrange(start * 8, stop * 8)
        data[at // 8] ^= 1 << at % 8
    target.write_bytes(data)
    return target


def cut_off(source: Path, target: Path, share: float) -> Path:
    """The first share of the media data of an mp4 whose index lies in front."""
    data = source.read_bytes()
    start, stop = _media_data(data)
    assert data.find(b"moov") < start, "the index must lie in front"
    target.write_bytes(data[: start + int((stop - start) * share)])
    return target


def index_first(source: Path, target: Path) -> Path:
    """The same mp4 with its index in front."""
    with av.open(str(source)) as read:
        options = {"movflags": "+faststart"}
        with av.open(str(target), "w", format="mp4", options=options) as out:
            stream = read.streams.video[0]
            copy = out.add_stream_from_template(stream)
            for packet in read.demux(stream):
                if packet.size:
                    packet.stream = copy
                    out.mux(packet)
    return target


def _media_data(data: bytes | bytearray) -> tuple[int, int]:
    at = data.find(b"mdat")
    return at + 4, at - 4 + int.from_bytes(data[at - 4 : at], "big")

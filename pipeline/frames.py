"""One strict sequential decode of a video: frame k is the k-th presented frame, with its own PTS.

`frame_pass` decodes every packet once, in order, on one thread. Observers see each frame once and share its
views; memory does not grow with the clip beyond 33 bytes a frame. Nothing is read from a header but what the
report quotes, and no frame is found by number or by rate. Source: DESIGN rule 1; spec/faults.md D1, D2, D4,
D8; spec/formats.md 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from pipeline.damage import Packets
from pipeline.picture import Picture as Picture
from pipeline.picture import native_planes as native_planes
from schemas.quality import Reason, because

# Detect everything, explode on nothing: on 12 files with 3 or 40 flips "explode" lost up to 87 frames of 300
# that otherwise come out with their PTS and a flag; detection alone changed neither count nor picture.
STRICT = {"err_detect": "crccheck+bitstream+buffer+careful"}
ERRORS_KEPT = 20


class MediaError(ValueError):
    """A file that gives no frame table: its named reason, and the fact in one line."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return because(self.reason, self.detail)


class Observer(Protocol):
    """Sees every frame of a pass once, in order. May keep the latest picture, never more."""

    def see(self, index: int, picture: Picture) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file: frames with start <= PTS < stop, in the stream's ticks. key: PTS of a key frame at or
    before `start`, where reading may begin; None reads from the first packet."""

    start: int
    stop: int
    key: int | None = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What container and stream say, quoted; none of it is used as a count, a time or an index.

    rotation: degrees counterclockwise that bring the stored picture upright. sample_aspect: pixel width to
    height. header_frames: 0 where the header holds no count. rates: the header's, best first.
    """

    container: str
    brand: str
    streams: int
    index: int
    codec: str
    width: int
    height: int
    pix_fmt: str
    colorspace: int
    color_range: int
    rotation: int
    interlaced: bool
    sample_aspect: Fraction
    time_base: Fraction
    header_frames: int
    rates: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """Counts of one pass. packets: with data; hidden: of these, marked not to be shown (edit list);
    bad_packets: raised or marked corrupt; flagged: frames that the decoder marked damaged or concealed;
    lost: presentable packets without a frame; unplaced: frames whose PTS does not increase, left out;
    damaged: half-open spans of PTS in which no picture can be trusted; errors: the first 20, one line each.
    """

    stream: StreamInfo
    packets: int
    hidden: int
    bad_packets: int
    flagged: int
    lost: int
    unplaced: int
    damaged: tuple[tuple[int, int], ...]
    errors: tuple[str, ...]

    @property
    def missing_packets(self) -> int:
        """Packets that the header counts and the file does not hold (cut off, or hidden by an edit list
        that the container does not hand out); 0 where the header holds no count."""
        return max(0, self.stream.header_frames - self.packets)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Frames as presented. pts: int64 [F], the file's own, strictly increasing; pixels: uint64 [F];
    ok: bool [F], False inside a damaged span; repeat: bool [F], bit-equal to the frame before."""

    pts: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.uint64]
    ok: npt.NDArray[np.bool_]
    repeat: npt.NDArray[np.bool_]
    report: DecodeReport

    def __len__(self) -> int:
        return len(self.pts)


@dataclass
class _Pass:
    packets: Packets
    pts: list[int] = field(default_factory=list)
    pixels: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    bad_packets: int = 0
    flagged: int = 0
    unplaced: int = 0
    first: Any = None
    seeks: bool = False
    before: list[int] = field(default_factory=list)

    def time_of(self, frame: Any) -> int | None:
        """PTS of the frame that comes out now."""
        if self.packets.counted:
            return self.packets.time_of(len(self.before) + len(self.pts))
        return None if frame.pts is None else int(frame.pts)

    def error(self, text: str) -> None:
        if len(self.errors) < ERRORS_KEPT:
            self.errors.append(" ".join(text.split())[:200])


def frame_pass(
    path: Path,
    observers: Sequence[Observer] = (),
    stream: int | None = None,
    part: Part | None = None,
) -> Decoded:
    """Decode one video stream of a file from its first packet to its last, or a part of it.

    stream: index in the container; None picks the one that ffmpeg calls best. part: only its frames are seen
    and told of, at the PTS of the file; the header's frame count is then left out of the report. A caller
    that gives `part.key` compares the pictures with those of a whole pass: a seek is never believed.
    A packet that cannot be decoded is counted and the rest is recovered; what depends on it is marked.
    Raises MediaError when there is nothing to decode or the picture's size changes on the way.
    """
    scaler = VideoReformatter()
    with _opened(path) as container:
        state = _Pass(Packets(counted=container.format.name == "avi"))
        chosen = _choose(container, stream)
        chosen.codec_context.thread_count = 1
        chosen.codec_context.options = STRICT
        if part is not None and part.key is not None and not state.packets.counted:
            container.seek(part.key, stream=chosen, backward=True)
            state.seeks = True
        for frame in _decode(container, chosen, state):
            time = state.time_of(frame)
            if part is not None and time is not None:
                if time >= part.stop:
                    break
                if time < part.start:
                    state.before.append(time)
                    continue
            _take(frame, time, scaler, observers, state)
        if state.first is None:
            raise MediaError(Reason.NO_FRAMES, f"{len(state.packets)} packets give no frame with a time")
        info = _info(container, chosen, state.first)
    return _decoded(state, info, part)


def _decoded(state: _Pass, info: StreamInfo, part: Part | None) -> Decoded:
    """Frames and report of a pass, or of a part of it."""
    pts = np.asarray(state.pts, np.int64)
    pixels = np.asarray(state.pixels, np.uint64)
    if part is None:
        lost, damaged = state.packets.damage(pts)
    else:
        info = replace(info, header_frames=0)
        seen = np.concatenate([np.asarray(sorted(set(state.before)), np.int64), pts])
        lost, spans = state.packets.damage(seen, part.stop)
        damaged = tuple((a, b) for a, b in spans if b > part.start and a < part.stop)
    ok = np.ones(len(pts), np.bool_)
    for start, stop in damaged:
        ok[np.searchsorted(pts, start) : np.searchsorted(pts, stop)] = False
    repeat = np.zeros(len(pts), np.bool_)
    repeat[1:] = pixels[1:] == pixels[:-1]
    report = DecodeReport(
        stream=info,
        packets=len(state.packets),
        hidden=state.packets.hidden,
        bad_packets=state.bad_packets,
        flagged=state.flagged,
        lost=lost,
        unplaced=state.unplaced,
        damaged=damaged,
        errors=tuple(state.errors),
    )
    return Decoded(pts, pixels, ok, repeat, report)


def _opened(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise MediaError(Reason.EMPTY_FILE, "the file has 0 bytes")
    try:
        return av.open(str(path), metadata_errors="replace")
    except av.error.FFmpegError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> MediaError:
    with path.open("rb") as f:
        head = f.read(12)
    # An ISO media file starts with the box "ftyp"; one that does not open has lost its index, the box "moov".
    if head[4:8] == b"ftyp":
        return MediaError(Reason.TRUNCATED, "the mp4 index (moov) is missing or cut off")
    return MediaError(Reason.NOT_A_VIDEO, f"no known container ({type(error).__name__})")


def _choose(container: Any, index: int | None) -> Any:
    kinds = [s.type for s in container.streams]
    if index is None:
        best = container.streams.best("video")
    else:
        best = container.streams[index] if index < len(kinds) and kinds[index] == "video" else None
    if best is None:
        wanted = "video" if index is None else f"video stream {index}"
        raise MediaError(Reason.NO_VIDEO_STREAM, f"no {wanted} among {', '.join(kinds) or '-'}")
    return best


def _decode(container: Any, stream: Any, state: _Pass) -> Iterator[Any]:
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.error.FFmpegError as error:
            # The demuxer cannot go on: everything behind the last packet is lost.
            state.bad_packets += 1
            state.error(f"demuxer: {error}")
            state.packets.ends_early()
            packet = None
        if packet is not None and packet.size:
            state.packets.add(packet)
            if state.seeks:
                state.packets.begins_inside()
                state.seeks = False
            if packet.is_corrupt:
                state.bad_packets += 1
                state.packets.flag_last()
        try:
            yield from stream.codec_context.decode(packet)
        except av.error.FFmpegError as error:
            state.bad_packets += 1
            state.error(f"packet {len(state.packets) - 1}: {error}")
            state.packets.flag_last()
        if packet is None:
            return


def _take(
    frame: Any, pts: int | None, scaler: VideoReformatter, observers: Sequence[Observer], state: _Pass
) -> None:
    if frame.is_corrupt:
        state.flagged += 1
        if pts is not None:
            state.packets.flag(pts)
        else:
            state.packets.flag_last()
    if pts is None or (state.pts and pts <= state.pts[-1]):
        state.unplaced += 1
        state.error(f"frame behind {len(state.pts) - 1} has PTS {pts}: not after the one before; left out")
        state.packets.flag_last() if pts is None else state.packets.flag(pts)
        return
    if state.first is None:
        state.first = frame
    elif (frame.width, frame.height) != (state.first.width, state.first.height):
        was = f"{state.first.width}x{state.first.height}"
        now = f"{frame.width}x{frame.height}"
        raise MediaError(Reason.DECODE_DAMAGE, f"frame {len(state.pts)} is {now}, the first is {was}")
    picture = Picture(frame, scaler)
    for observer in observers:
        observer.see(len(state.pts), picture)
    state.pts.append(pts)
    state.pixels.append(picture.pixels())


def _info(container: Any, stream: Any, frame: Any) -> StreamInfo:
    # Every property is copied while the container is open: PyAV 18.1 crashes on some of them afterwards.
    rates = [r for r in (stream.guessed_rate, stream.base_rate, stream.average_rate) if r]
    return StreamInfo(
        container=container.format.name,
        brand=container.metadata.get("major_brand", "").strip(),
        streams=len(container.streams),
        index=stream.index,
        codec=stream.codec_context.name,
        width=frame.width,
        height=frame.height,
        pix_fmt=frame.format.name,
        colorspace=int(frame.colorspace),
        color_range=int(frame.color_range),
        rotation=int(frame.rotation),
        interlaced=bool(frame.interlaced_frame),
        sample_aspect=stream.sample_aspect_ratio or Fraction(1),
        time_base=Fraction(stream.time_base),
        header_frames=int(stream.frames),
        rates=tuple(dict.fromkeys(Fraction(r) for r in rates)),
    )

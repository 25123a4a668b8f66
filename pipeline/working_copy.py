"""Write the media file of a source that is not clean: a stream copy where only the container is odd, else a
constant-rate, upright, square-pixel, 8-bit H.264 file. Bytes depend on the source and the arguments alone.

Source: DESIGN rule 1; spec/faults.md D1, D6.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from pipeline.frames import Decoded, Part, StreamInfo, frame_pass
from pipeline.picture import Picture, native_planes
from pipeline.timing import Timing

BT709 = 1
LIMITED = 1
# One writer, no clock in the file, index in front (a range read of the head is enough to open it).
MP4 = {"fflags": "+bitexact", "movflags": "+faststart"}
# No B-frames: no edit list, so a count is a count for every reader. A key frame every 32 frames bounds what a
# random read decodes.
X264 = {"preset": "veryfast", "bf": "0", "g": "32", "keyint_min": "1", "threads": "1", "flags": "+bitexact"}
SMOOTH = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


@dataclass(frozen=True, slots=True)
class Geometry:
    """Stored picture to upright media picture, in this order: scale to (width, height) with square pixels,
    crop to even by leaving out the last column and row, turn counterclockwise by quarter turns."""

    width: int
    height: int
    turns: int

    @property
    def cropped(self) -> tuple[int, int]:
        return self.width - self.width % 2, self.height - self.height % 2

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the media picture."""
        width, height = self.cropped
        return (height, width) if self.turns % 2 else (width, height)


def geometry(stream: StreamInfo) -> Geometry:
    """Square pixels by widening or heightening, never by dropping detail; the display rotation as turns."""
    aspect = stream.sample_aspect
    wide = stream.width * aspect if aspect > 1 else Fraction(stream.width)
    high = stream.height / aspect if aspect < 1 else Fraction(stream.height)
    return Geometry(round(wide), round(high), round(stream.rotation / 90) % 4)


def remux(source: Path, target: Path, decoded: Decoded, rate: Fraction) -> None:
    """Copy the packets of the decoded stream into an mp4, frame k at exactly k/rate.

    Packets that gave no frame are copied too; the caller compares the pictures of the result.
    """
    place = {int(t): k for k, t in enumerate(decoded.pts)}
    with av.open(str(source)) as container:
        stream = container.streams[decoded.report.stream.index]
        packets = [p for p in container.demux(stream) if p.size]
        order = [place.get(p.pts, -1) for p in packets]
        delay = max((at - k for at, k in enumerate(order) if k >= 0), default=0)
        with av.open(str(target), "w", format="mp4", options=MP4) as out:
            copy = out.add_stream_from_template(stream)
            copy.time_base = 1 / rate
            copy.codec_context.framerate = rate
            for at, (packet, k) in enumerate(zip(packets, order, strict=True)):
                packet.stream = copy
                packet.time_base = 1 / rate
                packet.dts = at - delay
                packet.pts = k if k >= 0 else at - delay
                packet.duration = 1
                out.mux(packet)


def encode(
    source: Path, target: Path, decoded: Decoded, timing: Timing, crf: int, part: Part | None = None
) -> Geometry:
    """Decode again and write the media file slot by slot. Returns what was done to the picture.

    Raises RuntimeError when the second decode gives other pictures than the first.
    """
    plan = geometry(decoded.report.stream)
    with _Encoder(target, plan, timing, crf) as encoder:
        again = frame_pass(source, [encoder], decoded.report.stream.index, part)
    if not np.array_equal(again.pixels, decoded.pixels):
        raise RuntimeError("two decodes of the same source gave different pictures; run the clip again")
    return plan


class _Encoder:
    """Observer that writes the slots which show a source frame when that frame passes."""

    def __init__(self, target: Path, plan: Geometry, timing: Timing, crf: int) -> None:
        self._plan = plan
        self._sources = timing.source_index
        self._slot = 0
        self._scaler = VideoReformatter()
        self._out: Any = av.open(str(target), "w", format="mp4", options=MP4)
        self._stream = self._out.add_stream("libx264", rate=timing.rate, options={**X264, "crf": str(crf)})
        self._stream.width, self._stream.height = plan.size
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.time_base = 1 / timing.rate
        context.color_range = LIMITED
        context.colorspace = context.color_primaries = context.color_trc = BT709

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._out.mux(self._stream.encode(None))
        finally:
            self._out.close()

    def see(self, index: int, picture: Picture) -> None:
        if self._slot < len(self._sources) and self._sources[self._slot] == index:
            planes = upright(picture.frame, self._plan, self._scaler)
        while self._slot < len(self._sources) and self._sources[self._slot] == index:
            frame = _frame(planes, self._plan.size)
            frame.pts = self._slot
            frame.time_base = self._stream.codec_context.time_base
            self._out.mux(self._stream.encode(frame))
            self._slot += 1


def upright(frame: Any, plan: Geometry, scaler: VideoReformatter) -> list[npt.NDArray[np.uint8]]:
    """The three planes, uint8 [h, w], of the media picture: BT.709, limited range, 4:2:0.

    swscale takes an untagged matrix for BT.601, as every decoder of spec/formats.md 3 does.
    """
    flat = scaler.reformat(
        frame,
        width=plan.width,
        height=plan.height,
        format="yuv420p",
        dst_colorspace=BT709,
        src_color_range=frame.color_range,
        dst_color_range=LIMITED,
        interpolation=SMOOTH,
        threads=1,
    )
    width, height = plan.cropped
    planes = native_planes(flat)
    cut = [planes[0][:height, :width], *(p[: height // 2, : width // 2] for p in planes[1:])]
    return [np.ascontiguousarray(np.rot90(p, plan.turns)) for p in cut]


def _frame(planes: list[npt.NDArray[np.uint8]], size: tuple[int, int]) -> Any:
    frame = VideoFrame(*size, "yuv420p")
    for plane, data in zip(frame.planes, planes, strict=True):
        padded = np.zeros((plane.height, plane.line_size), np.uint8)
        padded[:, : data.shape[1]] = data
        plane.update(padded.tobytes())
    frame.colorspace, frame.color_range = BT709, LIMITED
    return frame

"""Windows of a media file as video files of their own: ViPE takes a whole file, from frame 0 to its end.

Frame j of a window's file is frame start + j of the media file, bit for bit in the decoded planes.
Source: DESIGN 4; spec/faults.md D1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import av
from av.video.frame import VideoFrame

from pipeline.picture import Picture
from schemas.timeline import Span

MP4 = {"fflags": "+bitexact"}
# qp 0 is lossless. No B-frames: no edit list, so the header's count, which ViPE goes by, is the true one. A
# window of 150 frames of 640x360 takes 13-15 MB (nav01), for the minute that it lives.
LOSSLESS = {"preset": "ultrafast", "qp": "0", "bf": "0", "threads": "1", "flags": "+bitexact"}

Take = Callable[[int, Path], None]


class WindowFiles:
    """Observer of a pass over a media file. Each window is written while its frames pass, handed to `take`
    with its number as soon as it is complete, and then deleted."""

    def __init__(self, spans: Sequence[Span], rate: Fraction, folder: Path, take: Take) -> None:
        self._spans = spans
        self._rate = rate
        self._folder = folder
        self._take = take
        self._open: dict[int, _File] = {}

    def __enter__(self) -> WindowFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()

    def see(self, index: int, picture: Picture) -> None:
        for number, span in enumerate(self._spans):
            if not span.start <= index < span.stop:
                continue
            if index == span.start:
                path = self._folder / f"w{number:04d}.mp4"
                self._open[number] = _File(path, picture.size, self._rate)
            self._open[number].add(picture)
            if index == span.stop - 1:
                file = self._open.pop(number)
                file.finish()
                self._take(number, file.path)
                file.path.unlink()


class _File:
    def __init__(self, path: Path, size: tuple[int, int], rate: Fraction) -> None:
        self.path = path
        self._frames = 0
        self._out: Any = av.open(str(path), "w", format="mp4", options=MP4)
        self._stream = self._out.add_stream("libx264", rate=rate, options=LOSSLESS)
        self._stream.width, self._stream.height = size
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = 1 / rate

    def add(self, picture: Picture) -> None:
        shown = picture.limited
        context = self._stream.codec_context
        if self._frames == 0:
            # The same tags as the media file: every decoder then makes the same RGB of the same planes.
            context.colorspace, context.color_range = shown.colorspace, shown.color_range
            context.color_primaries, context.color_trc = shown.color_primaries, shown.color_trc
        # A copy: the decoded frame carries its type (I, P), which the encoder would follow, and its own time.
        frame = VideoFrame.from_ndarray(shown.to_ndarray(), format="yuv420p")
        frame.colorspace, frame.color_range = shown.colorspace, shown.color_range
        frame.pts, frame.time_base = self._frames, context.time_base
        self._out.mux(self._stream.encode(frame))
        self._frames += 1

    def finish(self) -> None:
        self._out.mux(self._stream.encode(None))
        self.close()

    def close(self) -> None:
        self._out.close()

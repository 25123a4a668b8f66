"""Videos that commands write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import numpy.typing as npt

from schemas.timeline import GRID_RATE

CRF = "14"


@contextmanager
def video_writer(path: Path) -> Iterator[Callable[[npt.NDArray[np.uint8]], None]]:
    """H.264 at 16 frames a second, there under its name when it is whole."""
    partial = path.with_name(f".{path.name}")
    stream: Any = None
    with av.open(str(partial), "w", format="mp4") as container:

        def write(rgb: npt.NDArray[np.uint8]) -> None:
            nonlocal stream
            if stream is None:
                stream = container.add_stream("libx264", rate=GRID_RATE, options={"crf": CRF})
                stream.height, stream.width, stream.pix_fmt = *rgb.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, "rgb24")))

        try:
            yield write
            container.mux(stream.encode(None))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    partial.rename(path)


def is_whole(path: Path, frames: int) -> bool:
    """Is there a video that can be decoded, with so many frames."""
    if not path.exists():
        return False
    container: Any
    try:
        with av.open(str(path)) as container:
            return sum(1 for _ in container.decode(video=0)) == frames
    except (av.error.FFmpegError, IndexError):  # no video, or one cut off
        return False

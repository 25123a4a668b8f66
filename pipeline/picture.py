"""One decoded frame and its views, each made once and shared by every observer.

Source: spec/formats.md 3 (what other decoders give).
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import xxhash
from av.video.reformatter import VideoReformatter

GRAY_WIDTH = 320
FULL_RANGE = 2  # AVCOL_RANGE_JPEG


class Picture:
    """One decoded frame as stored (a display rotation is not applied). Views are made once, on first use."""

    __slots__ = ("_gray", "_limited", "_rgb", "_scaler", "frame")

    def __init__(self, frame: Any, scaler: VideoReformatter) -> None:
        self.frame = frame
        self._scaler = scaler
        self._limited: Any = None
        self._gray: npt.NDArray[np.uint8] | None = None
        self._rgb: npt.NDArray[np.uint8] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.frame.width, self.frame.height

    def pixels(self) -> int:
        """xxh3_64 of the visible samples of all planes in the native pixel format; strides are left out."""
        digest = xxhash.xxh3_64()
        for plane in native_planes(self.frame):
            digest.update(np.ascontiguousarray(plane).data)
        return digest.intdigest()

    @property
    def limited(self) -> Any:
        """The frame as 8-bit limited-range yuv420p; the frame itself where it already is that."""
        if self._limited is None:
            frame = self.frame
            plain = frame.format.name == "yuv420p" and frame.color_range != FULL_RANGE
            self._limited = frame if plain else self._scaler.reformat(frame, **to_limited(frame))
        return self._limited

    @property
    def gray(self) -> npt.NDArray[np.uint8]:
        """uint8 [h, 320]: limited-range luma, area-averaged to width 320, height by the stored aspect."""
        if self._gray is None:
            width, height = self.size
            size = (GRAY_WIDTH, max(1, round(height * GRAY_WIDTH / width)))
            luma = native_planes(self.limited)[0]
            self._gray = np.asarray(cv2.resize(luma, size, interpolation=cv2.INTER_AREA), np.uint8)
        return self._gray

    @property
    def rgb(self) -> npt.NDArray[np.uint8]:
        """uint8 [H, W, 3]. Matrix and range as tagged, BT.601 limited where untagged: bit-equal to what the
        ffmpeg command, OpenCV and decord give (7 pack clips, 3 tagged, one full range: difference 0)."""
        if self._rgb is None:
            flat = self._scaler.reformat(self.frame, format="rgb24", threads=1)
            self._rgb = np.asarray(flat.to_ndarray(), np.uint8)
        return self._rgb


def to_limited(frame: Any) -> dict[str, Any]:
    """Arguments of a reformat to 8-bit limited-range yuv420p that keeps the matrix."""
    return {
        "format": "yuv420p",
        "src_color_range": frame.color_range,
        "dst_color_range": 1,
        "threads": 1,
    }


def native_planes(frame: Any) -> list[npt.NDArray[np.uint8]]:
    """uint8 [h, bytes a row] of each plane, without the padding behind each row.

    A format that shares planes between components in more than one plane, or has a palette, is read as rgb24.
    """
    components = len(frame.format.components)
    planes = frame.planes
    if frame.format.name.startswith("pal8") or (1 < len(planes) < components):
        frame = frame.reformat(format="rgb24", threads=1)
        components, planes = 3, frame.planes
    packed = len(planes) == 1 and components > 1
    rows = []
    for index, plane in enumerate(planes):
        bits = frame.format.padded_bits_per_pixel if packed else frame.format.components[index].bits
        row_bytes = (plane.width * bits + 7) // 8 if packed else plane.width * ((bits + 7) // 8)
        rows.append(np.frombuffer(plane, np.uint8).reshape(plane.height, -1)[:, :row_bytes])
    return rows

"""From a clip's picture to the model's: scaled to cover the configured size, then centre-cropped.

Source: DESIGN 2 (Geometry); spec/worldplay2.md a.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

MULTIPLE = 64
"""Heights and widths of the model are multiples of this: the low-resolution stream is a quarter of them, and
its latents' 2x2 patches need an even grid. Source: spec/worldplay2.md a.1."""


class GeometryError(ValueError):
    """A size that no picture of the model has; one line."""


def check_size(height: int, width: int) -> None:
    """Raises GeometryError unless both are positive multiples of 64."""
    if height <= 0 or width <= 0 or height % MULTIPLE or width % MULTIPLE:
        raise GeometryError(f"height and width must be multiples of {MULTIPLE}, not {height}x{width}")


@dataclass(frozen=True, slots=True)
class Cover:
    """Maps a picture of source pixels onto [height, width]: scaled to [scaled_height, scaled_width], of which
    the rectangle at (top, left) is kept. Square pixels: both scales are the larger of the two ratios, to the
    nearest whole pixel."""

    source_height: int
    source_width: int
    scaled_height: int
    scaled_width: int
    top: int
    left: int
    height: int
    width: int

    @staticmethod
    def of(source_height: int, source_width: int, height: int, width: int) -> Cover:
        """The cover of a source size. Raises GeometryError on a size that is no multiple of 64."""
        check_size(height, width)
        # Integers: the larger of height / source_height and width / source_width, without rounding it.
        if height * source_width >= width * source_height:
            scaled = height, round(source_width * height / source_height)
        else:
            scaled = round(source_height * width / source_width), width
        top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
        return Cover(source_height, source_width, *scaled, top, left, height, width)

    def apply(self, rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """uint8 [H, W, 3] of the source's size -> uint8 [height, width, 3].

        Area average where the picture shrinks, cubic where it grows: an average over whole source pixels has
        no aliasing, and a cubic keeps edges where there is less than one.
        """
        if rgb.shape != (self.source_height, self.source_width, 3):
            raise GeometryError(
                f"a picture of {rgb.shape[:2]} for a cover of {(self.source_height, self.source_width)}"
            )
        shrinks = self.scaled_height < self.source_height
        how = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
        scaled = cv2.resize(rgb, (self.scaled_width, self.scaled_height), interpolation=how)
        kept = scaled[self.top : self.top + self.height, self.left : self.left + self.width]
        return np.ascontiguousarray(kept, np.uint8)

    def intrinsics(self, fx: float, fy: float, cx: float, cy: float) -> tuple[float, float, float, float]:
        """Intrinsics in pixels of the source, as they are in the cropped picture. Pixel centres lie at whole
        numbers, so the scale acts around the corner at -0.5."""
        sx, sy = self.scaled_width / self.source_width, self.scaled_height / self.source_height
        return fx * sx, fy * sy, (cx + 0.5) * sx - 0.5 - self.left, (cy + 0.5) * sy - 0.5 - self.top

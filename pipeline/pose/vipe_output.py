"""What ViPE writes for one video, read with nothing taken on trust.

<folder>/pose/<n>.npz         data float [N, 4, 4], camera-to-world, OpenCV axes, metres; inds int [N]
<folder>/intrinsics/<n>.npz   data float [N, 4], fx fy cx cy in pixels (other cameras: other columns); inds
<folder>/intrinsics/<n>_camera.txt   one line a frame, "0: PINHOLE"
n is the stem of the video's name, inds are its frames. vipe/<n>_info.pkl is a pickle and is never opened.
Source: spec/formats.md 1.4.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from schemas.pose import PoseTrack, Scale

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SKEW = 1e-3
"""Largest entry of R R^T - I that is still rounding: ViPE writes float32, whose products are off by up to
1e-6. What passes is made orthonormal, because a track asks for 1e-6."""
PINHOLE = "PINHOLE"


class BadOutput(ValueError):
    """An output that is not what the layout promises; the text says which file and what is wrong."""


class MissingOutput(BadOutput):
    """A file of the layout that is not there."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the result of the video `name`.mp4 lies under an output folder."""

    folder: Path
    name: str

    @property
    def pose(self) -> Path:
        return self.folder / "pose" / f"{self.name}.npz"

    @property
    def intrinsics(self) -> Path:
        return self.folder / "intrinsics" / f"{self.name}.npz"

    @property
    def cameras(self) -> Path:
        return self.folder / "intrinsics" / f"{self.name}_camera.txt"


def read_poses(layout: Layout, frames: int, estimator: str) -> PoseTrack:
    """Track of F = `frames` frames; frames that `inds` leaves out are invalid.

    Raises BadOutput on a missing or unreadable file, another shape, frames outside the video or named twice,
    and rows that are not finite or hold no rotation: one such row says that the solve went wrong.
    """
    data, inds = _arrays(layout.pose, frames, (4, 4))
    unknown = np.asarray(~np.isfinite(data).all(axis=(1, 2)), np.bool_)
    if unknown.any():
        raise BadOutput(f"{_name(layout.pose)}: {_share(unknown)} are not finite")
    turned = data[:, :3, :3]
    skew = np.abs(turned @ turned.transpose(0, 2, 1) - np.eye(3)).max(axis=(1, 2))
    wrong: Bools = (skew > SKEW) | (np.linalg.det(turned) < 0)
    wrong |= np.abs(data[:, 3] - [0, 0, 0, 1]).max(axis=1) > SKEW
    if wrong.any():
        raise BadOutput(f"{_name(layout.pose)}: {_share(wrong)} are no camera-to-world matrices")
    rotation, translation = np.full((frames, 3, 3), np.nan), np.full((frames, 3), np.nan)
    rotation[inds] = Rotation.from_matrix(turned).as_matrix()
    translation[inds] = data[:, :3, 3]
    valid = np.zeros(frames, np.bool_)
    valid[inds] = True
    return PoseTrack(rotation, translation, valid, Scale.METRE, estimator)


def read_focal(layout: Layout, frames: int) -> float | None:
    """Median focal length in pixels, or None where the camera is no pinhole. Raises BadOutput."""
    if not layout.cameras.is_file():
        raise MissingOutput(f"{_name(layout.cameras)} is missing")
    lines = layout.cameras.read_text(encoding="utf-8", errors="replace").split("\n")
    kinds = {line.partition(":")[2].strip() for line in lines if line.strip()}
    if kinds != {PINHOLE}:
        return None
    data, _ = _arrays(layout.intrinsics, frames, (4,))
    focal = float(np.median(data[:, 0]))
    if not (np.isfinite(focal) and focal > 0):
        raise BadOutput(f"{_name(layout.intrinsics)}: a focal length of {focal:g} pixels")
    return focal


def _arrays(path: Path, frames: int, row: tuple[int, ...]) -> tuple[Floats, Ints]:
    """(data float64 [N, *row], inds int64 [N]), N >= 1, of one npz of the layout."""
    if not path.is_file():
        raise MissingOutput(f"{_name(path)} is missing")
    try:
        with np.lib.npyio.NpzFile(path.open("rb"), own_fid=True, allow_pickle=False) as arrays:
            data, inds = arrays["data"], arrays["inds"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadOutput(f"{_name(path)} cannot be read ({' '.join(str(error).split())[:100]})") from None
    if inds.ndim != 1 or inds.dtype.kind not in "iu":
        raise BadOutput(f"{_name(path)}: inds is {inds.dtype} {inds.shape}, not a row of integers")
    if data.shape != (len(inds), *row) or data.dtype.kind != "f":
        raise BadOutput(f"{_name(path)}: data is {data.dtype} {data.shape} for {len(inds)} frames")
    if len(inds) == 0:
        raise BadOutput(f"{_name(path)} holds no frame")
    if inds.min() < 0 or inds.max() >= frames:
        raise BadOutput(f"{_name(path)}: frames {inds.min()}..{inds.max()} of a video of {frames}")
    if len(np.unique(inds)) != len(inds):
        raise BadOutput(f"{_name(path)}: {len(inds) - len(np.unique(inds))} frames are named twice")
    return data.astype(np.float64), inds.astype(np.int64)


def _share(rows: Bools) -> str:
    return f"{np.count_nonzero(rows)} of {len(rows)} poses"


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"

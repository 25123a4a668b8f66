"""Camera poses, with the convention and the scale in the type.

Convention of every pose in this project: camera-to-world, OpenCV axes (x right, y down, z forward), column
vectors: p_world = R p_camera + t. Angles in degrees; yaw right and pitch up are positive.
Source: DESIGN rules 4, 5; spec/faults.md P7, P8.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

Vec3 = tuple[float, float, float]


class Scale(StrEnum):
    METRE = "metre"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PoseTrack:
    """Poses of F consecutive frames, camera-to-world, OpenCV axes.

    rotation: float64 [F, 3, 3]; translation: float64 [F, 3], in metres or, when scale is unknown, in one
        arbitrary unit for the whole track.
    valid: bool [F]; rows that are not valid hold NaN and are never interpolated.
    up: unit vector of gravity-up in world axes, or None when it is not known.
    world: int64 [F], poses compare only inside one world; None when the whole track is one.
    estimator: name and version of what made the track.
    """

    rotation: npt.NDArray[np.float64]
    translation: npt.NDArray[np.float64]
    valid: npt.NDArray[np.bool_]
    scale: Scale
    estimator: str
    up: Vec3 | None = None
    world: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        n = len(self.valid)
        if self.world is not None and self.world.shape != (n,):
            raise ValueError(f"a track of {n} frames needs one world a frame, got {self.world.shape}")
        if self.rotation.shape != (n, 3, 3) or self.translation.shape != (n, 3):
            raise ValueError(f"a track of {n} frames needs rotation [{n},3,3] and translation [{n},3]")
        r, v = self.rotation[self.valid], self.translation[self.valid]
        if not (np.isnan(self.rotation[~self.valid]).all() and np.isnan(self.translation[~self.valid]).all()):
            raise ValueError("a row that is not valid must hold NaN")
        if not (np.isfinite(r).all() and np.isfinite(v).all()):
            raise ValueError("a valid pose must be finite")
        if len(r) and not np.allclose(r @ r.transpose(0, 2, 1), np.eye(3), atol=1e-6):
            raise ValueError("a rotation must be orthonormal")
        if len(r) and np.any(np.linalg.det(r) < 0):
            raise ValueError("a rotation must not mirror: check the handedness of the source")

    def __len__(self) -> int:
        return len(self.valid)


def turn(
    rotation_a: npt.NDArray[np.float64], rotation_b: npt.NDArray[np.float64], up: Vec3 | None
) -> npt.NDArray[np.float64]:
    """(yaw right, pitch up) in degrees from pose a to pose b; float64 [N, 2], each within +-180.

    rotation_a, rotation_b: camera-to-world [N, 3, 3]; NaN rows give NaN.
    With gravity known, yaw is the twist of the relative world rotation about it and pitch the rest about the
    camera's right axis: exact for a turn on the spot at any pitch, and without a pole. Without gravity, both
    are components of the rotation vector in camera axes. Never a difference of Euler angles.
    Source: spec/faults.md P8; spec/worldplay2.md a.6.
    """
    out = np.full((len(rotation_a), 2), np.nan)
    known = np.isfinite(rotation_a).all(axis=(1, 2)) & np.isfinite(rotation_b).all(axis=(1, 2))
    if not known.any():
        return out
    a, b = rotation_a[known], rotation_b[known]
    if up is None:
        vec = Rotation.from_matrix(a.transpose(0, 2, 1) @ b).as_rotvec(degrees=True)
        out[known] = vec[:, [1, 0]]  # +y is down: a right-handed turn about it goes right; +x tilts up
        return out
    down = -np.asarray(up, np.float64)
    world = Rotation.from_matrix(b @ a.transpose(0, 2, 1))
    quat = world.as_quat()  # x y z w
    yaw = 2 * np.arctan2(quat[:, :3] @ down, quat[:, 3])
    yaw = (yaw + np.pi) % (2 * np.pi) - np.pi
    rest = Rotation.from_rotvec(-yaw[:, None] * down) * world
    right = a[:, :, 0]
    out[known, 0] = np.degrees(yaw)
    out[known, 1] = np.degrees(np.einsum("ni,ni->n", rest.as_rotvec(), right))
    return out


def turn_between(
    track: PoseTrack, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(yaw right, pitch up) in degrees from frames `start` to frames `stop` of a track, float64 [N, 2]; NaN
    where either pose is missing or they lie in different worlds. See `turn`."""
    out = turn(track.rotation[start], track.rotation[stop], track.up)
    if track.world is not None:
        out[track.world[start] != track.world[stop]] = np.nan
    return out

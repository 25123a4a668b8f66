"""Poses that the game itself logged, brought to the project's convention.

Nothing is estimated. The key map states the log's world axes, handedness, signs and unit; a frame without a
row is invalid. Source: DESIGN rules 4, 5; spec/faults.md P7, P8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from pipeline.alignment import align
from pipeline.pose import Estimated
from pipeline.sources import SourceConfig
from pipeline.sources.gameplay import entry_of
from pipeline.sources.keymap import PosePart, QuaternionMeaning
from pipeline.sources.sidecar import Columns, SidecarError, read_columns
from pipeline.stage import Unit
from pipeline.store import Store
from schemas.clip import FrameTable
from schemas.pose import PoseTrack, Scale, Vec3

Floats = npt.NDArray[np.float64]

_AXES = {"x": np.array([1.0, 0, 0]), "y": np.array([0, 1.0, 0]), "z": np.array([0, 0, 1.0])}


class Given:
    """The estimator that reads the pose log which the key map of the clip's source names.

    Of ViZDoom it should be known that looking up or down shears the picture instead of turning the camera:
    the pose says where the player looks.
    """

    name = "given-1"

    def __init__(self, source: SourceConfig) -> None:
        self._source = source

    def applies(self, unit: Unit) -> bool:
        return unit.clip.poses is not None

    def estimate(self, unit: Unit, table: FrameTable) -> Estimated:
        """Raises SidecarError when the log cannot be read."""
        clip = unit.clip
        entry = entry_of(unit, self._source)
        if clip.poses is None or entry.poses is None:
            raise SidecarError(f"{clip.source_path} has no pose log in its key map")
        return Estimated(read_track(unit.source, clip.poses.path, entry.poses, table))


def read_track(source: Store, path: str, part: PosePart, table: FrameTable) -> PoseTrack:
    """Track of F frames from a pose log; frames without a row, or with an empty cell, are invalid."""
    columns = read_columns(source, path, part)
    alignment = align(table, part, columns, path)
    rows, translations = camera_to_world(columns, part)
    rotation, translation = rows[alignment.nearest], translations[alignment.nearest]
    valid = alignment.known & np.isfinite(rotation).all(axis=(1, 2)) & np.isfinite(translation).all(axis=1)
    return PoseTrack(
        rotation=np.where(valid[:, None, None], rotation, np.nan),
        translation=np.where(valid[:, None], translation, np.nan),
        valid=valid,
        scale=Scale.UNKNOWN if part.metres_per_unit is None else Scale.METRE,
        estimator=Given.name,
        up=_vec3(_AXES[part.world.up]),
    )


def camera_to_world(columns: Columns, part: PosePart) -> tuple[Floats, Floats]:
    """(rotation [R, 3, 3], translation [R, 3]) of every row of a pose log; camera-to-world, OpenCV axes.

    A left-handed world is mirrored into a right-handed one: of its two horizontal axes the one that is not x
    changes sign. Rows with an empty cell hold NaN.
    """
    names = part.columns
    position = np.stack([columns[names.x], columns[names.y], columns[names.z]], axis=1)
    if part.quaternion is not None:
        quaternion = np.stack([columns[n] for n in names.quaternion], axis=1)
        rotation, position = _from_quaternion(quaternion, position, part.quaternion)
    else:
        zero = np.zeros(len(position))
        yaw = columns[names.yaw] * (1 if part.yaw_positive == "left" else -1)
        pitch = columns[names.pitch] * (1 if part.pitch_positive == "up" else -1) if names.pitch else zero
        roll = columns[names.roll] * (1 if part.roll_positive == "right" else -1) if names.roll else zero
        rotation = _from_angles(np.radians(yaw), np.radians(pitch), np.radians(roll), part)
    if part.world.handed == "left":
        mirror = np.where(_AXES["z" if part.world.up == "y" else "y"] == 1, -1.0, 1.0)
        rotation, position = mirror[:, None] * rotation, position * mirror
    return rotation, position * (part.metres_per_unit or 1.0)


def _from_angles(left: Floats, up: Floats, lean: Floats, part: PosePart) -> Floats:
    """Columns right, down, forward of each row, in the world's axes. Radians; left, up and right positive.

    The directions are built from the world's named axes, so a left-handed world needs no other formula: only
    which horizontal axis lies to the left of yaw 0 depends on the handedness.
    """
    vertical = _AXES[part.world.up]
    ahead = _AXES[part.yaw_zero[-1]] * (-1 if part.yaw_zero[0] == "-" else 1)
    aside = np.cross(vertical, ahead) * (1 if part.world.handed == "right" else -1)  # left of yaw 0
    c, s = np.cos(left)[:, None], np.sin(left)[:, None]
    level, right = c * ahead + s * aside, s * ahead - c * aside
    cu, su = np.cos(up)[:, None], np.sin(up)[:, None]
    forward, down = cu * level + su * vertical, su * level - cu * vertical
    cl, sl = np.cos(lean)[:, None], np.sin(lean)[:, None]
    return np.stack([cl * right + sl * down, cl * down - sl * right, forward], axis=2)


def _from_quaternion(wxyz: Floats, position: Floats, meaning: QuaternionMeaning) -> tuple[Floats, Floats]:
    rotation = np.full((len(wxyz), 3, 3), np.nan)
    usable = np.isfinite(wxyz).all(axis=1) & (np.linalg.norm(wxyz, axis=1) > 0)
    rotation[usable] = Rotation.from_quat(wxyz[usable], scalar_first=True).as_matrix()
    if meaning.direction == "w2c":
        rotation = rotation.transpose(0, 2, 1)
        position = -np.einsum("nij,nj->ni", rotation, position)
    if meaning.camera == "opengl":  # x right, y up, z backward
        rotation = rotation * np.array([1.0, -1.0, -1.0])
    return rotation, position


def _vec3(v: Floats) -> Vec3:
    return (float(v[0]), float(v[1]), float(v[2]))

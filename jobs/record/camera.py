"""The camera of a recording. In third person the engine reports the player's eye: the camera is derived."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from jobs.record.engine import State
from jobs.record.wad import MapGeometry

CHASE_DISTANCE: Final = 90.0  # the engine's chase_dist: map units behind the player
CHASE_HEIGHT: Final = 48.0  # the player's height of 56 and the engine's chase_height of -8, above its feet
WALL_GAP: Final = 5.0  # the engine stops the camera this far before what it would hit ...
NO_GAP_WITHIN: Final = 10.0  # ... unless that is closer than this


def first_person(state: State) -> NDArray[np.float64]:
    """Camera (6,) x, y, z, yaw, pitch, roll as the engine reports it; engine convention, see `State`."""
    names = ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE", "PITCH", "ROLL")
    return np.array([state.values[f"CAMERA_{name}"] for name in names])


def third_person(state: State, geometry: MapGeometry, sector: int) -> NDArray[np.float64]:
    """Camera (6,) behind the player: straight back along the view, stopped by walls, floors and ceilings.

    sector: the player's. Checked against the boxes that the engine draws around things: see tests.
    Source: the engine's chase camera (P_AimCamera).
    """
    yaw, pitch = np.radians(state.values["ANGLE"]), np.radians(state.values["PITCH"])
    back = np.array([-np.cos(pitch) * np.cos(yaw), -np.cos(pitch) * np.sin(yaw), np.sin(pitch)])
    origin = np.array([*state.position, state.values["POSITION_Z"] + CHASE_HEIGHT])
    reach = free_distance(origin, back, CHASE_DISTANCE, state.sectors, geometry, sector)
    if NO_GAP_WITHIN < reach < CHASE_DISTANCE:
        reach -= WALL_GAP
    return np.array([*(origin + reach * back), state.values["ANGLE"], state.values["PITCH"], 0.0])


def free_distance(
    origin: NDArray[np.float64],
    ray: NDArray[np.float64],
    limit: float,
    heights: NDArray[np.float64],
    geometry: MapGeometry,
    sector: int,
) -> float:
    """Map units along the unit vector `ray` (3,) from `origin` (3,) to the first surface, at most `limit`.

    heights: (S, 2) floor and ceiling now. sector: where the ray starts; it counts until a line is crossed.
    """
    side, to_a = geometry.b - geometry.a, geometry.a - origin[:2]
    cross = ray[0] * side[:, 1] - ray[1] * side[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):  # lines along the ray are not crossed
        distance = (to_a[:, 0] * side[:, 1] - to_a[:, 1] * side[:, 0]) / cross
        along = (to_a[:, 0] * ray[1] - to_a[:, 1] * ray[0]) / cross
    crossed = np.flatnonzero(
        (cross != 0) & (distance > 0) & (distance <= limit) & (along >= 0) & (along <= 1)
    )
    for line in crossed[np.argsort(distance[crossed], kind="stable")]:
        # A ray that turns clockwise onto the line's direction comes from its right side.
        pair = (geometry.right[line], geometry.left[line])
        near, far = pair if cross[line] < 0 else pair[::-1]
        at = float(distance[line])
        if near >= 0:
            sector = int(near)
        plane = _plane(origin, ray, heights[sector], at)
        if plane < at:
            return plane
        z = origin[2] + at * ray[2]
        if far < 0 or z <= heights[far][0] or z >= heights[far][1]:
            return at
        sector = int(far)
    return _plane(origin, ray, heights[sector], limit)


def _plane(
    origin: NDArray[np.float64], ray: NDArray[np.float64], floor_ceiling: NDArray[np.float64], limit: float
) -> float:
    """Distance to the floor or ceiling that the ray meets before `limit`, or `limit`."""
    if ray[2] == 0.0:
        return limit
    surface = floor_ceiling[1] if ray[2] > 0 else floor_ceiling[0]
    return float(np.clip((surface - origin[2]) / ray[2], 0.0, limit))

"""Where a recording begins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from jobs.record.engine import State
from jobs.record.player import FOES, PICKUPS, NoRoute
from jobs.record.routes import PLAYER_HEIGHT, WalkMap
from jobs.record.wad import MapGeometry


def choose_start(
    walk: WalkMap, geometry: MapGeometry, state: State, rng: np.random.Generator, event: str | None
) -> tuple[NDArray[np.float64], float, NDArray[np.float64] | int | None]:
    """Where to begin, which way to look, and an event's target: a thing's id, or a place behind a door.

    event: a key of EVENT_KINDS, or None for a plain walk. Raises NoRoute when the map offers nothing here.
    """
    _, label = connected_components(walk.graph, directed=False)
    largest = label == np.argmax(np.bincount(label))
    floor, ceiling = state.sectors[walk.sector[walk.walkable]].T
    roomy = largest & (walk.clearance[walk.walkable] >= 56.0) & (ceiling - floor >= PLAYER_HEIGHT)
    nodes = np.flatnonzero(roomy)
    if len(nodes) == 0:
        raise NoRoute("the map has no open place to start from")
    target: NDArray[np.float64] | int | None = None
    node = int(rng.choice(nodes))
    if event == "door":
        node, target = _behind_a_door(walk, geometry, rng, largest, roomy)
    elif event is not None:
        wanted = [
            (t.id, at)
            for t in state.things
            if (t.name in FOES if event == "kill" else t.category in PICKUPS)
            and (at := int(walk.node[tuple(walk.cell_of(np.array([t.x, t.y])))])) >= 0
            and largest[at]
        ]
        if not wanted:
            raise NoRoute(f"the map has nothing to {event}")
        target, at = wanted[int(rng.integers(len(wanted)))]
        cost = walk.distances(walk.centre(np.array(at))).cost
        near = np.flatnonzero(roomy & (cost > 250.0) & (cost < 700.0))
        if len(near) == 0:
            raise NoRoute("no open place near the target")
        node = int(rng.choice(near))
    where = walk.centre(np.array(node))
    # Look along the longest free line, a little off it.
    headings = np.arange(0.0, 360.0, 15.0)
    free = [walk.free_ahead(where[None], np.array([h]), 1200.0)[0] for h in headings]
    yaw = float(headings[int(np.argmax(free))] + rng.uniform(-12.0, 12.0))
    return where, yaw, target


def _behind_a_door(
    walk: WalkMap,
    geometry: MapGeometry,
    rng: np.random.Generator,
    largest: NDArray[np.bool_],
    roomy: NDArray[np.bool_],
) -> tuple[int, NDArray[np.float64]]:
    """A start node and a place that is reached through a door."""
    in_door = np.isin(walk.sector[walk.walkable], geometry.door_sectors())
    doors = np.flatnonzero(largest & in_door)
    if len(doors) == 0:
        raise NoRoute("the map has no door")
    door = int(rng.choice(doors))
    cost = walk.distances(walk.centre(np.array(door))).cost
    starts = np.flatnonzero(roomy & (cost > 150.0) & (cost < 500.0))
    goals = np.flatnonzero((cost > 120.0) & (cost < 400.0))
    if len(starts) == 0 or len(goals) == 0:
        raise NoRoute("no open place near the door")
    start = int(rng.choice(starts))
    routes = walk.distances(walk.centre(np.array(start)))
    for goal in rng.permutation(goals)[:64]:
        rows, columns = walk.cell_of(routes.path(int(goal))).T
        if np.isin(walk.sector[rows, columns], geometry.door_sectors()).any():
            return start, walk.centre(np.array(goal))
    raise NoRoute("no way leads through the door")

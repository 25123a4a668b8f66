"""Where a player can walk on a map, and routes through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from jobs.record.wad import DAMAGE_SECTORS, DOOR_SPECIALS, HARMLESS_SPECIALS, IMPASSIBLE, MapGeometry

CELL = 8.0  # map units; the player is a box of 32 x 32
MAX_STEP = 24.0  # highest stair a player climbs
PLAYER_HEIGHT = 56.0
SOLID = ("Vegetation", "Decoration", "LightSource", "Hazard", "Gore")  # categories of things in the way
MIN_CLEARANCE = 24.0  # the box half-width is 16; a cell centre may be 4 * sqrt(2) off
COMFORT = 72.0  # routes keep this far from walls where there is room
NEIGHBOURS = ((0, 1), (1, 0), (1, 1), (1, -1), (0, -1), (-1, 0), (-1, -1), (-1, 1))


@dataclass(frozen=True)
class WalkMap:
    """A grid of CELL-sized cells, row = y, column = x, both growing; cell (0, 0) starts at `origin`."""

    origin: NDArray[np.float64]  # (2,)
    walkable: NDArray[np.bool_]  # (H, W)
    clearance: NDArray[np.float32]  # (H, W) map units to the nearest line that blocks
    sector: NDArray[np.int64]  # (H, W) sector index, -1 outside the map
    node: NDArray[np.int64]  # (H, W) graph node, -1 where not walkable
    cells: NDArray[np.int64]  # (N, 2) row, column of each node
    graph: csr_array  # (N, N) travel cost

    def cell_of(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Points (..., 2) in map units to clipped (row, column)."""
        column_row = np.floor((np.asarray(points) - self.origin) / CELL).astype(np.int64)
        high = np.array(self.walkable.shape) - 1
        return np.clip(column_row[..., ::-1], 0, high)

    def centre(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Centres (..., 2) of graph nodes in map units."""
        return self.origin + (self.cells[nodes][..., ::-1] + 0.5) * CELL

    def nearest_node(self, point: NDArray[np.float64]) -> int:
        """The node at `point`, or the closest one."""
        row, column = self.cell_of(point)
        if self.node[row, column] >= 0:
            return int(self.node[row, column])
        return int(np.argmin(np.abs(self.cells - (row, column)).sum(axis=1)))

    def clear_line(self, start: NDArray[np.float64], end: NDArray[np.float64]) -> bool:
        """True when every cell between two points is walkable."""
        steps = max(2, int(np.hypot(*(end - start)) / (CELL / 2)))
        points = start + np.linspace(0.0, 1.0, steps)[:, None] * (end - start)
        rows, columns = self.cell_of(points).T
        return bool(self.walkable[rows, columns].all())

    def free_ahead(
        self, points: NDArray[np.float64], yaws: NDArray[np.float64], reach: float
    ) -> NDArray[np.float64]:
        """Map units (F,) from points (F, 2) along yaws (F,) to the next line that blocks, up to `reach`."""
        steps = np.arange(0.0, reach, 8.0)
        ray = np.stack([np.cos(np.radians(yaws)), np.sin(np.radians(yaws))], axis=1)
        rows, columns = np.moveaxis(self.cell_of(points[:, None] + steps[:, None] * ray[:, None]), -1, 0)
        hit = (self.clearance[rows, columns] < 8.0) | (self.sector[rows, columns] < 0)
        return np.where(hit.any(axis=1), steps[hit.argmax(axis=1)], reach)

    def distances(self, source: NDArray[np.float64], penalty: NDArray[np.float64] | None = None) -> Routes:
        """Cheapest routes from `source` to all nodes; `penalty` (N,) multiplies the cost of entering one."""
        graph = self.graph
        if penalty is not None:
            graph = csr_array((graph.data * penalty[graph.indices], graph.indices, graph.indptr), graph.shape)
        start = self.nearest_node(source)
        cost, previous = dijkstra(graph, indices=start, return_predecessors=True)
        return Routes(self, start, cost, previous)


@dataclass(frozen=True)
class Routes:
    walk: WalkMap
    start: int
    cost: NDArray[np.float64]  # (N,) inf where unreachable
    previous: NDArray[np.int64]  # (N,)

    def path(self, goal: int) -> NDArray[np.float64]:
        """Points (P, 2) from the source to node `goal`."""
        nodes = [goal]
        while nodes[-1] != self.start:
            nodes.append(int(self.previous[nodes[-1]]))
        return self.walk.centre(np.array(nodes[::-1]))


def sector_grid(
    geometry: MapGeometry, origin: NDArray[np.float64], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Sector index of every cell centre: along a row, each line crossed names the sector on its far side."""
    grid = np.full(shape, -1, np.int64)
    (ax, ay), (bx, by) = geometry.a.T, geometry.b.T
    for row in range(shape[0]):
        y = origin[1] + (row + 0.5) * CELL
        crossing = np.flatnonzero((ay <= y) != (by <= y))
        x = ax[crossing] + (y - ay[crossing]) / (by - ay)[crossing] * (bx - ax)[crossing]
        order = np.argsort(x, kind="stable")
        lines = crossing[order]
        far = np.where(by[lines] > ay[lines], geometry.right[lines], geometry.left[lines])
        columns = np.clip(np.ceil((x[order] - origin[0]) / CELL - 0.5), 0, shape[1]).astype(np.int64)
        for k, column in enumerate(columns):
            grid[row, column:] = far[k]
    return grid


def blocking_lines(geometry: MapGeometry, *, doors: bool) -> NDArray[np.bool_]:
    """(L,) lines a route must not cross. With `doors`, doors that open on USE count as open."""
    two_sided = (geometry.left >= 0) & (geometry.right >= 0)
    ceiling = geometry.ceiling.copy()
    if doors:
        ceiling[geometry.door_sectors()] += 128.0
    floor = geometry.floor
    step = np.abs(floor[geometry.left] - floor[geometry.right])
    room = np.minimum(ceiling[geometry.left], ceiling[geometry.right]) - np.maximum(
        floor[geometry.left], floor[geometry.right]
    )
    special_ok = np.isin(geometry.special, HARMLESS_SPECIALS)
    if doors:
        special_ok |= np.isin(geometry.special, DOOR_SPECIALS)
    passable = two_sided & (step <= MAX_STEP) & (room >= PLAYER_HEIGHT) & special_ok
    return np.asarray(~passable | ((geometry.flags & IMPASSIBLE) != 0), np.bool_)


def walk_map(geometry: MapGeometry, obstacles: Iterable[tuple[float, float]], *, doors: bool) -> WalkMap:
    """The grid of one map. `obstacles`: centres of solid things (pillars, trees, barrels)."""
    ends = np.concatenate([geometry.a, geometry.b])
    origin = np.floor(ends.min(axis=0) / CELL) * CELL - 4 * CELL
    width, height = (np.ceil((ends.max(axis=0) - origin) / CELL) + 4).astype(int)
    sector = sector_grid(geometry, origin, (height, width))
    free = np.pad(np.full((height - 2, width - 2), 255, np.uint8), 1)  # a blocked border

    def pixel(x: float, y: float) -> tuple[int, int]:
        """In sixteenths of a cell, as OpenCV's shift of 4 reads them."""
        return round(((x - origin[0]) / CELL - 0.5) * 16), round(((y - origin[1]) / CELL - 0.5) * 16)

    for line in np.flatnonzero(blocking_lines(geometry, doors=doors)):
        cv2.line(free, pixel(*geometry.a[line]), pixel(*geometry.b[line]), 0, 1, cv2.LINE_8, 4)
    for x, y in obstacles:
        cv2.circle(free, pixel(x, y), int(12 / CELL * 16), 0, -1, cv2.LINE_8, 4)
    clearance = cv2.distanceTransform(free, cv2.DIST_L2, 5).astype(np.float32) * CELL
    harmful = np.isin(geometry.sector_special, DAMAGE_SECTORS)
    walkable = (sector >= 0) & (clearance >= MIN_CLEARANCE) & ~harmful[sector]
    cells = np.argwhere(walkable)
    node = np.full(walkable.shape, -1, np.int64)
    node[walkable] = np.arange(len(cells))
    crowding = 1.0 + 3.0 * np.clip(1.0 - clearance[walkable] / COMFORT, 0.0, 1.0)
    sources, targets, costs = [], [], []
    for dr, dc in NEIGHBOURS:
        shifted = node[cells[:, 0] + dr, cells[:, 1] + dc]
        ok = shifted >= 0
        sources.append(np.flatnonzero(ok))
        targets.append(shifted[ok])
        costs.append(CELL * float(np.hypot(dr, dc)) * crowding[shifted[ok]])
    shape = (len(cells), len(cells))
    graph = csr_array((np.concatenate(costs), (np.concatenate(sources), np.concatenate(targets))), shape)
    return WalkMap(origin, walkable, clearance, sector, node, cells, graph)

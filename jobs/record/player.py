"""A bot that plays like a person: explores, opens doors, picks things up, fights, and walks back.

A play is a generator: it yields what the player wants in this tic and reads the new state from its `Player`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.record.engine import State, Thing
from jobs.record.hands import RUN, WALK, Hands, Intent, bearing, unit, wrap
from jobs.record.routes import CELL, PLAYER_HEIGHT, WalkMap

Play = Generator[Intent, None, None]
Steps = Generator[Intent, None, bool]  # ends with True when it got there

ROOM = 128.0  # side of the squares whose visits are counted
PICKUPS = ("Health", "Armor", "Ammo", "Weapon", "Powerup", "Item")
# Monsters that fall within seconds.
FOES = (
    "Zombieman",
    "ShotgunGuy",
    "ChaingunGuy",
    "DoomImp",
    "Demon",
    "Spectre",
    "LostSoul",
)
# (tics held, units moved forward or back, units moved sideways) from rest, coasting included (measured).
PRESSES = ((1, 7.75, 7.44), (2, 16.11, 15.41), (3, 24.40, 23.43))
USE_RANGE = 56.0  # the engine's is 64
STUCK_TICS = 35
CLOSE_UNITS = 0.6  # what counts as back at the start


class NoRoute(Exception):
    """The play cannot go on from here: the caller tries another start."""


@dataclass(frozen=True)
class Loop:
    """Frames at which the way back begins and ends."""

    return_start: int
    return_end: int
    mode: str


class Player:
    """One player on one map: what it knows, and its plays."""

    def __init__(
        self, walk: WalkMap, doors: NDArray[np.int64], hands: Hands, rng: np.random.Generator, state: State
    ) -> None:
        self.walk = walk
        self.doors = doors
        self.hands = hands
        self.rng = rng
        self.state = state
        self.frame = 0
        self.trail: list[tuple[float, float, float]] = []  # x, y, yaw of every frame
        self.visits: dict[tuple[int, int], int] = {}
        self.penalty = np.ones(len(walk.cells))
        self.given_up: set[int] = set()  # ids of things it could not get
        self.loop: Loop | None = None
        self.see(state, 0)

    def see(self, state: State, frame: int) -> None:
        """Take in the state shown in `frame`."""
        self.state, self.frame = state, frame
        self.trail.append((*state.position, state.yaw))
        room = self._room(state.position)
        self.visits[room] = self.visits.get(room, 0) + 1

    # Plays

    def explore(self) -> Play:
        """Walk through the map for ever, to where it has not been."""
        yield from self.pause(int(self.rng.integers(6, 20)))
        while True:
            yield from self.follow(self.new_route(), "explore")
            if self.rng.random() < 0.3:
                yield from self.look_around()

    def events(self, kind: str, target: NDArray[np.float64] | int) -> Play:
        """Do one thing (`kind`: "door", "pickup" or "kill"), then whatever is near, for ever."""
        yield from self.pause(8)
        if kind == "door":
            yield from self.follow(self.route_to(np.asarray(target)), "door")
        elif kind == "pickup":
            yield from self.pick_up(int(target))
        else:
            yield from self.fight(int(target))
        while True:
            near = self._near_targets()
            if not near:
                yield from self.follow(self.new_route(), "explore")
                continue
            kind, thing = near[0]
            yield from self.pick_up(thing) if kind == "pickup" else self.fight(thing)
            if self._thing(thing) is not None:
                self.given_up.add(thing)
                yield from self.follow(self.new_route(), "explore")

    def walk_a_loop(self, frames: int, mode: str) -> Play:
        """Go out for about 0.42 of `frames`, come back along the same way, and end in the start pose.

        mode "turn180": walks back face forward; "rewind": walks backwards and looks where it looked before.
        Raises NoRoute when it does not get back.
        """
        x, y, yaw = self.trail[0]
        start = np.array([x, y])
        yield from self.pause(24, phase="hold_start", yaw=yaw)
        out = self._explore_until(int(0.42 * frames))
        yield from out
        turn = self.frame
        trail = np.array(self.trail[::-1])
        step = np.r_[True, np.hypot(*np.diff(trail[:, :2], axis=0).T) > 1.0]
        back = trail[step]
        yield from self.follow(
            back[:, :2], "return", look=back[:, 2] if mode == "rewind" else None, arrive=14.0
        )
        if np.hypot(*(start - self.state.position)) > 24.0:
            yield from self.follow(self.route_to(start), "return", arrive=14.0)
        yield from self._settle()
        for _ in range(4):
            if np.hypot(*(start - self.state.position)) <= CLOSE_UNITS:
                break
            yield from self._nudge(start)
        while not (self.hands.turned(self.state, yaw) and self.hands.level()):
            yield Intent("return", yaw=yaw, exact=True)
        if np.hypot(*(start - self.state.position)) > CLOSE_UNITS:
            raise NoRoute("the player did not get back to the start")
        self.loop = Loop(turn, self.frame, mode)
        yield from self.pause(24, phase="hold_end", yaw=yaw)

    # Steps of a play

    def pause(self, tics: int, *, phase: str = "pause", yaw: float | None = None) -> Play:
        for _ in range(tics):
            yield Intent(phase, yaw=yaw, exact=yaw is not None)

    def look_around(self) -> Play:
        """Stand, look left and right, sometimes up or down."""
        yaw = self.state.yaw
        pitch = float(self.rng.choice([0.0, 0.0, 8.0, -8.0]))
        for _ in range(int(self.rng.integers(1, 3))):
            aim = yaw + float(self.rng.uniform(25.0, 80.0)) * float(self.rng.choice([-1.0, 1.0]))
            for _ in range(int(self.rng.integers(18, 32))):
                yield Intent("look", yaw=aim, pitch_up=pitch)

    def follow(
        self,
        path: NDArray[np.float64],
        phase: str,
        *,
        look: NDArray[np.float64] | None = None,
        arrive: float = 40.0,
        until_gone: int | None = None,
    ) -> Steps:
        """Walk along points (P, 2). `look`: (P,) yaws to hold on the way; else it looks where it goes.

        Ends with True within `arrive` of the last point or when thing `until_gone` is gone, False when stuck.
        """
        yield Intent(phase)  # a tic to decide in; so no chain of steps goes on without time passing
        along = np.r_[0.0, np.cumsum(np.hypot(*np.diff(path, axis=0).T))]
        index, checked, anchor = 0, self.frame, self.state.position
        glance, glance_end, pitch = 0.0, 0, 0.0
        while True:
            here = self.state.position
            window = path[index : index + 40]
            index += int(np.argmin(np.hypot(*(window - here).T)))
            if until_gone is not None and self._thing(until_gone) is None:
                return True
            if along[-1] - along[index] < arrive and np.hypot(*(path[-1] - here)) < arrive:
                return True
            if self.frame - checked >= STUCK_TICS:
                if np.hypot(*(here - anchor)) < 20.0:
                    self._avoid(path[min(index + 3, len(path) - 1)])
                    yield from self._step_back()
                    return False
                checked, anchor = self.frame, here
            door = self._closed_door(path, along, index)
            if door is not None:
                opened = yield from self._open(door, phase)
                if not opened:
                    self._avoid(door)
                    return False
                checked, anchor = self.frame, self.state.position
                continue
            near = self._visible(path, along, index, 72.0)
            far = self._visible(path, along, index, 300.0)
            gaze = bearing(here, far) if look is None else float(look[index])
            if look is None and self.frame >= glance_end:
                glance, pitch, glance_end = self._next_glance(along[-1] - along[index])
            want = bearing(here, near)
            speed = RUN if self._may_run(along, index, here, far, look) else WALK
            if look is None and abs(wrap(gaze - self.state.yaw)) > 75.0:
                speed = 0.0  # turn first
            speed = min(speed, max(3.0, (along[-1] - along[index]) / 10.0))
            vx, vy = speed * unit(want)
            yield Intent(phase, gaze + glance, 0.0 if look is not None else pitch, (vx, vy), run=speed > WALK)

    def pick_up(self, thing_id: int) -> Steps:
        thing = self._thing(thing_id)
        if thing is None:
            return True
        target = np.array([thing.x, thing.y])
        path = np.vstack([self.route_to(target), target])
        done = yield from self.follow(path, "pickup", arrive=6.0, until_gone=thing_id)
        return done

    def fight(self, thing_id: int) -> Steps:
        """Close in on a monster, face it, sidestep and shoot until it is dead. False when that takes 12 s."""
        end = self.frame + 12 * 35
        side = 1.0
        while self.frame < end:
            thing = self._thing(thing_id)
            if thing is None:
                return True
            here, target = self.state.position, np.array([thing.x, thing.y])
            distance = float(np.hypot(*(target - here)))
            if distance > 420.0 or not self._in_sight(here, target):
                steps = self.follow(self.route_to(target), "approach", arrive=120.0)
                for intent in steps:
                    yield intent
                    thing = self._thing(thing_id)
                    if thing is None:
                        return True
                    target = np.array([thing.x, thing.y])
                    if np.hypot(*(target - self.state.position)) < 380.0 and self._in_sight(
                        self.state.position, target
                    ):
                        break
                else:
                    if not self._in_sight(self.state.position, target):
                        break
                continue
            aim = bearing(here, target)
            if self.frame % 32 == 0:
                side = -side
            sideways = unit(self.state.yaw - 90.0) * side
            free = self.walk.clear_line(here, here + 40.0 * sideways)
            vx, vy = 4.0 * sideways if free and distance < 400.0 else np.zeros(2)
            shoot = abs(wrap(self.state.yaw - aim)) < 4.0 and self.frame % 14 < 5
            yield Intent("fight", aim, 0.0, (vx, vy), taps=("ATTACK",) if shoot else (), exact=True)
        return False

    # Routes

    def new_route(self) -> NDArray[np.float64]:
        """A route of 500 to 2,400 units to where most of the way is new."""
        routes = self.walk.distances(self.state.position, self.penalty)
        near = np.flatnonzero((routes.cost > 500.0) & (routes.cost < 2400.0))
        if len(near) == 0:
            near = np.flatnonzero(np.isfinite(routes.cost) & (routes.cost > 100.0))
        if len(near) == 0:
            raise NoRoute("nowhere to go from the start")
        best, best_score = None, -np.inf
        for goal in self.rng.choice(near, size=min(48, len(near)), replace=False):
            path = routes.path(int(goal))
            rooms = {self._room(point) for point in path[::4]}
            new = sum(room not in self.visits for room in rooms)
            turn = abs(wrap(bearing(path[0], path[min(12, len(path) - 1)]) - self.state.yaw))
            score = new / (len(rooms) + 2.0) + 0.03 * new - turn / 600.0 + 0.1 * float(self.rng.random())
            if score > best_score:
                best, best_score = path, score
        assert best is not None
        return best

    def route_to(self, target: NDArray[np.float64]) -> NDArray[np.float64]:
        routes = self.walk.distances(self.state.position, self.penalty)
        goal = self.walk.nearest_node(target)
        if not np.isfinite(routes.cost[goal]):
            raise NoRoute("the target cannot be reached")
        return routes.path(goal)

    # Details

    def _room(self, point: NDArray[np.float64]) -> tuple[int, int]:
        return int(point[0] // ROOM), int(point[1] // ROOM)

    def _thing(self, thing_id: int) -> Thing | None:
        """The thing with this id, unless it is gone or dead."""
        return next(
            (t for t in self.state.things if t.id == thing_id and not t.name.startswith("Dead")), None
        )

    def _near_targets(self) -> list[tuple[str, int]]:
        """Monsters and pickups within a short walk, nearest first."""
        routes = self.walk.distances(self.state.position, self.penalty)
        found = []
        for thing in self.state.things:
            if thing.id in self.given_up or (thing.name not in FOES and thing.category not in PICKUPS):
                continue
            at = np.array([thing.x, thing.y])
            row, column = self.walk.cell_of(at)
            node = self.walk.node[row, column]
            if node >= 0 and routes.cost[node] < 1200.0:
                kind = "kill" if thing.name in FOES else "pickup"
                found.append((float(routes.cost[node]), kind, thing.id))
        return [(kind, thing_id) for _, kind, thing_id in sorted(found)]

    def _in_sight(self, here: NDArray[np.float64], there: NDArray[np.float64]) -> bool:
        """True when no blocking line lies between two points, seen from above."""
        steps = max(2, int(np.hypot(*(there - here)) / (CELL / 2)))
        rows, columns = self.walk.cell_of(here + np.linspace(0.0, 1.0, steps)[:, None] * (there - here)).T
        floor, ceiling = self.state.sectors[self.walk.sector[rows, columns]].T
        return bool((self.walk.clearance[rows, columns] > CELL / 2).all() and (ceiling - floor > 40.0).all())

    def _visible(
        self, path: NDArray[np.float64], along: NDArray[np.float64], index: int, reach: float
    ) -> NDArray[np.float64]:
        """The farthest point of the path within `reach` that a straight walk gets to."""
        last = int(np.searchsorted(along, along[index] + reach)) - 1
        last = min(max(last, index + 1), len(path) - 1)
        for k in range(last, index + 1, -3):
            if self.walk.clear_line(self.state.position, path[k]):
                return np.asarray(path[k])
        return np.asarray(path[min(index + 3, len(path) - 1)])

    def _may_run(
        self,
        along: NDArray[np.float64],
        index: int,
        here: NDArray[np.float64],
        far: NDArray[np.float64],
        look: NDArray[np.float64] | None,
    ) -> bool:
        """Run on long straight stretches, in some half-minutes only."""
        straight = float(np.hypot(*(far - here))) > 240.0 and along[-1] - along[index] > 400.0
        return look is None and straight and (self.frame // 350) % 3 == 1

    def _next_glance(self, left: float) -> tuple[float, float, int]:
        """Yaw offset, pitch up, and the frame it ends at. Mostly none."""
        end = self.frame + int(self.rng.integers(25, 70))
        draw = self.rng.random()
        if left < 200.0 or draw < 0.7:
            return 0.0, 0.0, end
        if draw < 0.85:
            return float(self.rng.uniform(15.0, 40.0)) * float(self.rng.choice([-1.0, 1.0])), 0.0, end
        return 0.0, float(self.rng.choice([-9.0, -5.0, 6.0, 10.0])), end

    def _avoid(self, point: NDArray[np.float64]) -> None:
        """Make routes through here dear: something stands in the way."""
        near = np.hypot(*(self.walk.centre(np.arange(len(self.walk.cells))) - point).T) < 40.0
        self.penalty[near] *= 30.0

    def _step_back(self) -> Play:
        vx, vy = -WALK * unit(self.state.yaw)
        for _ in range(14):
            yield Intent("unstuck", velocity=(vx, vy))

    def _closed_door(
        self, path: NDArray[np.float64], along: NDArray[np.float64], index: int
    ) -> NDArray[np.float64] | None:
        """The first point of the path within reach that lies in a door that is not open."""
        last = int(np.searchsorted(along, along[index] + 72.0))
        rows, columns = self.walk.cell_of(path[index:last]).T
        for k, sector in enumerate(self.walk.sector[rows, columns]):
            floor, ceiling = self.state.sectors[sector]
            if sector in self.doors and ceiling - floor < PLAYER_HEIGHT:
                return np.asarray(path[index + k])
        return None

    def _open(self, door: NDArray[np.float64], phase: str) -> Steps:
        """Face the door, press USE, wait until it is open. False after 4 s."""
        row, column = self.walk.cell_of(door)
        sector = int(self.walk.sector[row, column])
        for tic in range(140):
            floor, ceiling = self.state.sectors[sector]
            if ceiling - floor >= PLAYER_HEIGHT:
                return True
            here = self.state.position
            aim = bearing(here, door)
            facing = abs(wrap(self.state.yaw - aim)) < 15.0
            close = np.hypot(*(door - here)) < USE_RANGE
            vx, vy = np.zeros(2) if close else 4.0 * unit(aim)
            use = facing and close and tic % 30 < 2 and ceiling - floor < 4.0
            yield Intent(phase, aim, 0.0, (vx, vy), taps=("USE",) if use else ())
        return False

    def _explore_until(self, frame: int) -> Play:
        play = self.explore()
        while self.frame < frame:
            yield next(play)
        play.close()

    def _settle(self) -> Play:
        while np.hypot(*self.state.velocity) > 0.01 or not self.hands.level():
            yield Intent("return")

    def _nudge(self, target: NDArray[np.float64]) -> Play:
        """Two short presses, each after a small turn, that add up to the way left."""
        step = self.hands.turn_step
        offsets = np.arange(-int(90 / step), int(90 / step) + 1) * step
        headings = np.radians(self.state.yaw + offsets)
        ahead = np.stack([np.cos(headings), np.sin(headings)], axis=1)
        right = ahead[:, ::-1] * (1.0, -1.0)
        moves = [
            (key, tics, direction * length)
            for tics, forward, side in PRESSES
            for key, direction, length in (
                ("MOVE_FORWARD", ahead, forward),
                ("MOVE_BACKWARD", -ahead, forward),
                ("MOVE_RIGHT", right, side),
                ("MOVE_LEFT", -right, side),
            )
        ]
        left = target - self.state.position
        # 0.005 units a degree: a person takes a slightly worse spot for a much smaller turn.
        turn = 0.005 * (np.abs(offsets)[:, None] + np.abs(offsets[:, None] - offsets[None, :]))
        best_cost, best = np.inf, [("", 0, 0.0), ("", 0, 0.0)]
        for key, tics, one in moves:
            for key_2, tics_2, two in moves:
                cost = turn + np.hypot(*np.moveaxis(one[:, None] + two[None] - left, -1, 0))
                i, j = np.unravel_index(int(np.argmin(cost)), cost.shape)
                if cost[i, j] < best_cost:
                    best_cost = float(cost[i, j])
                    best = [(key, tics, float(offsets[i])), (key_2, tics_2, float(offsets[j]))]
        yaw = self.state.yaw
        for key, tics, offset in best:
            for _ in range(150):
                if self.hands.turned(self.state, yaw + offset):
                    break
                yield Intent("return", yaw=yaw + offset, exact=True)
            for _ in range(tics):
                yield Intent("return", taps=(key,))
            yield from self._settle()

"""A session as a real player leaves it: walking, fights, deaths, menus, loading, standing about.

What happens when is drawn first; between the acts the player of the other recordings plays on. `<name>.
segments.json` tells, for tests only, what each frame is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jobs.record import log, overlays
from jobs.record.engine import DEGREES_PER_COUNT, TICS_PER_SECOND, WAD_FOLDER, Engine, Input, State
from jobs.record.hands import Hands, wrap
from jobs.record.player import NoRoute, Play, Player
from jobs.record.routes import SOLID, walk_map
from jobs.record.start import choose_start
from jobs.record.takes import Job, RecordingSummary, game_entry
from jobs.record.wad import read_map

Progress = Callable[[str, int, int], None]

# Acts of the first map, which holds monsters, and of the second, which holds none: there one can stand still.
FIRST: Final = ("menu", "flash", "turn", "flash", "turn", "menu", "turn", "death")
SECOND: Final = ("idle", "turn", "menu", "flash", "death")
FLASHES: Final = (((255, 255, 255), 1.0), ((255, 250, 235), 0.9), ((255, 0, 0), 0.45))
ON_THE_GROUND: Final = (50, 120)  # tics that a dead player lies there
PATIENCE: Final = 20  # starts tried on a map


@dataclass
class _Film:
    """What was shown: one entry a frame; of inputs, one a step. marks: half-open spans of frames by kind."""

    writer: log.VideoWriter
    states: list[State] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    events: list[log.Event] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    flashes: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)

    def show(self, picture: NDArray[np.uint8], state: State, held: Input, phase: str) -> None:
        """Append a frame; held: the input since the frame before."""
        self.writer.write(picture)
        if self.states:
            self.inputs.append(held)
        self.states.append(state)
        self.phases.append(phase)

    def __len__(self) -> int:
        return len(self.states)

    def spans(self, phase: str) -> list[tuple[int, int]]:
        """Spans [start, stop) of a phase."""
        is_it = [False, *(p == phase for p in self.phases), False]
        edges = [k for k, (a, b) in enumerate(pairwise(is_it)) if a != b]
        return list(zip(edges[::2], edges[1::2], strict=True))


class _Scene:
    """One map, being played onto a film."""

    def __init__(self, engine: Engine, job: Job, level: str, film: _Film, rng: np.random.Generator) -> None:
        self.engine, self.film, self.rng = engine, film, rng
        self._geometry = read_map(WAD_FOLDER / job.wad, level)
        self.state, self.picture = engine.look()
        engine.command("blood_fade_scalar 0.3")  # else "kill", a million points of damage, paints all red
        obstacles = [(t.x, t.y) for t in self.state.things if t.category in SOLID]
        self._walk = walk_map(self._geometry, obstacles, doors=True)
        self._enter()
        self.happened = log.EventLog(self._geometry, self.state)

    def _enter(self) -> None:
        """Go to an open place of the map and begin to play there."""
        for _ in range(PATIENCE):
            where, yaw, _ = choose_start(self._walk, self._geometry, self.state, self.rng, None)
            self.engine.command(f"warp {where[0]:.0f} {where[1]:.0f}")
            for _ in range(3):
                self.engine.step(Input())
            self.state, self.picture = self.engine.look()
            if np.hypot(*(self.state.position - where)) < 32.0:
                break
        else:
            raise NoRoute("no start that can be reached")
        self.engine.step(Input(mouse_x=round(wrap(self.state.yaw - yaw) / DEGREES_PER_COUNT)))
        self.state, self.picture = self.engine.look()
        self._hands = Hands("mouse")
        self.player = Player(self._walk, self._geometry.door_sectors(), self._hands, self.rng, self.state)
        self._play: Play = self.player.explore()

    def step(self, held: Input, phase: str, over: Callable[[Any], Any] | None = None) -> None:
        """One tic of the game."""
        self.engine.step(held)
        self.state, self.picture = self.engine.look()
        phase = "dead" if self.state.values["DEAD"] else phase
        self.happened.see(self.state, len(self.film))
        self.player.see(self.state, len(self.film))
        self.film.show(self.picture if over is None else over(self.picture), self.state, held, phase)

    def play(self, tics: int) -> None:
        """Walk and shoot; a player who is killed lies there, and starts again."""
        for _ in range(tics):
            intent = next(self._play)
            held = self._hands(intent, self.state)
            if self.rng.random() < 0.03:
                held = Input(held.keys | {"ATTACK"}, held.mouse_x, held.mouse_y)
            self.step(held, "play")
            if self.state.values["DEAD"]:
                self._lie()

    def _lie(self) -> None:
        for _ in range(int(self.rng.integers(*ON_THE_GROUND))):
            self.step(Input(), "dead")
        self.engine.respawn()
        self.engine.step(Input())
        self.state, self.picture = self.engine.look()
        self._enter()
        self.film.cuts.append(len(self.film))
        self.film.show(self.picture, self.state, Input(), "play")

    # Acts

    def death(self) -> None:
        self.engine.command("kill")
        self.step(Input(), "play")
        if not self.state.values["DEAD"]:
            raise NoRoute("the player cannot die")
        self._lie()

    def turn(self) -> None:
        """180 degrees in 5 to 12 tics."""
        tics = int(self.rng.integers(5, 13))
        side = int(self.rng.choice([-1, 1]))
        start = len(self.film)
        for _ in range(tics):
            self.step(Input(mouse_x=side * round(180 / DEGREES_PER_COUNT / tics)), "turn")
        self.film.turns.append((start, len(self.film)))

    def flash(self) -> None:
        """One to three frames of white, or of a red tint; the player walks on."""
        colour, strength = FLASHES[int(self.rng.integers(len(FLASHES)))]
        start = len(self.film)
        for _ in range(int(self.rng.integers(1, 4))):
            held = self._hands(next(self._play), self.state)
            self.step(held, "flash", lambda world: overlays.flash(world, colour, strength))
        self.film.flashes.append((start, len(self.film)))

    def menu(self) -> None:
        """The world stands still under a menu, and the mouse moves its cursor."""
        style = overlays.MENU_STYLES[int(self.rng.integers(len(overlays.MENU_STYLES)))]
        cursor, aim = self.rng.uniform(0.3, 0.7, 2), self.rng.uniform(0.3, 0.7, 2)
        held = Input()
        for tic in range(int(self.rng.integers(40, 140))):
            if tic % 25 == 24:
                aim = self.rng.uniform(0.25, 0.8, 2)
            self.film.show(overlays.menu(self.picture, style, tuple(cursor)), self.state, held, "menu")
            moved = 0.12 * (aim - cursor)
            cursor = cursor + moved
            held = Input(mouse_x=round(400 * moved[0]), mouse_y=round(-400 * moved[1]))

    def idle(self) -> None:
        """Nobody at the keys for six to nine seconds."""
        for _ in range(30):  # the player slides to a stand
            self.step(Input(), "play")
        for _ in range(int(self.rng.integers(6, 9)) * TICS_PER_SECOND):
            self.step(Input(), "idle")


def record_session(
    out: Path, job: Job, next_level: str, size: tuple[int, int], progress: Progress | None
) -> RecordingSummary:
    """Play one session of about `job.frames` frames over two maps of a WAD and write its files.

    The same job gives the same bytes.
    """
    rng = np.random.default_rng(job.key)
    acts = [list(FIRST), list(SECOND)]
    rest = job.frames - 150 * sum(map(len, acts))
    share = max(TICS_PER_SECOND, rest // (sum(map(len, acts)) + 2))
    with log.VideoWriter(out / f"{job.name}.mp4", size) as writer:
        film = _Film(writer)
        for index, (level, names) in enumerate(zip((job.level, next_level), acts, strict=True)):
            with ExitStack() as stack:
                seed = int(rng.integers(1, 2**31))
                engine = stack.enter_context(
                    Engine(
                        job.wad,
                        level,
                        seed=seed,
                        monsters=index == 0,
                        third_person=False,
                        size=size,
                        mortal=True,
                    )
                )
                scene = _Scene(engine, job, level, film, rng)
                if index:
                    _load(film, level, size, rng)
                film.show(scene.picture, scene.state, Input(), "play")
                for name in rng.permutation(names):
                    scene.play(int(rng.integers(share // 2, share + share // 2)))
                    getattr(scene, str(name))()
                    if progress is not None:
                        progress(job.name, len(film), max(job.frames, len(film)))
                scene.play(share)
                film.events += scene.happened.finish()
    return _write(out, job, film)


def _load(film: _Film, level: str, size: tuple[int, int], rng: np.random.Generator) -> None:
    tics = int(rng.integers(25, 80))
    film.cuts.append(len(film))
    for tic in range(tics):
        card = overlays.loading(size, level, tic / tics)
        film.show(card, film.states[-1], Input(), "loading")
    film.cuts.append(len(film))


def _write(out: Path, job: Job, film: _Film) -> RecordingSummary:
    columns = {
        "DEAD": [p == "dead" for p in film.phases],
        "MENU": [p == "menu" for p in film.phases],
        "LOADING": [p == "loading" for p in film.phases],
    }
    log.write_input_log(out / f"{job.name}.input.csv", film.inputs, columns)
    film.events.sort(key=lambda e: (e["start"], e["end"], e["type"]))
    log.write_events(out / f"{job.name}.events.jsonl", film.events)
    log.write_truth(out / f"{job.name}.truth.csv", film.states, film.phases)
    truth = {
        "frames": len(film),
        "fps": TICS_PER_SECOND,
        "cuts": film.cuts,
        "flashes": film.flashes,
        "fast_turns": film.turns,
        "menus": film.spans("menu"),
        "deaths": film.spans("dead"),
        "loading": film.spans("loading"),
        "idle": film.spans("idle"),
    }
    (out / f"{job.name}.segments.json").write_text(json.dumps(truth, indent=1) + "\n")
    points = np.array([s.position for s in film.states])
    step = np.hypot(*np.diff(points, axis=0).T)
    walked = step[step < 64.0]  # a farther step is a start at another place
    return RecordingSummary(
        name=job.name,
        game=job.game,
        kind="session",
        level=job.level,
        perspective="fps",
        frames=len(film),
        path_units=round(float(walked.sum()), 1),
        moving_share=round(float((walked > 1.0).mean()), 4),
        rooms=len({(int(x // 128), int(y // 128)) for x, y in points}),
        near_wall_share=0.0,
        facing_wall_share=0.0,
        events=len(film.events),
    )


def session_entry(job: Job) -> dict[str, Any]:
    """The key map's entry of sessions: that of other games, with the states that their logs hold."""
    entry = game_entry(job)
    del entry["poses"]  # a session has no one world: its maps and lives are many
    entry["videos"] = [f"{job.game}[0-9]*_*.mp4"]
    named = (("DEAD", "dead"), ("MENU", "menu"), ("LOADING", "loading"))
    entry["log"]["states"] = [{"column": column, "state": state} for column, state in named]
    return entry

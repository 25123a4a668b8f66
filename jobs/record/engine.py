"""ViZDoom, headless: one tic at a time, keys and mouse counts in, picture and state out."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.errors import UserError


class MissingEngine(UserError, ModuleNotFoundError):
    """The game engine is an extra of this package and is not installed."""


class RecordError(UserError):
    """No recording can be made as asked."""


try:
    import vizdoom
except ModuleNotFoundError as error:
    raise MissingEngine(
        "recording needs the game engine vizdoom, which is not installed; run: pip install 'wp2[demo]'"
    ) from error

TICS_PER_SECOND: Final = 35
# The engine keeps 16-bit angles, so a whole number of them per count makes the log explain every turn exactly
# (at 0.15 degrees a count, rounding leaves up to 0.003 degrees a frame unexplained).
DEGREES_PER_COUNT: Final = 27 * 360.0 / 65536.0  # 0.1483
KEY_TURN_SLOW: Final = 320 * 360.0 / 65536.0  # 1.758 degrees: the first 5 tics of a press
KEY_TURN: Final = 640 * 360.0 / 65536.0  # 3.516 degrees: the rest of it
WARM_UP_TICS: Final = 16  # input has no effect before tic 11 (measured)
WAD_FOLDER: Final = Path(vizdoom.__file__).parent

KEYS: Final = (
    "MOVE_FORWARD",
    "MOVE_BACKWARD",
    "MOVE_LEFT",
    "MOVE_RIGHT",
    "JUMP",
    "USE",
    "ATTACK",
    "SPEED",
    "TURN_LEFT",
    "TURN_RIGHT",
)
VARIABLES: Final = (
    "POSITION_X",
    "POSITION_Y",
    "POSITION_Z",
    "ANGLE",
    "PITCH",
    "VELOCITY_X",
    "VELOCITY_Y",
    "CAMERA_POSITION_X",
    "CAMERA_POSITION_Y",
    "CAMERA_POSITION_Z",
    "CAMERA_ANGLE",
    "CAMERA_PITCH",
    "CAMERA_ROLL",
    "HEALTH",
    "ARMOR",
    "KILLCOUNT",
    "ITEMCOUNT",
    "SELECTED_WEAPON",
    "DEAD",
)


@dataclass(frozen=True)
class Input:
    """What is held from one frame to the next. Whole counts: x positive turns right, y positive looks up."""

    keys: frozenset[str] = frozenset()
    mouse_x: int = 0
    mouse_y: int = 0


@dataclass(frozen=True)
class Thing:
    id: int
    name: str
    category: str
    x: float
    y: float
    z: float


@dataclass(frozen=True)
class State:
    """The game's state shown in one frame.

    Engine axes: x east, y north, z up, map units; yaw counter-clockwise from +x in degrees; pitch positive
    DOWN. `sectors`: (S, 2) floor and ceiling heights.
    """

    values: dict[str, float]
    things: tuple[Thing, ...]
    sectors: NDArray[np.float64]

    @property
    def position(self) -> NDArray[np.float64]:
        return np.array([self.values["POSITION_X"], self.values["POSITION_Y"]])

    @property
    def velocity(self) -> NDArray[np.float64]:
        """Map units a tic."""
        return np.array([self.values["VELOCITY_X"], self.values["VELOCITY_Y"]])

    @property
    def yaw(self) -> float:
        return self.values["ANGLE"]


class Engine:
    """One game on one map, a context manager. Arguments and inputs decide every picture and state."""

    def __init__(
        self,
        wad: str,
        level: str,
        *,
        seed: int,
        monsters: bool,
        third_person: bool,
        size: tuple[int, int],
        mortal: bool = False,
    ) -> None:
        resolution = f"RES_{size[0]}X{size[1]}"
        if resolution not in vizdoom.ScreenResolution.__members__:
            raise RecordError(
                f"size {size[0]}x{size[1]} is not one that ViZDoom renders; use 640x360 or 320x180"
            )
        game = vizdoom.DoomGame()
        self._folder = tempfile.TemporaryDirectory(prefix="wp2_record_")
        game.set_doom_config_path(str(Path(self._folder.name) / "config.ini"))
        game.set_doom_game_path(str(WAD_FOLDER / wad))
        game.set_doom_map(level)
        game.set_doom_skill(2)
        game.set_seed(seed)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_episode_timeout(0)
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.__members__[resolution])
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_render_hud(False)
        game.set_render_crosshair(False)
        game.set_render_messages(False)
        game.set_objects_info_enabled(True)
        game.set_sectors_info_enabled(True)
        # The engine ends a single player's episode with his death; as its own host it plays on, and respawns.
        host = "-host 1 " if mortal else ""
        game.add_game_args(f"{host}+sv_cheats 1" + ("" if monsters else " -nomonsters"))
        names = (*KEYS, "TURN_LEFT_RIGHT_DELTA", "LOOK_UP_DOWN_DELTA")
        game.set_available_buttons([vizdoom.Button.__members__[name] for name in names])
        for name in names[-2:]:
            game.set_button_max_value(vizdoom.Button.__members__[name], 0)
        variables = [vizdoom.GameVariable.__members__[name] for name in VARIABLES]
        game.set_available_game_variables(variables)
        self._game = game
        self._third_person = third_person
        self._mortal = mortal

    def __enter__(self) -> Engine:
        with contextlib.chdir(self._folder.name):  # the engine makes a folder where it starts
            self._game.init()
        self._game.new_episode()
        if not self._mortal:
            self.command("buddha")  # hits are felt, but nobody dies in the middle of a recording
        if self._third_person:
            self.command("chase")
        for _ in range(WARM_UP_TICS):
            self.step(Input())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._game.close()
        self._folder.cleanup()

    def command(self, text: str) -> None:
        """Run a console command, e.g. "warp 100 -300"."""
        self._game.send_game_command(text)

    def respawn(self) -> None:
        """Put a dead player back to the start of the map."""
        self._game.respawn_player()

    def step(self, held: Input) -> None:
        """Hold `held` for one tic."""
        turn, look = held.mouse_x * DEGREES_PER_COUNT, held.mouse_y * DEGREES_PER_COUNT
        self._game.make_action([*(float(key in held.keys) for key in KEYS), turn, look], 1)

    def look(self) -> tuple[State, NDArray[np.uint8]]:
        """The present state and its picture (H, W, 3) RGB."""
        shown = self._game.get_state()
        things = tuple(
            Thing(int(o.id), o.name, o.category, o.position_x, o.position_y, o.position_z)
            for o in shown.objects
        )
        sectors = np.array([(s.floor_height, s.ceiling_height) for s in shown.sectors])
        values = dict(zip(VARIABLES, (float(v) for v in shown.game_variables)))
        return State(values, things, sectors), shown.screen_buffer

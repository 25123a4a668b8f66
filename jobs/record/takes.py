"""One finished play: its numbers, its files, and its entry in the key map."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from jobs.record import camera, log
from jobs.record.engine import DEGREES_PER_COUNT, KEY_TURN, KEY_TURN_SLOW, TICS_PER_SECOND, Input, State
from jobs.record.hands import Style, wrap
from jobs.record.player import Player
from jobs.record.wad import MapGeometry

Kind = Literal["navigation", "loop", "event", "session"]

LICENCE: Final = "Freedoom BSD-3-Clause; ViZDoom MIT"
METRES_PER_UNIT: Final = 0.03125  # 32 units a metre: the player is 56 units tall
EVENT_DISTANCE: Final = 192.0  # map units: doors and lifts farther away are in the log, but told of nowhere
NAMES: Final = {  # what the engine's names stand for, where splitting them into words does not say it
    "BlueArmor": "suit of blue armor",
    "Cell": "energy cell",
    "CellPack": "energy cell pack",
    "ChaingunGuy": "chaingun soldier",
    "Clip": "clip of bullets",
    "ClipBox": "box of bullets",
    "DoomImp": "imp",
    "GreenArmor": "suit of green armor",
    "MarineChainsawVzd": "chainsaw soldier",
    "RocketAmmo": "rocket",
    "RocketBox": "box of rockets",
    "Shell": "pack of shotgun shells",
    "ShellBox": "box of shotgun shells",
    "ShotgunGuy": "shotgun soldier",
    "Zombieman": "armed soldier",
}


@dataclass(frozen=True)
class RecordingSummary:
    """What one recording holds. Lengths in map units; shares are of frames."""

    name: str
    game: str
    kind: Kind
    level: str
    perspective: Literal["fps", "tps"]
    frames: int
    path_units: float
    moving_share: float  # faster than 1 unit a tic
    rooms: int  # 128-unit squares visited
    near_wall_share: float  # closer than 32 units to a line that blocks
    facing_wall_share: float  # such a line within 96 units straight ahead
    events: int
    closure_units: float | None = None
    closure_deg: float | None = None

    def line(self) -> str:
        """One line for people."""
        closure = "" if self.closure_units is None else f" closes to {self.closure_units:.2f} u"
        return (
            f"{self.name}: {self.frames} frames, path {self.path_units:.0f} u, "
            f"moving {self.moving_share:.0%}, {self.rooms} rooms, near wall {self.near_wall_share:.0%}, "
            f"facing wall {self.facing_wall_share:.0%}, {self.events} events{closure}"
        )


@dataclass(frozen=True)
class Job:
    """What to record."""

    name: str
    game: str
    kind: Kind
    index: int
    wad: str
    level: str
    style: Style
    third_person: bool
    frames: int
    key: tuple[int, ...]  # of the random draws


@dataclass(frozen=True)
class Take:
    """What was played: F states, F-1 inputs, F phases."""

    states: list[State]
    inputs: list[Input]
    phases: list[str]
    events: list[log.Event]
    player: Player
    geometry: MapGeometry


def write_recording(out: Path, job: Job, take: Take, size: tuple[int, int]) -> RecordingSummary:
    """Write every file of a recording except its video."""
    states, walk, loop = take.states, take.player.walk, take.player.loop
    log.write_input_log(out / f"{job.name}.input.csv", take.inputs)
    log.write_events(out / f"{job.name}.events.jsonl", take.events)
    log.write_truth(out / f"{job.name}.truth.csv", states, take.phases)
    points = np.array([s.position for s in states])
    yaws = np.array([s.yaw for s in states])
    step = np.hypot(*np.diff(points, axis=0).T)
    rows, columns = walk.cell_of(points).T
    log.write_poses(out / f"{job.name}.poses.csv", _cameras(job, take, walk.sector[rows, columns]))
    closure: dict[str, Any] = {}
    if loop is not None:
        first, last = states[0], states[loop.return_end]
        error = float(np.hypot(*(last.position - first.position)))
        closure = {
            "out_start": 0,
            "return_start": loop.return_start,
            "return_end": loop.return_end,
            "mode": loop.mode,
            "start_pose": _pose(first),
            "end_pose": _pose(last),
            "closure_error_units": round(error, 4),
            "closure_error_deg": round(abs(wrap(last.yaw - first.yaw)), 4),
            "out_path_units": round(float(step[: loop.return_start].sum()), 1),
            "farthest_units": round(float(np.hypot(*(points - points[0]).T).max()), 1),
        }
    summary = RecordingSummary(
        name=job.name,
        game=job.game,
        kind=job.kind,
        level=job.level,
        perspective="tps" if job.third_person else "fps",
        frames=len(states),
        path_units=round(float(step.sum()), 1),
        moving_share=round(float((step > 1.0).mean()), 4),
        rooms=len(take.player.visits),
        near_wall_share=round(float((walk.clearance[rows, columns] < 32.0).mean()), 4),
        facing_wall_share=round(float((walk.free_ahead(points, yaws, 200.0) < 96.0).mean()), 4),
        events=len(take.events),
        closure_units=closure.get("closure_error_units"),
        closure_deg=closure.get("closure_error_deg"),
    )
    truth = {
        "name": job.name,
        "game": job.game,
        "fps": TICS_PER_SECOND,
        "frames": len(states),
        "size": list(size),
        "kind": job.kind,
        "perspective": summary.perspective,
        "map": {"wad": job.wad, "level": job.level},
        "style": job.style,
        "deg_per_mouse_count": DEGREES_PER_COUNT if job.style == "mouse" else None,
        "deg_per_key_frame_first5": KEY_TURN_SLOW if job.style == "keys" else None,
        "deg_per_key_frame_steady": KEY_TURN if job.style == "keys" else None,
        "loop": closure or None,
        "motion": {
            "path_units": summary.path_units,
            "moving_share": summary.moving_share,
            "rooms": summary.rooms,
            "near_wall_share": summary.near_wall_share,
            "facing_wall_share": summary.facing_wall_share,
        },
        "intrinsics_at_pitch0": {
            # Measured at 640x360 (fx 240, fy 288); other sizes follow the height.
            "fx": size[1] * 2 / 3,
            "fy": size[1] * 0.8,
            "cx": size[0] / 2,
            "cy": size[1] / 2,
            "projection": "y-shear: looking up or down moves the principal point, "
            "cy = h/2 + fy*tan(pitch_up); it does not rotate the view",
        },
    }
    (out / f"{job.name}.truth.json").write_text(json.dumps(truth, indent=1) + "\n")
    return summary


def _cameras(job: Job, take: Take, sectors: NDArray[np.int64]) -> NDArray[np.float64]:
    """The true camera of every frame, (F, 6)."""
    if not job.third_person:
        return np.array([camera.first_person(state) for state in take.states])
    return np.array(
        [camera.third_person(state, take.geometry, int(s)) for state, s in zip(take.states, sectors)]
    )


def _pose(state: State) -> list[float]:
    return [round(state.values[n], 5) for n in ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE")]


def game_entry(job: Job) -> dict[str, Any]:
    """The key map that the gameplay source reads."""

    def column(name: str, action: str, unit: str, sign: int) -> dict[str, Any]:
        return {"column": name, "action": action, "unit": unit, "sign": sign}

    return {
        "game": job.game,
        "videos": [f"{job.game}_*.mp4"],
        "licence": LICENCE,
        "perspective": "tps" if job.third_person else "fps",
        "log": {
            "file": "{stem}.input.csv",
            "row": "next",
            "inputs": [
                column("MOVE_FORWARD", "forward", "key", 1),
                column("MOVE_BACKWARD", "forward", "key", -1),
                column("MOVE_RIGHT", "lateral", "key", 1),
                column("MOVE_LEFT", "lateral", "key", -1),
                column("JUMP", "jump", "key", 1),
                column("TURN_RIGHT", "yaw", "key", 1),
                column("TURN_LEFT", "yaw", "key", -1),
                column("mouse_counts_x", "yaw", "count", 1),
                column("mouse_counts_y", "pitch", "count", 1),
                column("SPEED", "run", "key", 1),
            ],
        },
        "poses": {
            "file": "{stem}.poses.csv",
            "columns": {
                "x": "x",
                "y": "y",
                "z": "z",
                "yaw": "yaw_deg",
                "pitch": "pitch_deg",
                "roll": "roll_deg",
            },
            "world": {"up": "z", "handed": "right"},
            "yaw_positive": "left",
            "pitch_positive": "down",
            "metres_per_unit": METRES_PER_UNIT,
        },
        "events": _events(),
    }


def _events() -> dict[str, Any]:
    """How the event log is told: what the engine counts and no picture shows (health, armour) is not."""

    def rule(kind: str, category: str, text: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "category": category, "text": text, **more}

    def moves(kind: str, text: str) -> dict[str, Any]:
        return rule(kind, "environment_transition", text, within={"distance_units": EVENT_DISTANCE})

    def taken(counter: str) -> dict[str, Any]:
        seen = {"type": counter, "within_s": 0.0}
        return rule("object_removed", "object_change", "the player picks up {a object}", seen=seen)

    return {
        "file": "{stem}.events.jsonl",
        "clock": {"start": "start", "end": "end", "unit": "frame"},
        "names": dict(NAMES),
        "rules": [
            moves("door_open", "a door opens"),
            moves("door_close", "a door closes"),
            moves("floor_moved", "part of the floor moves"),
            # What a closing door crushes is removed too: a counter that rises with it says that it was taken.
            *(taken(counter) for counter in ("item_counted", "health_up", "armor_up")),
            rule("weapon_changed", "object_change", "the weapon in the player's hands changes"),
            rule(
                "monster_killed",
                "complex_interaction",
                "{a object} is killed",
                merge_s=3.0,
                many="enemies are killed one after another",
            ),
        ],
    }

"""The files of one recording: video, input log, camera telemetry, event log, truth."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import av
import numpy as np
from numpy.typing import NDArray

from jobs.record.engine import KEYS, TICS_PER_SECOND, Input, State
from jobs.record.hands import wrap
from jobs.record.player import PICKUPS
from jobs.record.wad import MapGeometry

HEARING: Final = 1024.0  # map units: doors and lifts farther away are not in the event log

Event = dict[str, Any]


class VideoWriter:
    """H.264 at one frame a tic. One thread and bit-exact flags: the same pictures give the same bytes."""

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        self._container = av.open(str(path), "w", format="mp4", container_options={"fflags": "+bitexact"})
        stream = self._container.add_stream("libx264", rate=TICS_PER_SECOND)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18", "preset": "veryfast", "g": "60", "flags": "+bitexact", "threads": "1"}
        stream.codec_context.thread_count = 1
        self._stream = stream
        self.frames = 0

    def __enter__(self) -> VideoWriter:
        return self

    def write(self, picture: NDArray[np.uint8]) -> None:
        """Append one picture (H, W, 3) RGB."""
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts = self.frames
        self.frames += 1
        self._container.mux(self._stream.encode(frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._container.mux(self._stream.encode())
        self._container.close()


class EventLog:
    """What happened, from the engine's own counters, things and sector heights."""

    def __init__(self, geometry: MapGeometry, first: State) -> None:
        self.events: list[Event] = []
        self._last = first
        self._moving: dict[int, Event] = {}
        self._centres = np.array(
            [
                np.concatenate([geometry.a[lines], geometry.b[lines]]).mean(axis=0)
                if (lines := (geometry.right == s) | (geometry.left == s)).any()
                else (np.inf, np.inf)
                for s in range(len(geometry.floor))
            ]
        )

    def see(self, state: State, frame: int) -> None:
        """Compare the state shown in `frame` with the one before."""
        last, self._last = self._last, state
        self._counters(last, state, frame)
        self._things(last, state, frame)
        self._sectors(last, state, frame)

    def finish(self) -> list[Event]:
        """All events by start; those still going on end with the recording."""
        for event in self._moving.values():
            self._close(event)
        self._moving.clear()
        self.events.sort(key=lambda e: (e["start"], e["end"], e["type"]))
        return self.events

    def _add(self, kind: str, frame: int, **details: Any) -> None:
        at = round(frame / TICS_PER_SECOND, 4)
        self.events.append(
            {"type": kind, "start": frame, "end": frame, "start_s": at, "end_s": at, **details}
        )

    def _counters(self, last: State, state: State, frame: int) -> None:
        for name in ("HEALTH", "ARMOR"):
            delta = state.values[name] - last.values[name]
            if delta:
                self._add(
                    f"{name.lower()}_{'up' if delta > 0 else 'down'}", frame, object="player", delta=delta
                )
        if state.values["SELECTED_WEAPON"] != last.values["SELECTED_WEAPON"]:
            self._add("weapon_changed", frame, object="player", to=int(state.values["SELECTED_WEAPON"]))
        if state.values["ITEMCOUNT"] > last.values["ITEMCOUNT"]:
            self._add("item_counted", frame, object="player")

    def _things(self, last: State, state: State, frame: int) -> None:
        now = {t.id: t for t in state.things}
        for thing in last.things:
            after = now.get(thing.id)
            if thing.category in PICKUPS and after is None:
                self._add("object_removed", frame, object=thing.name, object_id=thing.id)
            dead = after is None or after.name.startswith("Dead")
            if thing.category == "Monster" and not thing.name.startswith("Dead") and dead:
                self._add("monster_killed", frame, object=thing.name, object_id=thing.id)

    def _sectors(self, last: State, state: State, frame: int) -> None:
        moved = np.flatnonzero((state.sectors != last.sectors).any(axis=1))
        for sector in set(self._moving) - set(moved.tolist()):
            self._close(self._moving.pop(sector))
        for sector in moved.tolist():
            floor, ceiling = state.sectors[sector] - last.sectors[sector]
            kind = "floor_moved" if floor else "door_open" if ceiling > 0 else "door_close"
            event = self._moving.get(sector)
            if event is not None and event["type"] != kind:
                self._close(self._moving.pop(sector))
                event = None
            if event is None:
                distance = float(np.hypot(*(self._centres[sector] - state.position)))
                event = {
                    "type": kind,
                    "object": "lift" if floor else "door",
                    "sector": sector,
                    "start": frame,
                    "distance_units": round(distance, 1),
                    "from_heights": last.sectors[sector].tolist(),
                }
                self._moving[sector] = event
            event["end"] = frame
            event["to_heights"] = state.sectors[sector].tolist()

    def _close(self, event: Event) -> None:
        event["start_s"] = round(event["start"] / TICS_PER_SECOND, 4)
        event["end_s"] = round(event["end"] / TICS_PER_SECOND, 4)
        if event["distance_units"] <= HEARING:
            self.events.append(event)


def write_input_log(
    path: Path, inputs: Sequence[Input], states: Mapping[str, Sequence[bool]] | None = None
) -> None:
    """Row t: what is held from frame t to t+1. The last row holds nothing: no frame shows its effect.

    states: more columns, of what the game is in while it shows frame t.
    """
    states = states or {}
    header = ["frame", "time_s", *KEYS, "mouse_counts_x", "mouse_counts_y", *states]
    rows = (
        [
            t,
            f"{t / TICS_PER_SECOND:.6f}",
            *(int(key in held.keys) for key in KEYS),
            held.mouse_x,
            held.mouse_y,
            *(int(column[t]) for column in states.values()),
        ]
        for t, held in enumerate([*inputs, Input()])
    )
    _write_csv(path, header, rows)


def write_poses(path: Path, cameras: NDArray[np.float64]) -> None:
    """Camera of every frame, (F, 6) x, y, z, yaw, pitch, roll. Engine convention: map units, z up, yaw
    counter-clockwise from +x, pitch positive DOWN."""
    rows = ([t, *(f"{v:.6f}" for v in row)] for t, row in enumerate(cameras))
    _write_csv(path, ["frame", "x", "y", "z", "yaw_deg", "pitch_deg", "roll_deg"], rows)


def write_events(path: Path, events: Iterable[Event]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def write_truth(path: Path, states: Sequence[State], phases: Sequence[str]) -> None:
    """Row t: the state shown in frame t, and the turn from frame t to t+1 (yaw right, pitch up positive)."""
    names = ("POSITION_X", "POSITION_Y", "POSITION_Z", "ANGLE", "PITCH", "HEALTH", "ARMOR", "KILLCOUNT")
    header = ["frame", "time_s", *names, "phase", "d_yaw_right_deg", "d_pitch_up_deg"]
    rows = []
    for t, state in enumerate(states):
        turn = ["", ""]
        if t + 1 < len(states):
            after = states[t + 1].values
            turn = [
                f"{wrap(state.values['ANGLE'] - after['ANGLE']):.6f}",
                f"{wrap(state.values['PITCH'] - after['PITCH']):.6f}",
            ]
        values = (f"{state.values[name]:.5f}" for name in names)
        rows.append([t, f"{t / TICS_PER_SECOND:.6f}", *values, phases[t], *turn])
    _write_csv(path, header, rows)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)

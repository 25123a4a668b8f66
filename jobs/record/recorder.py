"""Plays games and writes recordings as a capture of real gameplay would leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import yaml

from jobs.record import log
from jobs.record.engine import DEGREES_PER_COUNT, TICS_PER_SECOND, WAD_FOLDER, Engine, Input, RecordError
from jobs.record.hands import Hands, Style, wrap
from jobs.record.player import NoRoute, Play, Player
from jobs.record.routes import SOLID, walk_map
from jobs.record.sessions import record_session, session_entry
from jobs.record.start import choose_start
from jobs.record.takes import Job, Kind, RecordingSummary, Take, game_entry, write_recording
from jobs.record.wad import MapGeometry, read_map

# Maps whose largest connected walkable area, doors open, is 1.3 to 5.2 million square units (measured), so
# that a minute of walking does not have to repeat itself.
MAPS: Final = (
    ("freedoom2.wad", "MAP01"),
    ("freedoom1.wad", "E1M5"),
    ("freedoom1.wad", "E4M1"),
    ("freedoom1.wad", "E2M3"),
    ("freedoom2.wad", "MAP17"),
    ("freedoom1.wad", "E1M4"),
    ("freedoom2.wad", "MAP10"),
    ("freedoom1.wad", "E4M4"),
    ("freedoom2.wad", "MAP27"),
    ("freedoom1.wad", "E2M7"),
    ("freedoom1.wad", "E3M5"),
)
# What an event recording is about, and the event that proves it.
EVENT_KINDS: Final = {"door": "door_open", "kill": "monster_killed", "pickup": "object_removed"}
EVENT_SECONDS: Final = 15.0  # event clips are no longer than this
SESSION_SECONDS: Final = 180.0
ATTEMPTS: Final = 12
TRIED_MAPS: Final = 3  # over which the attempts are spread


def record(
    out: Path,
    *,
    seed: int,
    navigation: int,
    loops: int,
    events: int,
    seconds: float,
    sessions: int = 0,
    session_seconds: float = SESSION_SECONDS,
    third_person_share: float = 0.25,
    size: tuple[int, int] = (640, 360),
    style: Literal["mouse", "keys", "both"] = "both",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[RecordingSummary]:
    """Play Freedoom in ViZDoom and write recordings, their logs and `games.yaml` into the folder `out`.

    navigation, loops, events: how many recordings of each kind. seconds: length of navigation recordings;
    loops take about that long; event recordings at most 15 s. sessions: how many recordings with menus,
    deaths, loading and idling, of about session_seconds each. third_person_share: share of the other
    recordings seen from behind the player; their poses file holds the camera behind the player, not the
    player's eye.
    progress: called with (recording, frames done, frames expected).
    The same arguments give the same bytes.
    Raises RecordError on arguments that ask for nothing or cannot be met, and when no play works out.
    """
    counts: dict[Kind, int] = {"navigation": navigation, "loop": loops, "event": events, "session": sessions}
    if min(counts.values()) < 0 or not any(counts.values()):
        raise RecordError("nothing to record: ask for at least one navigation, loop, event or session")
    if not 0.0 <= third_person_share <= 1.0:
        raise RecordError(f"third_person_share is {third_person_share}; give a share from 0 to 1")
    if seconds < 2.0:
        raise RecordError(f"seconds is {seconds}; a recording is at least 2 s long")
    out.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    played: list[Kind] = [kind for kind in kinds if kind != "session"]
    jobs = _plan(played, seed, seconds, third_person_share, style)
    summaries = [_record_one(out, job, size, progress) for job in jobs]
    games = {job.game: game_entry(job) for job in jobs}
    for index in range(sessions):
        job, next_level = _plan_session(index, seed, session_seconds)
        summaries.append(record_session(out, job, next_level, size, progress))
        games[job.game] = session_entry(job)
    text = yaml.safe_dump({"games": [games[name] for name in sorted(games)]}, sort_keys=False, width=110)
    (out / "games.yaml").write_text(text)
    return summaries


def _plan(kinds: list[Kind], seed: int, seconds: float, share: float, style: str) -> list[Job]:
    order = np.random.default_rng([seed, 0]).permutation(len(MAPS))
    jobs = []
    for i, kind in enumerate(kinds):
        index = i - kinds.index(kind)
        wad, level = MAPS[order[i % len(MAPS)]]
        third_person = int((i + 1) * share) > int(i * share)
        hands: Style = "mouse" if style == "mouse" or (style == "both" and (i + i // 4) % 2 == 0) else "keys"
        game = f"doom_tps_{hands}" if third_person else f"doom_{hands}"
        length = min(seconds, EVENT_SECONDS) if kind == "event" else seconds
        jobs.append(
            Job(
                name=f"{game}_{kind}{index:02d}_{level.lower()}",
                game=game,
                kind=kind,
                index=index,
                wad=wad,
                level=level,
                style=hands,
                third_person=third_person,
                frames=round(length * TICS_PER_SECOND),
                key=(seed, 1, i),
            )
        )
    return jobs


def _plan_session(index: int, seed: int, seconds: float) -> tuple[Job, str]:
    """A session, and the map that it goes on in."""
    order = np.random.default_rng([seed, 2, index]).permutation(len(MAPS))
    wad, level = MAPS[order[0]]
    next_level = next(MAPS[i][1] for i in order[1:] if MAPS[i][0] == wad)
    job = Job(
        name=f"doom_session{index:02d}_{level.lower()}",
        game="doom_session",
        kind="session",
        index=index,
        wad=wad,
        level=level,
        style="mouse",
        third_person=False,
        frames=round(seconds * TICS_PER_SECOND),
        key=(seed, 2, index, 1),
    )
    return job, next_level


def _record_one(
    out: Path, job: Job, size: tuple[int, int], progress: Callable[[str, int, int], None] | None
) -> RecordingSummary:
    """Some maps have no door, or no way to what an event needs: after its own map the next ones are tried."""
    own, why = job, ""
    for attempt in range(ATTEMPTS):
        job = _on_map(own, attempt * TRIED_MAPS // ATTEMPTS)
        geometry = read_map(WAD_FOLDER / job.wad, job.level)
        rng = np.random.default_rng([*job.key, attempt])
        try:
            take = _play(out / f"{job.name}.mp4", job, geometry, rng, size, progress)
        except NoRoute as error:
            why = str(error)
            continue
        return write_recording(out, job, take, size)
    raise RecordError(f"{own.name}: no play worked out in {ATTEMPTS} attempts ({why}); use another seed")


def _on_map(job: Job, later: int) -> Job:
    """The same recording so many maps later."""
    if not later:
        return job
    wad, level = MAPS[(MAPS.index((job.wad, job.level)) + later) % len(MAPS)]
    return replace(job, name=job.name.removesuffix(job.level.lower()) + level.lower(), wad=wad, level=level)


def _play(
    video: Path,
    job: Job,
    geometry: MapGeometry,
    rng: np.random.Generator,
    size: tuple[int, int],
    progress: Callable[[str, int, int], None] | None,
) -> Take:
    monsters = job.kind == "event"
    seed = int(rng.integers(1, 2**31))
    with Engine(
        job.wad, job.level, seed=seed, monsters=monsters, third_person=job.third_person, size=size
    ) as engine:
        state, _ = engine.look()
        obstacles = [(t.x, t.y) for t in state.things if t.category in SOLID]
        # A walker that comes back backwards cannot open doors, so loops keep to the open part of a map.
        walk = walk_map(geometry, obstacles, doors=job.kind != "loop")
        hands = Hands(job.style)
        kind = tuple(EVENT_KINDS)[job.index % len(EVENT_KINDS)]
        where, yaw, target = choose_start(walk, geometry, state, rng, kind if monsters else None)
        if monsters:
            for text in ("give shotgun", *["give shell"] * 6):
                engine.command(text)
        engine.command(f"warp {where[0]:.0f} {where[1]:.0f}")
        engine.step(Input())
        state, _ = engine.look()
        engine.step(Input(mouse_x=round(wrap(state.yaw - yaw) / DEGREES_PER_COUNT)))
        for _ in range(40 if monsters else 8):
            engine.step(Input())
        state, picture = engine.look()
        player = Player(walk, geometry.door_sectors(), hands, rng, state)
        play: Play
        if job.kind == "loop":
            play = player.walk_a_loop(job.frames, ("turn180", "rewind")[job.index % 2])
        elif target is not None:
            play = player.events(kind, target)
        else:
            play = player.explore()
        take = Take([state], [], [], [], player, geometry)
        happened = log.EventLog(geometry, state)
        with log.VideoWriter(video, size) as writer:
            writer.write(picture)
            for frame, intent in enumerate(play, start=1):
                take.phases.append(intent.phase)
                if job.kind != "loop" and frame == job.frames:
                    break
                if frame > 2 * job.frames + 10 * TICS_PER_SECOND:
                    raise NoRoute("the way back took too long")
                held = hands(intent, state)
                engine.step(held)
                state, picture = engine.look()
                writer.write(picture)
                take.inputs.append(held)
                take.states.append(state)
                happened.see(state, frame)
                player.see(state, frame)
                if progress is not None and frame % TICS_PER_SECOND == 0:
                    progress(job.name, frame, job.frames)
            if len(take.phases) < len(take.states):
                take.phases.append(take.phases[-1])
        if progress is not None:
            progress(job.name, len(take.states), len(take.states))
        take = replace(take, events=happened.finish())
        if monsters and not any(event["type"] == EVENT_KINDS[kind] for event in take.events):
            raise NoRoute(f"no {kind} within {len(take.states)} frames")
        return take

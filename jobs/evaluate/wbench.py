"""The navigation cases of WBench played by a world, laid out as its own scorer expects them.

    DATA/cases/case_*.json, pictures below DATA       as WBench's data set has them
    work_dirs/MODEL/videos/case_ID_combined.mp4       one video a case, all its turns in order
    work_dirs/MODEL/turns.json                        first frame of each turn, and the end

A turn lasts 4 s: 16 latents, 64 frames (61 in the first). The scorer runs on a GPU host of its own.
Source: spec/worldplay2.md b, j; arXiv 2605.25874 and its public case layout, see docs/evaluation-events.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.evaluate.pins import Identity, check_pin, pin
from jobs.evaluate.world import Case, EvaluationError, World
from jobs.model import Tick, read_image
from jobs.video import is_whole, video_writer
from pipeline.store import Store
from schemas.action import PERSPECTIVE
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, render
from schemas.clip import Perspective
from schemas.rollout import Command, action_rows
from schemas.strict_json import StrictJsonError, dumps, loads, unprintable
from schemas.timeline import FRAMES_PER_LATENT, GRID_RATE, LATENTS_PER_CHUNK

NAVIGATION_CASES = 158
"""Of the published 289. Source: spec/worldplay2.md j."""
TURN_S = 4
TURN_LATENTS = TURN_S * GRID_RATE // FRAMES_PER_LATENT
KEYS: dict[str, tuple[str, int]] = {
    "W": ("forward", 1), "S": ("forward", -1), "A": ("lateral", -1), "D": ("lateral", 1),
    "right": ("yaw", 1), "left": ("yaw", -1), "up": ("pitch", 1), "down": ("pitch", -1),
}  # fmt: skip
"""Key -> (axis, sign): forward and right positive, yaw right and pitch up positive."""
ALIASES = {
    "→": "right", "←": "left", "↑": "up", "↓": "down", "w": "W", "a": "A", "s": "S", "d": "D",
    "forward": "W", "backward": "S",
    **{f"{kind}_{way}": way for kind in ("cam", "look") for way in ("left", "right", "up", "down")},
    "yaw_left": "left", "yaw_right": "right", "pitch_up": "up", "pitch_down": "down",
}  # fmt: skip
"""Other names of keys that the scorer reads."""
STOP = "stop"
NAVIGATION, SWITCH, TOLD = "navigation", "perspective_switch", ("subject_action", "event_edit")
VIEWS = {"first_person": Perspective.FIRST, "third_person": Perspective.THIRD}
SWITCHES = {"fp_to_tp": Perspective.THIRD, "tp_to_fp": Perspective.FIRST}
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Interaction(BaseModel):
    """One turn of a case."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: Literal["navigation", "subject_action", "event_edit", "perspective_switch"]
    action: str = Field(min_length=1)


class Setting(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    perspective: Literal["first_person", "third_person"]
    initial_image: str = Field(min_length=1)


class CaseFile(BaseModel):
    """What is read of a case's JSON; the rest is for the scorer."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    id: str | int
    environment_prompt: str = ""
    character_prompt: str = ""
    settings: Setting
    interactions: tuple[Interaction, ...] = Field(min_length=1)


@dataclass(frozen=True)
class WBenchCase:
    """A case in our terms. commands, views, prompts: one a turn. image: path of the start picture."""

    name: str
    image: Path
    commands: tuple[Command, ...]
    views: tuple[Perspective, ...]
    prompts: tuple[str, ...]

    @property
    def latents(self) -> int:
        return TURN_LATENTS * len(self.commands)

    @property
    def turn_frames(self) -> tuple[int, ...]:
        """First frame of each turn, and the number of frames."""
        last = FRAMES_PER_LATENT * TURN_LATENTS
        return (0, *(last * k - FRAMES_PER_LATENT + 1 for k in range(1, len(self.commands) + 1)))

    def case(self, yaw: float, pitch: float) -> Case:
        """What a world plays. yaw, pitch: degrees per latent of a held turn."""
        rows = action_rows(self.commands, self.views[0], yaw, pitch)
        rows[:, PERSPECTIVE] = np.repeat([v is Perspective.FIRST for v in self.views], TURN_LATENTS)
        each = TURN_LATENTS // LATENTS_PER_CHUNK
        prompts = tuple(prompt for prompt in self.prompts for _ in range(each))
        return Case(self.name, read_image(self.image, "initial_image"), self.views[0], rows, prompts)


@dataclass(frozen=True)
class WBenchSet:
    """The navigation cases of a data folder, by id; of how many cases in all."""

    cases: tuple[WBenchCase, ...]
    of: int


def read_wbench(data: Path) -> WBenchSet:
    """Cases with at least one navigation turn. All of them are looked at before one is played.

    Raises EvaluationError with the file and turn of what is not known here.
    """
    files = sorted((data / "cases").glob("case_*.json"))
    if not files:
        raise EvaluationError(f"{data} holds no cases/case_*.json: give the data folder of WBench")
    found: dict[str, WBenchCase] = {}
    for path in files:
        held = _file(path)
        if all(turn.type != NAVIGATION for turn in held.interactions):
            continue
        case = _case(held, data, path)
        if case.name in found:
            raise EvaluationError(f"{path}: id {case.name} is that of another file too")
        if not case.image.is_file():
            raise EvaluationError(f"{path}: initial_image {case.image} is missing")
        found[case.name] = case
    if not found:
        raise EvaluationError(f"{data}: none of {len(files)} cases has a navigation turn")
    return WBenchSet(tuple(found.values()), len(files))


def _file(path: Path) -> CaseFile:
    try:
        return CaseFile.model_validate(loads(path.read_bytes(), printable=False))
    except StrictJsonError as error:
        raise EvaluationError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f" ({str(first['input'])[:60]!r})"
        raise EvaluationError(f"{path}: {where}: {first['msg']}{given}") from None


def _case(held: CaseFile, data: Path, path: Path) -> WBenchCase:
    name = str(held.id)
    if not _ID.fullmatch(name):
        raise EvaluationError(f"{path}: id {name!r} makes no file name")
    view = VIEWS[held.settings.perspective]
    commands, views, prompts = [], [], []
    for k, turn in enumerate(held.interactions):
        where = f"{path}: turn {k}"
        event = ""
        command = Command(TURN_LATENTS)
        if turn.type == NAVIGATION:
            command = command_of(turn.action, where)
        elif turn.type == SWITCH:
            if turn.action not in SWITCHES:
                raise EvaluationError(f"{where}: switch {turn.action!r} is none of {', '.join(SWITCHES)}")
            view = SWITCHES[turn.action]
        else:
            event = _text(turn.action, f"{where}, action")
        commands.append(command)
        views.append(view)
        prompts.append(_prompt(held, view, event, path))
    return WBenchCase(name, data / held.settings.initial_image, tuple(commands), tuple(views), tuple(prompts))


def command_of(action: str, where: str) -> Command:
    """Keys joined by "+" (or a stop), held for a turn. Raises EvaluationError for a key that is not known, or
    two of one axis."""
    signs: dict[str, int] = {}
    keys = [part.strip() for part in action.split("+")]
    if keys == [STOP]:
        return Command(TURN_LATENTS)
    for key in keys:
        known = KEYS.get(ALIASES.get(key, key))
        if known is None:
            raise EvaluationError(f"{where}: key {key!r} of {action!r} is none of {', '.join(KEYS)}, {STOP}")
        axis, sign = known
        if axis in signs:
            raise EvaluationError(f"{where}: {action!r} holds two keys of {axis}")
        signs[axis] = sign
    return Command(TURN_LATENTS, **signs)


def _prompt(held: CaseFile, view: Perspective, event: str, path: Path) -> str:
    """The released template of scene, character (third person) and what the turn asks for."""
    happens = (
        IntervalEvent(category=EventCategory.COMPLEX_INTERACTION, text=event) if event else IntervalEvent()
    )
    caption = StructuredCaption(
        scene=_text(held.environment_prompt, f"{path}: environment_prompt"),
        character=_text(held.character_prompt, f"{path}: character_prompt"),
        events=(happens,),
    )
    prompt = render(caption, view, 0)
    if not prompt:
        raise EvaluationError(f"{path}: neither environment_prompt nor character_prompt says anything")
    return prompt


def _text(text: str, where: str) -> str:
    """In Unicode form NFC, with single blanks."""
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    if fault := unprintable(plain):
        raise EvaluationError(f"{where}: {fault}")
    return plain


# --- playing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """kept: videos that were whole already."""

    folder: Path
    made: int
    kept: int


@dataclass(frozen=True)
class PlayWith:
    """yaw, pitch: degrees per latent of a held turn. part: (k, n) plays every n-th case from the k-th on."""

    seed: int
    yaw: float
    pitch: float
    identity: Identity = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)


def play(
    world: World,
    cases: Sequence[WBenchCase],
    out: Path,
    how: PlayWith,
    tick: Tick,
    check: Callable[[Sequence[Case]], None] = lambda cases: None,
) -> Played:
    """Write `out`/turns.json and a video of every case of this part into `out`/videos.

    A whole video that is there is kept; one that has not all its frames is made anew. A video stands under
    its name only when it is whole. check: called with what is to be played, before the folder is pinned to
    this world. Raises EvaluationError where the folder holds videos made otherwise.
    """
    store = Store(str(out))
    note = {"world": world.name, "seed": how.seed, "yaw": how.yaw, "pitch": how.pitch, **how.identity}
    check_pin(store, "made.json", note)
    videos = out / "videos"
    k, n = how.part
    mine, made = cases[k::n], 0
    paths = {case.name: videos / f"case_{case.name}_combined.mp4" for case in mine}
    lacking = {case.name for case in mine if not is_whole(paths[case.name], case.turn_frames[-1])}
    check([case.case(how.yaw, how.pitch) for case in mine if case.name in lacking])
    pin(store, "made.json", note)
    turns = {case.name: {"turn_frames": case.turn_frames} for case in cases}
    store.write("turns.json", dumps({"fps": GRID_RATE, "cases": turns}) + b"\n")
    videos.mkdir(exist_ok=True)
    for done, case in enumerate(mine):
        tick(f"case {case.name}", done, len(mine))
        if case.name in lacking:
            with video_writer(paths[case.name]) as write:
                for frames in world.play(case.case(how.yaw, how.pitch), how.seed):
                    for rgb in frames:
                        write(rgb)
            made += 1
    tick("done", len(mine), len(mine))
    return Played(videos, made, len(mine) - made)

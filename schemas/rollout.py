"""What a rollout is asked for: the released input JSON and its action grammar, parsed strictly.

    [{"image_path": "door.png", "perspective": "fps", "action": "none-4,w+left-8,wa-4",
      "prompt": "The scene in the video is: ...", "prompt_event": "prompt-16"}]

A command is `token(+token)*-LATENTS`; latent 0 stands still, so the first command acts on one latent fewer.
Source: spec/worldplay2.md a.6, i.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.action import FORWARD, JUMP, LATERAL, PERSPECTIVE, PITCH, YAW
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.strict_json import StrictJsonError, loads
from schemas.timeline import LATENTS_PER_CHUNK

MOVES = {
    "w": (1, 0),
    "s": (-1, 0),
    "a": (0, -1),
    "d": (0, 1),
    "wa": (1, -1),
    "wd": (1, 1),
    "sa": (-1, -1),
    "sd": (-1, 1),
}
"""Movement token -> (forward, lateral)."""
YAWS = {"left": -1, "right": 1}
PITCHES = {"up": 1, "down": -1}
SPACE, NONE = "space", "none"
_TOKENS = (*MOVES, *YAWS, *PITCHES, SPACE, NONE)
_PERSPECTIVES = {"tps": Perspective.THIRD, "fps": Perspective.FIRST}
_FIXED = ("image_path", "perspective", "action", "prompt_event", "output_name")
_NEEDED = _FIXED[:4]
_DURATION = re.compile(r"[1-9][0-9]{0,5}")
_PLAIN_NAME = re.compile(r"[\w][\w.-]{0,199}")


class RolloutError(UserError):
    """An input that no rollout can be made of; one line with its place."""


@dataclass(frozen=True, slots=True)
class Command:
    """Controls that are held for `latents` latents. yaw, pitch: sign of the turn; right and up positive."""

    latents: int
    forward: int = 0
    lateral: int = 0
    yaw: int = 0
    pitch: int = 0
    jump: int = 0


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A prompt, by the name of its key, for `latents` latents."""

    name: str
    latents: int


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """One video to make. image: path as given, relative to the JSON. prompts: texts by name."""

    name: str
    image: str
    perspective: Perspective
    commands: tuple[Command, ...]
    spans: tuple[PromptSpan, ...]
    prompts: Mapping[str, str]

    @property
    def latents(self) -> int:
        return sum(c.latents for c in self.commands)

    @property
    def files(self) -> tuple[str, str]:
        """The pictures as they were made, and the same with the controls drawn on top."""
        return f"{self.name}.mp4", f"{self.name}.actions.mp4"

    @property
    def chunks(self) -> int:
        return self.latents // LATENTS_PER_CHUNK

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """The name of each chunk's prompt."""
        return tuple(s.name for s in self.spans for _ in range(s.latents // LATENTS_PER_CHUNK))

    @property
    def chunk_prompts(self) -> tuple[str, ...]:
        """The text of each chunk's prompt."""
        return tuple(self.prompts[name] for name in self.prompt_names)


def parse_inputs(data: str | bytes, where: str) -> tuple[RolloutInput, ...]:
    """The videos that an input JSON asks for. where: names the file in errors. Raises RolloutError."""
    try:
        value = loads(data)
    except StrictJsonError as error:
        raise RolloutError(f"{where}: {error}") from None
    if not isinstance(value, list) or not value:
        raise RolloutError(f"{where}: a JSON array of objects is needed, one a video")
    found = tuple(_input(entry, k, f"{where}: entry {k}") for k, entry in enumerate(value))
    taken: dict[str, int] = {}
    for k, one in enumerate(found):
        for file in one.files:
            if (other := taken.setdefault(file, k)) != k:
                raise RolloutError(
                    f"{where}: entry {k}: output_name {one.name!r} makes {file}, as entry {other} does"
                )
    return found


def _input(entry: Any, number: int, where: str) -> RolloutInput:
    if not isinstance(entry, dict):
        raise RolloutError(f"{where} is no object")
    for key in entry:
        if key not in _FIXED and not key.startswith("prompt"):
            raise RolloutError(f"{where}: unknown key {key!r}; known are {', '.join(_FIXED)} and prompt*")
        if not isinstance(entry[key], str) or not entry[key]:
            raise RolloutError(f"{where}, {key}: a text that is not empty is needed")
    for key in _NEEDED:
        if key not in entry:
            raise RolloutError(f"{where}: {key} is missing")
    perspective = entry["perspective"]
    if perspective not in _PERSPECTIVES:
        raise RolloutError(f"{where}, perspective: {perspective!r} is neither fps nor tps")
    prompts = {k: v for k, v in entry.items() if k.startswith("prompt") and k != "prompt_event"}
    commands = parse_actions(entry["action"], f"{where}, action")
    spans = parse_prompts(entry["prompt_event"], prompts, f"{where}, prompt_event")
    asked, told = sum(c.latents for c in commands), sum(s.latents for s in spans)
    if asked != told:
        raise RolloutError(f"{where}: action lasts {asked} latents and prompt_event {told}")
    name = entry.get("output_name", f"{number:04d}_{PurePosixPath(entry['image_path']).stem}")
    if not _PLAIN_NAME.fullmatch(name) or len(name.encode()) > 200:
        raise RolloutError(
            f"{where}, output_name: {name!r} is no plain file name (letters, digits, _ . -; 200 bytes)"
            + ("" if "output_name" in entry else ", as image_path makes it: give output_name")
        )
    return RolloutInput(name, entry["image_path"], _PERSPECTIVES[perspective], commands, spans, prompts)


def parse_actions(text: str, where: str) -> tuple[Command, ...]:
    """`cmd(,cmd)*` -> commands. Raises RolloutError with the place of the command."""
    return tuple(_command(part, f"{where}: command {k} {part!r}") for k, part in enumerate(text.split(",")))


def _command(text: str, where: str) -> Command:
    held, latents = _timed(text, where)
    tokens = held.split("+")
    for token in tokens:
        if token not in _TOKENS:
            raise RolloutError(f"{where}: {token!r} is none of {' '.join(_TOKENS)}")
    for what, group in (("movement", MOVES), ("yaw", YAWS), ("pitch", PITCHES), ("space", (SPACE,))):
        if len(chosen := [t for t in tokens if t in group]) > 1:
            hint = "; a diagonal is one token, as wa" if what == "movement" else ""
            raise RolloutError(f"{where}: at most one {what}, not {' and '.join(chosen)}{hint}")
    if NONE in tokens and len(tokens) > 1:
        raise RolloutError(f"{where}: none stands alone")
    forward, lateral = next((MOVES[t] for t in tokens if t in MOVES), (0, 0))
    return Command(
        latents,
        forward,
        lateral,
        next((YAWS[t] for t in tokens if t in YAWS), 0),
        next((PITCHES[t] for t in tokens if t in PITCHES), 0),
        int(SPACE in tokens),
    )


def parse_prompts(text: str, known: Iterable[str], where: str) -> tuple[PromptSpan, ...]:
    """`name-LATENTS(,name-LATENTS)*` -> spans of whole chunks. Raises RolloutError with the place."""
    known = tuple(known)
    spans = []
    for k, part in enumerate(text.split(",")):
        at = f"{where}: part {k} {part!r}"
        name, latents = _timed(part, at)
        if name not in known:
            raise RolloutError(f"{at}: no prompt {name!r}; there is {', '.join(known) or 'none'}")
        if latents % LATENTS_PER_CHUNK:
            raise RolloutError(
                f"{at}: {latents} latents; prompts change every {LATENTS_PER_CHUNK} latents only"
            )
        spans.append(PromptSpan(name, latents))
    return tuple(spans)


def _timed(text: str, where: str) -> tuple[str, int]:
    """What stands before the last dash, and the latents behind it."""
    name, dash, duration = text.rpartition("-")
    if not dash or not name or not _DURATION.fullmatch(duration):
        raise RolloutError(f"{where}: a name, a dash and a positive number of latents is needed, as w-4")
    return name, int(duration)


def action_rows(
    commands: Iterable[Command], perspective: Perspective, yaw: float, pitch: float
) -> npt.NDArray[np.float32]:
    """float32 [T, 6] in the order of `schemas.action.AXES`, latent 0 idle. yaw, pitch: degrees per latent."""
    rows = []
    for c in commands:
        row = np.zeros(6, np.float32)
        row[PITCH], row[YAW] = c.pitch * pitch, c.yaw * yaw
        row[FORWARD], row[LATERAL], row[JUMP] = c.forward, c.lateral, c.jump
        rows += [row] * c.latents
    out = np.stack(rows)
    out[0] = 0.0
    out[:, PERSPECTIVE] = perspective is Perspective.FIRST
    return out

"""The key map of a corpus: which recordings belong to which game, and how to read their logs.

A YAML file with one list, `games`. An entry names its recordings by glob and says what each log column means.
Everything that differs between games (signs, units, axes, conventions) is stated here and nowhere else.
Source: DESIGN rule 5; spec/faults.md W3, W5, W7, P7, C7. Described for users in docs/sources.md.
"""

from __future__ import annotations

import difflib
import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline import strict_yaml
from schemas.caption import EventCategory
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.strict_json import unprintable

MAX_FIRST_FRAME = 10_000_000
"""46 hours at 60 fps: what lies beyond is no frame number (a timestamp, say)."""


class SourceError(UserError):
    """A source that cannot be listed; the message is one line."""


class KeyMapError(SourceError):
    """A key map that cannot be used; the message is one line that names the place."""


class _Strict(BaseModel):
    """Unknown keys are refused, naming the nearest known one: a misspelt key must not pass as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in data:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.0)
                raise ValueError(f"unknown key {key!r}; the nearest known one is {near[0]!r}")
        return data


class Action(StrEnum):
    """What an input does. `run` is a modifier: a column of the inputs, not an axis of the 6-vector."""

    PITCH = "pitch"
    YAW = "yaw"
    FORWARD = "forward"
    LATERAL = "lateral"
    JUMP = "jump"
    RUN = "run"


class InputUnit(StrEnum):
    KEY = "key"  # held (not zero) or not
    COUNT = "count"  # device counts since the row before: they add up


class Input(_Strict):
    """One column of a log and the axis it drives."""

    column: str
    action: Action
    unit: InputUnit = InputUnit.KEY
    sign: Literal[1, -1] = Field(
        default=1, description="of the axis when the value is positive: up, right, forward"
    )

    @model_validator(mode="after")
    def _fits(self) -> Input:
        if self.unit is InputUnit.COUNT and self.action not in (Action.YAW, Action.PITCH):
            raise ValueError(f"column {self.column}: counts can only drive yaw or pitch, not {self.action}")
        if self.sign < 0 and self.action in (Action.JUMP, Action.RUN):
            raise ValueError(f"column {self.column}: {self.action} has no negative side")
        return self


class Rows(_Strict):
    """How the rows of a log lie against the frames of the video. Row r is source frame first_frame + r; or,
    when `time` names a column of seconds, the frame shown at that time after `clock_start`."""

    file: str = Field(description='path beside the video, e.g. "{stem}.input.csv"; .csv or .jsonl')
    first_frame: int = Field(
        default=0,
        ge=-MAX_FIRST_FRAME,
        le=MAX_FIRST_FRAME,
        description="source frame of row 0; negative when the log starts first",
    )
    time: str = Field(default="", description="column of seconds; empty: rows are frames")
    clock_start: float = Field(
        default=0.0, allow_inf_nan=False, description="log time, in seconds, at which frame 0 is shown"
    )

    @model_validator(mode="after")
    def _readable(self) -> Rows:
        if PurePosixPath(self.file).suffix not in (".csv", ".jsonl"):
            raise ValueError(f"file {self.file!r} must end in .csv or .jsonl")
        _fill(self.file, "x")
        if self.time and self.first_frame:
            raise ValueError("first_frame is for rows without a clock; with a time column use clock_start")
        return self


class State(StrEnum):
    """What the player cannot act in; such stretches are cut out of a recording."""

    DEAD = "dead"
    MENU = "menu"
    LOADING = "loading"


class StateColumn(_Strict):
    """A column that tells of a state of the game in the frame of its row, whatever `row` says of inputs."""

    column: str
    state: State
    above: float = Field(
        default=0.0, allow_inf_nan=False, description="the game is in the state where the value is greater"
    )


class LogPart(Rows):
    """The input log. row next: row t holds from frame t to t+1 (a[t] moves f[t] -> f[t+1]); previous: row t
    brought frame t about."""

    row: Literal["next", "previous"] = "next"
    complete: bool = Field(
        default=True, description="false when something that is not logged also turns the camera"
    )
    absent: tuple[Action, ...] = Field(
        default=(), description="what the game does not have at all: zero, where a missing input is unknown"
    )
    states: tuple[StateColumn, ...] = Field(
        default=(), description="columns that say that the player is dead, in a menu, or waits for a map"
    )
    inputs: Annotated[tuple[Input, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _once(self) -> LogPart:
        if both := sorted({i.action for i in self.inputs} & set(self.absent)):
            raise ValueError(f"{both[0]} is absent and mapped at once")
        names = [i.column for i in self.inputs]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"column {twice[0]} is mapped twice")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read, in order."""
        named = [i.column for i in self.inputs] + [s.column for s in self.states]
        return tuple(dict.fromkeys(named)) + ((self.time,) if self.time else ())

    def driving(self, action: Action) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if i.action is action)


class PoseColumns(_Strict):
    """Position, and either yaw (pitch, roll) in degrees or a quaternion qw qx qy qz."""

    x: str
    y: str
    z: str
    yaw: str = ""
    pitch: str = ""
    roll: str = ""
    qw: str = ""
    qx: str = ""
    qy: str = ""
    qz: str = ""

    @property
    def quaternion(self) -> tuple[str, ...]:
        return (self.qw, self.qx, self.qy, self.qz)

    @model_validator(mode="after")
    def _one_way(self) -> PoseColumns:
        if any(self.quaternion) == bool(self.yaw) or (any(self.quaternion) and not all(self.quaternion)):
            raise ValueError("columns must name either yaw, or all of qw qx qy qz")
        if any(self.quaternion) and (self.pitch or self.roll):
            raise ValueError("pitch and roll do not go with a quaternion")
        return self


class World(_Strict):
    """Axes of the world that positions are given in."""

    up: Literal["y", "z"]
    handed: Literal["right", "left"]


class QuaternionMeaning(_Strict):
    """What a quaternion turns. w2c: x y z are the translation of the same world-to-camera matrix."""

    direction: Literal["c2w", "w2c"]
    camera: Literal["opencv", "opengl"]


class PosePart(Rows):
    """The game's own camera, one row a frame: the state that the frame shows."""

    columns: PoseColumns
    world: World
    yaw_zero: Literal["x", "y", "z", "-x", "-y", "-z"] = Field(
        default="x", description="world axis that the camera looks along at yaw 0"
    )
    yaw_positive: Literal["left", "right"] | None = None
    pitch_positive: Literal["up", "down"] | None = None
    roll_positive: Literal["left", "right"] = Field(default="right", description="side the head leans to")
    quaternion: QuaternionMeaning | None = None
    metres_per_unit: float | None = Field(default=None, gt=0, le=1e6, description="absent: scale is unknown")

    @model_validator(mode="after")
    def _stated(self) -> PosePart:
        c = self.columns
        if c.yaw and self.yaw_positive is None:
            raise ValueError("yaw_positive (left or right) must be stated")
        if c.pitch and self.pitch_positive is None:
            raise ValueError("pitch_positive (up or down) must be stated")
        if any(c.quaternion) != (self.quaternion is not None):
            raise ValueError("quaternion: {direction, camera} must be stated with qw qx qy qz, and only then")
        if c.yaw and self.yaw_zero[-1] == self.world.up:
            raise ValueError(f"yaw_zero {self.yaw_zero} cannot be the up axis")
        if self.quaternion and self.world.handed == "left":
            raise ValueError("a quaternion in a left-handed world has no agreed meaning: log yaw and pitch")
        return self

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Columns that are read, in order."""
        named = (*self.columns.model_dump().values(), self.time)
        return tuple(n for n in named if n)


class CameraPart(_Strict):
    """The game's camera where it is known; else odometry calibrates it from the pictures."""

    focal: float = Field(gt=0, le=10, description="fx as a share of the picture's width")
    aspect: float = Field(default=1.0, gt=0.1, le=10, description="fy / fx")
    look: Literal["tilt", "shear"] = Field(
        default="tilt", description="looking up turns the camera, or slides the picture"
    )


FIELD = re.compile(r"\{(a )?([A-Za-z_]\w*)\}")
"""A field of the record in the text of a rule; "a " before it: with its article, "an armor bonus"."""


class EventClock(_Strict):
    """Which fields of a record say when. Frames are frames of the source, from `first_frame` on; seconds run
    from `clock_start`. The end is inclusive: the last frame, or the moment, at which it still happens."""

    start: str
    end: str = Field(default="", description="empty: every event is an instant")
    unit: Literal["frame", "second"]


class Seen(_Strict):
    """A witness in the same log that the thing was on screen: a record of `type` that holds at the start of
    the event, or ended at most within_s before it."""

    type: str
    same: tuple[str, ...] = Field(default=(), description="fields that both records have, with equal values")
    where: dict[str, tuple[str, ...]] = Field(
        default={}, description="fields of the witness and the values that they may have"
    )
    within_s: float = Field(default=0.5, ge=0, le=5, allow_inf_nan=False)


class EventRule(_Strict):
    """What one type of record, or a change of one counter, tells. All conditions must hold.

    text: a clause without a full stop, in the present tense; {field} is the record's, its object's name in
    words. Source: spec/worldplay2.md k (the three categories); never more than the log says.
    """

    type: str = Field(default="", description="type of the records of an event log")
    column: str = Field(default="", description="or a counter in a table")
    change: Literal["rises", "falls"] = Field(default="rises", description="of the counter")
    category: EventCategory
    text: str
    within: dict[str, float] = Field(
        default={}, description="largest size of a field, whatever its sign: a distance, a bearing"
    )
    seen: Seen | None = None
    min_s: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="shorter ones are left out")
    merge_s: float = Field(
        default=0.0,
        ge=0,
        le=5,
        allow_inf_nan=False,
        description="events of the rule that follow within it are one; at most the length of a caption's "
        "interval, so that none of these lies in a gap",
    )
    many: str = Field(default="", description="text of several that became one")

    @model_validator(mode="after")
    def _tells(self) -> EventRule:
        if bool(self.type) == bool(self.column):
            raise ValueError("a rule names either type, of a record, or column, of a counter")
        if self.category is EventCategory.NONE:
            raise ValueError("a rule tells something: its category cannot be none; leave the rule out")
        for text in (self.text, self.many):
            if "{" in FIELD.sub("", text) or "}" in FIELD.sub("", text):
                raise ValueError(f"{text!r}: a field is written {{name}} or {{a name}}")
            if text != text.strip() or text.endswith(".") or unprintable(text):
                raise ValueError(f"{text!r} must be a printable clause without spaces around it or full stop")
        if not self.text:
            raise ValueError("text is empty: say what happens")
        if bool(self.merge_s) != bool(self.many):
            raise ValueError("merge_s and many (the text of several) go together")
        if FIELD.search(self.many):
            raise ValueError(f"{self.many!r} tells of several records and cannot name a field of one")
        if self.column and (self.fields or self.seen or self.min_s):
            raise ValueError(f"column {self.column}: a counter has no fields, no witness and no length")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of its record that a rule reads, beside the clock."""
        named = [name for _, name in FIELD.findall(self.text)]
        return tuple(dict.fromkeys([*named, *self.within, *(self.seen.same if self.seen else ())]))


class EventPart(Rows):
    """What the game logged as having happened: records with a type, or counters in a table of rows.

    Records: JSON lines (.jsonl), or a JSON file (.json) with the list at its top or under the key `list`.
    A table (.csv, .jsonl) lies against the frames as every log does. The first rule of a type whose
    conditions hold tells of a record; types without a rule are left out and counted.
    """

    list: str = Field(default="", description="key of the list in a JSON object; empty: the file is the list")
    type: str = Field(default="type", description="field of a record that names its type")
    clock: EventClock | None = Field(default=None, description="of records; a table has rows")
    names: dict[str, str] = Field(
        default={}, description="words for the game's names; others are split: ArmorBonus, armor bonus"
    )
    rules: Annotated[tuple[EventRule, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _readable(self) -> EventPart:
        _fill(self.file, "x")
        suffix, counters = PurePosixPath(self.file).suffix, bool(self.rules[0].column)
        if any(bool(rule.column) != counters for rule in self.rules):
            raise ValueError("rules name types of records or columns of a table, not both")
        allowed = (".csv", ".jsonl") if counters else (".json", ".jsonl")
        if suffix not in allowed:
            raise ValueError(f"file {self.file!r} must end in {allowed[0]} or {allowed[1]}")
        if counters and (self.clock or self.list or self.names):
            raise ValueError("clock, list and names are for records; a table has first_frame or time")
        if not counters and (self.clock is None or self.time):
            raise ValueError("records need clock: {start, end, unit: frame | second}; time is for tables")
        if self.list and suffix != ".json":
            raise ValueError("list is a key of a .json file")
        seconds = bool(self.time) or (self.clock is not None and self.clock.unit == "second")
        if self.first_frame if seconds else self.clock_start:
            raise ValueError("first_frame is for frames, clock_start for seconds")
        return self

    @property
    def types(self) -> frozenset[str]:
        """Types of records that are read: those that rules name, and their witnesses."""
        named = {rule.type for rule in self.rules} | {rule.seen.type for rule in self.rules if rule.seen}
        return frozenset(named - {""})

    @property
    def counters(self) -> LogPart | None:
        """How the table of counters is read: as any log; None for records."""
        names = dict.fromkeys(rule.column for rule in self.rules if rule.column)
        if not names:
            return None
        # Which axis they would drive is never asked: columns and clock are all that is read of the part.
        columns = tuple(Input(column=name, action=Action.RUN) for name in names)
        return LogPart(
            file=self.file,
            inputs=columns,
            first_frame=self.first_frame,
            time=self.time,
            clock_start=self.clock_start,
        )


class Entry(_Strict):
    """One game, or one set of a game's recordings. Two entries may share a game: its rates are the same."""

    game: str = Field(pattern=r"^[a-z0-9_-]{1,64}$")
    videos: Annotated[tuple[str, ...], Field(min_length=1)]
    recording: str = Field(
        default="", description="all videos of the entry are cuts of this one recording; splits go by it"
    )
    licence: str = ""
    perspective: Perspective = Perspective.UNKNOWN
    log: LogPart | None = None
    poses: PosePart | None = None
    camera: CameraPart | None = None
    events: EventPart | None = None

    @model_validator(mode="after")
    def _fills(self) -> Entry:
        if not all(PurePosixPath(glob).parts for glob in self.videos):
            raise ValueError("videos holds an empty glob, which names nothing; '*' is every file")
        return self

    def matches(self, path: str) -> bool:
        """Does a recording belong here? Globs match from the right: `a_*.mp4` in any folder, `run1/*.mp4` in
        any folder run1. Case counts."""
        return any(PurePosixPath(path).match(glob) for glob in self.videos)


class KeyMap(_Strict):
    """Every entry of a corpus's key map."""

    games: tuple[Entry, ...] = ()

    def claim(self, path: str) -> int:
        """Index of the entry that claims a recording; -1 for none. Raises KeyMapError, naming both, when two
        do."""
        claims = [i for i, entry in enumerate(self.games) if entry.matches(path)]
        if len(claims) > 1:
            names = " and ".join(f"games.{i} ({self.games[i].game})" for i in claims)
            raise KeyMapError(f"{path} is claimed by {names}: make their globs exclude each other")
        return claims[0] if claims else -1

    def match(self, path: str) -> Entry | None:
        """The entry that claims a recording, or None."""
        index = self.claim(path)
        return None if index < 0 else self.games[index]


def parse(text: str, name: str) -> KeyMap:
    """Key map from YAML. Raises KeyMapError in one line: file, place, what is wrong."""
    try:
        data = strict_yaml.load(text)
    except yaml.YAMLError as error:
        raise KeyMapError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    try:
        key_map = KeyMap.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(p) for p in first["loc"]) or "top level"
        raise KeyMapError(f"{name}: {place}: {first['msg'].removeprefix('Value error, ')}") from None
    if not key_map.games:
        raise KeyMapError(f"{name}: games is empty: describe a game, or use kind folder")
    return key_map


def beside(video: str, template: str) -> str:
    """Path of a sidecar of a video: the template beside it, `{stem}` filled in; "" for an empty template."""
    if not template:
        return ""
    path = PurePosixPath(video)
    return (path.parent / _fill(template, path.stem)).as_posix()


def _fill(template: str, stem: str) -> str:
    filled = template.replace("{stem}", stem)
    if PurePosixPath(template).is_absolute() or ".." in PurePosixPath(template).parts:
        raise ValueError(f"{template!r} must lie beside the video or below")
    if "{" in template.replace("{stem}", ""):
        raise ValueError(f"{template!r} may only use {{stem}}")
    return filled

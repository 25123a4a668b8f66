"""The test set of events: records that are written by hand, or made from the event clips of a corpus.

    {"version": 1, "cases": [{"name": "door_01", "category": "EO", "image": "door_01.png",
      "perspective": "fps", "action": "none-20,w-20", "prompt_event": "prompt-20,prompt_event-20",
      "prompts": {"prompt": "The scene in the video is: ...", "prompt_event": "..."},
      "event": "prompt_event", "expected": "A grey door opens in the wall."}]}

JSON or YAML. `event` names the prompt that asks for what is expected, and so says when. EO: environment and
object change; CI: complex interaction. Source: spec/worldplay2.md i.3, j.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import av
import cv2
import numpy as np
import numpy.typing as npt
import yaml
from av.video.reformatter import VideoReformatter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.evaluate.world import Case, EvaluationError
from jobs.model import YAW, read_image
from pipeline.picture import Picture
from pipeline.shards.read import read_index, read_sample
from pipeline.shards.tar import Place
from pipeline.store import Store
from pipeline.strict_yaml import load as load_yaml
from schemas.action import FORWARD, JUMP, LATERAL, PITCH
from schemas.action import YAW as YAW_AXIS
from schemas.caption import EventCategory, render
from schemas.clip import Perspective
from schemas.rollout import MOVES, NONE, SPACE, RolloutInput, action_rows, parse_inputs
from schemas.sample import Annotation
from schemas.strict_json import StrictJsonError, dumps, loads
from schemas.timeline import CAPTION_INTERVAL_S, FRAMES_PER_LATENT, LATENTS_PER_CHUNK, Span, latents_time

INTERVAL_LATENTS = 20
"""Latents of a caption interval of 5 s at 16 fps."""
CASE_LATENTS = 2 * INTERVAL_LATENTS
"""Of a case that is made here: the interval before the event and that of the event, 10 s."""
BENCHMARK = 145
"""Cases of the published test set. Source: spec/worldplay2.md j."""


class Category(StrEnum):
    """EO: environment and object change. CI: complex interaction."""

    EO = "EO"
    CI = "CI"


CATEGORY_OF = {
    EventCategory.ENVIRONMENT_TRANSITION: Category.EO,
    EventCategory.OBJECT_CHANGE: Category.EO,
    EventCategory.COMPLEX_INTERACTION: Category.CI,
}


class EventRecord(BaseModel):
    """One case as it stands in a file. image: relative to the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    category: Category
    image: str
    perspective: Literal["fps", "tps"]
    action: str
    prompt_event: str
    prompts: dict[str, str] = Field(min_length=1)
    event: str = Field(description="name of the prompt that asks for what is expected")
    expected: str = Field(min_length=1, description="what should happen, a sentence")
    source: str = Field(default="", description="where the case comes from; for readers")


class EventFile(BaseModel):
    """A test set."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1]
    cases: tuple[EventRecord, ...] = Field(min_length=1)


@dataclass(frozen=True)
class EventCase:
    """A case that was read: its record, and what the released grammar makes of it. image: uint8 [H, W, 3]."""

    record: EventRecord
    asked: RolloutInput
    image: npt.NDArray[np.uint8]

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Seconds in which the event is asked for."""
        spans, first = [], 0
        for span in self.asked.spans:
            if span.name == self.record.event:
                start, stop = latents_time(Span(first, first + span.latents))
                spans.append((float(start), float(stop)))
            first += span.latents
        return tuple(spans)

    def case(self, yaw: float, pitch: float) -> Case:
        """What a world plays. yaw, pitch: degrees per latent of a held turn."""
        rows = action_rows(self.asked.commands, self.asked.perspective, yaw, pitch)
        return Case(self.name, self.image, self.asked.perspective, rows, self.asked.chunk_prompts)


@dataclass(frozen=True)
class EventSet:
    """sha256: of records and pictures; the name of a test set in reports."""

    cases: tuple[EventCase, ...]
    sha256: str


def read_cases(path: Path) -> EventSet:
    """A test set from a JSON or YAML file. Raises EvaluationError or RolloutError with the place."""
    records = _records(path)
    entries = []
    for k, record in enumerate(records):
        where = f"{path}: case {k} ({record.name})"
        named = [n for n in record.prompts if not n.startswith("prompt") or n == "prompt_event"]
        if named:
            raise EvaluationError(f"{where}: prompt name {named[0]!r}: give prompt, prompt1, ... (no other)")
        if record.event not in record.prompts:
            raise EvaluationError(f"{where}: event {record.event!r} is none of {', '.join(record.prompts)}")
        entries.append(
            {
                "image_path": record.image,
                "perspective": record.perspective,
                "action": record.action,
                "prompt_event": record.prompt_event,
                "output_name": record.name,
            }
            | record.prompts
        )
    asked = parse_inputs(dumps(entries), str(path))
    cases = tuple(
        EventCase(record, one, read_image(path.parent / record.image, f"{path}: {record.name}: image"))
        for record, one in zip(records, asked, strict=True)
    )
    digest = hashlib.sha256()
    for case in cases:
        if not case.spans:
            raise EvaluationError(f"{path}: {case.name}: prompt_event never shows {case.record.event!r}")
        digest.update(dumps(case.record.model_dump(mode="json")))
        digest.update(str(case.image.shape).encode() + case.image.tobytes())
    return EventSet(cases, digest.hexdigest())


def _records(path: Path) -> tuple[EventRecord, ...]:
    if not path.is_file():
        raise EvaluationError(f"{path} is no file: give a test set, or make one with --make-cases CORPUS")
    data = path.read_bytes()
    try:
        value = load_yaml(data.decode()) if path.suffix in (".yaml", ".yml") else loads(data)
        return EventFile.model_validate(value).cases
    except StrictJsonError as error:
        raise EvaluationError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise EvaluationError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


# --- from a corpus ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CasesMade:
    """skipped: samples or events without a case, counted by reason."""

    path: Path
    counts: dict[str, int]
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Told:
    """An event of a sample: its first caption interval, category and text."""

    interval: int
    category: EventCategory
    text: str


@dataclass(frozen=True, slots=True)
class _Made:
    """A record, and where its start picture lies: a frame of a media member."""

    record: EventRecord
    frame: int
    media: Place


def make_cases(
    corpus: Store, folder: Path, split: str = "val", most: int = BENCHMARK, pitch: float = YAW
) -> CasesMade:
    """Write `folder`/cases.json and start pictures from the samples of a split whose captions tell events.

    A case is the 10 s of the interval before an event's first one and that interval itself (the first two
    where it is the first), under the prompts that training gives these chunks. Its controls are the recorded
    rows in the words of the released grammar: a turn counts as held where it is at least half of YAW (or
    `pitch`) degrees per latent. Where there are more events than `most`, those are taken whose names have
    the least sha256, both categories in proportion to what is there.
    Raises EvaluationError where nothing can be made, StoreError, CorruptMember.
    """
    if (folder / "cases.json").exists():
        raise EvaluationError(f"{folder}/cases.json is there already: give another folder")
    found: list[_Made] = []
    skipped: dict[str, int] = {}
    rows = [r for r in read_index(corpus).to_pylist() if r["split"] == split]
    if not rows:
        raise EvaluationError(f"{corpus.url} has no sample of split {split!r}: give another with --split")
    for row in rows:
        members = read_sample(corpus, row["annotations"])
        annotation = Annotation.model_validate_json(members["json"])
        told = list(_events(annotation))
        if not told:
            skipped["no event"] = skipped.get("no event", 0) + 1
        for event in told:
            made = _made(annotation, members, event, pitch)
            if isinstance(made, str):
                skipped[made] = skipped.get(made, 0) + 1
            else:
                record, frame = made
                found.append(_Made(record, frame, row["media"]))
    chosen = _chosen(found, most)
    if not chosen:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise EvaluationError(f"{corpus.url} gives no case of split {split!r} ({why})")
    folder.mkdir(parents=True, exist_ok=True)
    for one in chosen:
        picture = _picture(read_sample(corpus, one.media)["mp4"], one.frame, one.record.name)
        if not cv2.imwrite(str(folder / one.record.image), picture[:, :, ::-1]):
            raise EvaluationError(f"{folder / one.record.image} cannot be written")
    records = [one.record.model_dump(mode="json") for one in chosen]
    (folder / "cases.json").write_bytes(dumps({"version": 1, "cases": records}) + b"\n")
    counts = {str(c): sum(m.record.category is c for m in chosen) for c in Category}
    return CasesMade(folder / "cases.json", counts, skipped)


def _events(annotation: Annotation) -> Iterator[_Told]:
    """Events in order; neighbouring intervals of one text are one."""
    first = 0
    for event, group in groupby(annotation.caption.events):
        if event.category is not EventCategory.NONE:
            yield _Told(first, event.category, event.text)
        first += len(list(group))


def _made(
    annotation: Annotation, members: dict[str, bytes], event: _Told, pitch: float
) -> tuple[EventRecord, int] | str:
    """A record and the media frame it starts from, or why there is none."""
    start = INTERVAL_LATENTS * max(0, event.interval - 1)
    stop = start + CASE_LATENTS
    if stop > annotation.latent_frames:
        return "clip ends too soon"
    if annotation.perspective is Perspective.UNKNOWN:
        return "perspective unknown"
    rows = _array(members["actions.npy"])[start:stop]
    if np.isnan(rows[1:]).any():
        return "controls unknown"
    texts = [_prompt(annotation, chunk) for chunk in range(start, stop, LATENTS_PER_CHUNK)]
    if not all(text for text, _ in texts):
        return "no caption"
    distinct = list(dict.fromkeys(texts))
    names = {key: "prompt" if k == 0 else f"prompt{k}" for k, key in enumerate(distinct)}
    holding = [names[key] for key in distinct if key[1] == event.interval]
    if len(holding) != 1:
        return "event without a chunk"
    spans = [(name, LATENTS_PER_CHUNK * len(list(g))) for name, g in groupby(names[key] for key in texts)]
    record = EventRecord(
        name=f"{annotation.sample_id}-i{event.interval:02d}",
        category=CATEGORY_OF[event.category],
        image=f"{annotation.sample_id}-i{event.interval:02d}.png",
        perspective="fps" if annotation.perspective is Perspective.FIRST else "tps",
        action=action_of(rows, YAW, pitch),
        prompt_event=",".join(f"{name}-{latents}" for name, latents in spans),
        prompts={name: key[0] for key, name in names.items()},
        event=holding[0],
        expected=event.text,
        source=f"{annotation.sample_id} latents {start}-{stop}, {event.category}",
    )
    return record, int(_array(members["grid.npy"])[FRAMES_PER_LATENT * start])


def _prompt(annotation: Annotation, first: int) -> tuple[str, int]:
    """The prompt of the chunk at this latent, and its interval: that which holds the chunk's middle."""
    start, stop = latents_time(Span(first, first + LATENTS_PER_CHUNK))
    interval = int((start + stop) / 2 / CAPTION_INTERVAL_S)
    return render(annotation.caption, annotation.perspective, interval), interval


def action_of(rows: npt.NDArray[np.float32], yaw: float, pitch: float) -> str:
    """Rows float32 [T, 6] in the released grammar, row 0 aside; a turn of at least half of `yaw` or `pitch`
    degrees per latent is held, a smaller one is not."""
    moves = {value: token for token, value in MOVES.items()}
    tokens = []
    for row in rows[1:]:
        held = []
        if row[FORWARD] or row[LATERAL]:
            held.append(moves[int(row[FORWARD]), int(row[LATERAL])])
        if abs(row[YAW_AXIS]) >= yaw / 2:
            held.append("right" if row[YAW_AXIS] > 0 else "left")
        if abs(row[PITCH]) >= pitch / 2:
            held.append("up" if row[PITCH] > 0 else "down")
        if row[JUMP]:
            held.append(SPACE)
        tokens.append("+".join(held) or NONE)
    runs = [(token, len(list(group))) for token, group in groupby([tokens[0], *tokens])]
    return ",".join(f"{token}-{latents}" for token, latents in runs)


def _chosen(found: list[_Made], most: int) -> list[_Made]:
    ranked = sorted(found, key=lambda made: hashlib.sha256(made.record.name.encode()).digest())
    of = {c: [made for made in ranked if made.record.category is c] for c in Category}
    interactions = round(min(1.0, most / max(1, len(found))) * len(of[Category.CI]))
    changes = min(most, len(found)) - interactions
    return sorted(of[Category.CI][:interactions] + of[Category.EO][:changes], key=lambda m: m.record.name)


def _picture(data: bytes, frame: int, name: str) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3] of a frame of a media member: the frame-th of a sequential decode."""
    container: Any
    with av.open(io.BytesIO(data)) as container:
        for k, shown in enumerate(container.decode(video=0)):
            if k == frame:
                return np.array(Picture(shown, VideoReformatter()).rgb, np.uint8)
    raise EvaluationError(f"media of {name} ends before frame {frame}: run `wp2 verify`")


def _array(data: bytes) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array

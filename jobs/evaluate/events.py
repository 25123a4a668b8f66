"""Does a world do what it is asked: videos of a test set of events, graded by a VLM.

A run folder:
    made.json          what the videos are made with      videos/NAME.mp4
    judged.json        what they are judged with          judgements/NAME.json
    events.json        the report
A video or a judgement that is there is kept. A run with another set, world, prompt, judge or setting than the
folder's is refused: its numbers would be of two kinds. Source: spec/worldplay2.md j; DESIGN rules 2, 6, 10.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.evaluate.event_cases import Category, EventCase, EventSet
from jobs.evaluate.judge import Film, JudgeConfig, Tried, Verdict, film_of, judge, require_sight
from jobs.evaluate.judge_prompt import PROMPT_VERSION, prompt_sha256
from jobs.evaluate.pins import Identity, check_pin, difference, pin, read_note
from jobs.evaluate.report import Film as Shot
from jobs.evaluate.report import Number
from jobs.evaluate.report import Report as Page
from jobs.evaluate.stats import Interval, interval, paired
from jobs.evaluate.world import Case, EvaluationError, World
from jobs.model import Tick
from jobs.video import is_whole, video_writer
from pipeline.caption.client import Client, EndpointConfig
from pipeline.caption.ladder import steps
from pipeline.stage import digest
from pipeline.store import Store
from schemas.timeline import Span, latents_time

VIDEOS, REPORT = "videos", "events.json"
MADE, JUDGED = "made.json", "judged.json"
SCALE = 25
"""Grades of 0-4 are told as 0-100. Source: spec/worldplay2.md j."""
SCORES = ("instruction", "execution", "score")
LENGTH_S = 0.5
"""A video may be so much longer or shorter than its case."""
_SHOTS = 3
"""Videos on the page of each end of the ranking."""
_FILMS = 2
"""Videos that are decoded at once, beside the requests that wait for the judge."""


class CaseJudgement(BaseModel):
    """A case's line: grades 0-4 where it is judged, and why where it is not. start: its
    start picture. key: of the request."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    category: Category
    start: str
    key: str
    instruction: int | None = None
    execution: int | None = None
    instruction_reason: str = ""
    execution_reason: str = ""
    unjudged: str = ""
    tries: tuple[Tried, ...] = ()

    @property
    def values(self) -> dict[str, float]:
        """The scores 0-100; NaN where it is unjudged."""
        if self.instruction is None or self.execution is None:
            return dict.fromkeys(SCORES, math.nan)
        grades = {"instruction": self.instruction, "execution": self.execution}
        scores = {name: float(SCALE * grade) for name, grade in grades.items()}
        return scores | {"score": (scores["instruction"] + scores["execution"]) / 2}


class EventReport(BaseModel):
    """A run's numbers. categories: by EO and CI, then by SCORES; macro: means of the two, None unless both
    are known. unjudged: reasons by case."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["events"] = "events"
    prompt_version: int
    prompt_sha256: str
    cases_sha256: str
    judge: dict[str, Any]
    made: dict[str, Any]
    categories: dict[Category, dict[str, Any]]
    macro: dict[str, float | None]
    unjudged: dict[str, str]
    cases: tuple[CaseJudgement, ...]


# --- videos -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeWith:
    """yaw, pitch: degrees per latent of a held turn. identity: of the world, beyond its name."""

    seed: int
    yaw: float
    pitch: float
    identity: Identity


def make_videos(
    world: World,
    cases: EventSet,
    out: Path,
    made: MadeWith,
    tick: Tick,
    check: Callable[[Sequence[Case]], None] = lambda cases: None,
) -> int:
    """Play every case whose whole video is not there into `out`/videos; returns how many were made now.

    check: called with what is to be played, before the folder is pinned to this world. Raises
    EvaluationError.
    """
    note = {"world": world.name, "cases_sha256": cases.sha256, **asdict(made)}
    store, folder = Store(str(out)), out / VIDEOS
    check_pin(store, MADE, note)
    played = [case.case(made.yaw, made.pitch) for case in cases.cases]
    lacking = [case for case in played if not is_whole(folder / f"{case.name}.mp4", case.frames)]
    check(lacking)
    pin(store, MADE, note)
    folder.mkdir(exist_ok=True)
    for k, case in enumerate(lacking):
        tick(case.name, k, len(lacking))
        with video_writer(folder / f"{case.name}.mp4") as write:
            for frames in world.play(case, made.seed):
                for rgb in frames:
                    write(rgb)
    return len(lacking)


def take_videos(cases: EventSet, out: Path, folder: Path) -> None:
    """Note that the videos lie in a folder already, NAME.mp4 each. Raises EvaluationError where one lacks."""
    missing = [c.name for c in cases.cases if not (folder / f"{c.name}.mp4").is_file()]
    if missing:
        raise EvaluationError(f"{folder} lacks {len(missing)} videos, {missing[0]}.mp4 for one")
    pin(Store(str(out)), MADE, {"videos": str(folder.resolve()), "cases_sha256": cases.sha256})


# --- judging ----------------------------------------------------------------------------------------------


def judge_videos(
    cases: EventSet, videos: Path, out: Path, config: JudgeConfig, endpoints: EndpointConfig, tick: Tick
) -> EventReport:
    """Judge every video that has no accepted judgement yet, and write the report.

    videos: holds NAME.mp4 of every case. Judgements are published one by one. A case that stayed unjudged in
    an earlier run is asked again. Raises EvaluationError, EndpointError, NoEndpoint.
    """
    return asyncio.run(_judge_videos(cases, videos, out, config, endpoints, tick))


async def _judge_videos(
    cases: EventSet, videos: Path, out: Path, config: JudgeConfig, endpoints: EndpointConfig, tick: Tick
) -> EventReport:
    store = Store(str(out))
    async with Client(endpoints) as client:
        note = {
            "prompt_version": PROMPT_VERSION,
            "prompt_sha256": prompt_sha256(),
            "cases_sha256": cases.sha256,
            "model": client.model.name,
            "root": client.model.root,
            "config": config.model_dump(mode="json"),
        }
        check_pin(store, JUDGED, note)
        room, decoding = asyncio.Semaphore(endpoints.in_flight), asyncio.Semaphore(_FILMS)
        looking = asyncio.Lock()
        sees, done = False, 0

        async def one(case: EventCase) -> CaseJudgement:
            nonlocal done, sees
            async with room:
                async with decoding:
                    film = await asyncio.to_thread(_film, case, videos, config)
                key = digest(note, film.ask(steps(1)[0]).digest)
                held = _held(store, case.name)
                if held is None or held.key != key or held.unjudged:
                    async with looking:
                        if not sees:
                            await require_sight(client, config)
                            pin(store, JUDGED, note)
                            sees = True
                    held = _line(case, key, await judge(client, film, config))
                    store.write(_path(case.name), held.model_dump_json().encode())
            done += 1
            tick("judging", done, len(cases.cases))
            return held

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(case)) for case in cases.cases]
        except BaseExceptionGroup as errors:  # the first one ended the others
            raise errors.exceptions[0] from None
        lines = [task.result() for task in tasks]
    report = summarise(lines, cases.sha256, note, read_note(store, MADE))
    store.write(REPORT, report.model_dump_json(indent=1).encode() + b"\n")
    return report


def _film(case: EventCase, videos: Path, config: JudgeConfig) -> Film:
    """Raises EvaluationError where the video is missing, damaged, or not as long as its case."""
    video = videos / f"{case.name}.mp4"
    if not video.is_file():
        raise EvaluationError(f"{video} is missing: make the videos first")
    film = film_of(case.name, video, case.image, case.record.expected, case.spans, config.limits)
    asked = float(latents_time(Span(0, case.asked.latents))[1])
    shown = float(film.shown.plan.spans[-1][1])
    if abs(shown - asked) > LENGTH_S:
        raise EvaluationError(
            f"{video} lasts {shown:.2f} s and its case {asked:.2f} s: it is of another case"
        )
    return film


def _line(case: EventCase, key: str, verdict: Verdict) -> CaseJudgement:
    about: dict[str, Any] = {
        "name": case.name,
        "category": case.record.category,
        "start": case.record.image,
        "key": key,
    }
    if verdict.judgement is None:
        return CaseJudgement(**about, unjudged=verdict.reason, tries=verdict.tries)
    return CaseJudgement(**about, **asdict(verdict.judgement), tries=verdict.tries)


def _path(name: str) -> str:
    return f"judgements/{name}.json"


def _held(store: Store, name: str) -> CaseJudgement | None:
    """The line of an earlier run. Raises EvaluationError where it cannot be read."""
    if not store.exists(_path(name)):
        return None
    try:
        return CaseJudgement.model_validate_json(store.read(_path(name)))
    except ValidationError:
        raise EvaluationError(f"{store.url}/{_path(name)} is damaged: delete it, and run again") from None


# --- numbers ----------------------------------------------------------------------------------------------


def summarise(
    lines: Sequence[CaseJudgement], cases_sha256: str, judged: dict[str, Any], made: dict[str, Any]
) -> EventReport:
    """Means of the judged cases of each category with bootstrap intervals, how many they are, and what the
    means would be had every unjudged case got the least or the most (`least`, `most`)."""
    categories = {c: _category([line for line in lines if line.category is c]) for c in Category}
    macro: dict[str, float | None] = {}
    for score in SCORES:
        means = [categories[c][score]["mean"] for c in Category]
        macro[score] = None if None in means else sum(means) / len(means)
    return EventReport(
        prompt_version=judged["prompt_version"],
        prompt_sha256=judged["prompt_sha256"],
        cases_sha256=cases_sha256,
        judge=judged,
        made=made,
        categories=categories,
        macro=macro,
        unjudged={line.name: line.unjudged for line in lines if line.unjudged},
        cases=tuple(lines),
    )


def _category(lines: Sequence[CaseJudgement]) -> dict[str, Any]:
    judged = sum(not line.unjudged for line in lines)
    out: dict[str, Any] = {"cases": len(lines), "judged": judged, "unjudged": len(lines) - judged}
    for score in SCORES:
        values = [line.values[score] for line in lines]
        known = sum(v for v in values if math.isfinite(v))
        row: dict[str, float | int | None] = {**interval(values, [line.start for line in lines]).row()}
        row["least"] = known / len(lines) if lines else None
        row["most"] = (known + 4 * SCALE * (len(lines) - judged)) / len(lines) if lines else None
        out[score] = row
    return out


def page_of(report: EventReport, videos: Path) -> Page:
    """The report as a page shows it, with the videos of the cases that were graded worst and best."""
    lines = [line for line in report.cases if not line.unjudged]
    ranked = sorted(lines, key=lambda line: (line.values["score"], line.name))
    shots = [*ranked[:_SHOTS], *ranked[max(_SHOTS, len(ranked) - _SHOTS) :]]
    numbers, notes = [], []
    for category, row in report.categories.items():
        for score in SCORES:
            value = {k: math.nan if row[score][k] is None else row[score][k] for k in ("mean", "low", "high")}
            shown = Interval(**value, n=row[score]["n"], groups=row[score]["groups"])
            numbers.append(Number(str(category), score, shown, "higher"))
        if row["unjudged"]:
            least, most = row["score"]["least"], row["score"]["most"]
            notes.append(
                f"{category}: {row['unjudged']} of {row['cases']} cases are unjudged and in no mean; had they"
                f" been judged, the score would lie from {least:.1f} to {most:.1f}."
            )
    for score in SCORES:
        mean = report.macro[score]
        known = Interval(math.nan if mean is None else mean, math.nan, math.nan, len(lines), 0)
        numbers.append(Number("macro mean", score, known, "higher"))
    notes += [f"unjudged: {name}: {reason}" for name, reason in report.unjudged.items()]
    about = ("name", "category", "instruction_reason", "execution_reason", "unjudged")
    told = [line.model_dump(mode="json") for line in report.cases]
    return Page(
        what="events",
        world=str(report.made.get("world") or report.made.get("videos")),
        settings={**report.made, **report.judge},
        numbers=tuple(numbers),
        films=tuple(
            Shot(
                f"{line.name} ({line.values['score']:g}): {line.instruction_reason}",
                videos / f"{line.name}.mp4",
            )
            for line in shots
        ),
        cases=tuple(
            {k: row[k] for k in about} | line.values for row, line in zip(told, report.cases, strict=True)
        ),
        notes=tuple(notes),
    )


def read_report(path: Path) -> EventReport:
    """Raises EvaluationError where it is none."""
    try:
        return EventReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise EvaluationError(f"{path} is no report of `wp2 eval events` that can be read") from None


def compare(here: EventReport, there: EventReport) -> dict[Category, dict[str, Interval]]:
    """here - there of the cases that both judged, by category and score.

    Raises EvaluationError unless set, prompt, judge and its settings are the same.
    """
    if differs := difference(here.judge, there.judge):
        name, held, other = differs
        raise EvaluationError(f"the reports cannot be compared: {name} is {held} here and {other} there")
    others = {line.name: line for line in there.cases}
    out: dict[Category, dict[str, Interval]] = {}
    for category in Category:
        lines = [line for line in here.cases if line.category is category]
        starts = [line.start for line in lines]
        out[category] = {
            score: paired(
                [m.values[score] for m in lines], [others[m.name].values[score] for m in lines], starts
            )
            for score in SCORES
        }
    return out

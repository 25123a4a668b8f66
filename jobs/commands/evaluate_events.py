"""`wp2 eval event-cases`, `events` and `wbench`: does a world do what it is asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.commands.base import ConfigOpt, CorpusArg, err, open_for, out
from jobs.commands.evaluate import (
    CodecOpt,
    DeviceOpt,
    GuidanceOpt,
    PitchOpt,
    SeedOpt,
    SizeOpt,
    StepsOpt,
    TextOpt,
    WeightsArg,
    YawOpt,
    evaluate,
    ticks,
)
from schemas.errors import UserError

if TYPE_CHECKING:
    from jobs.model import Opening

RunOpt = Annotated[Path, typer.Option("--out", help="folder of the run; the same one goes on")]


@evaluate.command("event-cases")
def event_cases(
    corpus: CorpusArg,
    folder: Annotated[Path, typer.Option("--out", help="folder for cases.json and start pictures")],
    split: Annotated[str, typer.Option(help="of a corpus: val is held out from training")] = "val",
    most: Annotated[int, typer.Option(min=1, help="cases at most; 145 as in the published set")] = 145,
    config: ConfigOpt = None,
) -> None:
    """Make a test set for `wp2 eval events` from the event clips of a corpus."""
    from jobs.evaluate.event_cases import make_cases

    made = make_cases(open_for(corpus, config), folder, split, most)
    counts = ", ".join(f"{count} {category}" for category, count in made.counts.items())
    out.print(f"{made.path}: {counts}", markup=False, soft_wrap=True)
    for reason, count in sorted(made.skipped.items()):
        out.print(f"left out: {count} {reason}", markup=False)


@evaluate.command()
def events(
    cases: Annotated[Path, typer.Option(metavar="FILE", help="JSON or YAML test set; see event-cases")],
    folder: RunOpt,
    weights: Annotated[
        Path | None, typer.Argument(help="folder with both experts; see `wp2 weights inspect`")
    ] = None,
    codec: CodecOpt = "",
    text: TextOpt = "minilm",
    videos: Annotated[
        Path | None, typer.Option(help="judge the videos NAME.mp4 of this folder, in place of WEIGHTS")
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="an OpenAI-protocol server; may be repeated")
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="only record faults in what the judge's reasons say")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="REPORT", help="events.json of another run, to compare with")
    ] = None,
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    device: DeviceOpt = "cpu",
) -> None:
    """Play a test set of events through a world model, and let a vision-language model grade the videos."""
    from jobs.evaluate.event_cases import read_cases
    from jobs.evaluate.events import (
        REPORT,
        SCORES,
        VIDEOS,
        MadeWith,
        compare,
        judge_videos,
        make_videos,
        page_of,
        read_report,
        take_videos,
    )
    from jobs.evaluate.judge import JudgeConfig
    from jobs.evaluate.late import LateWorld
    from jobs.evaluate.page import write
    from jobs.model import Opening, OpenModel
    from pipeline.caption.client import EndpointConfig
    from pipeline.caption.ladder import ContentChecks

    if (weights is None) == (videos is None):
        raise UserError("give WEIGHTS to make videos, or --videos FOLDER to judge those that are there")
    if videos is not None and (codec or size or any(v is not None for v in (steps, guidance, pitch))):
        raise UserError("--videos: what is there is judged; leave --codec, --size, --steps and the like out")
    other = read_report(against) if against else None
    found = read_cases(cases)
    folder.mkdir(parents=True, exist_ok=True)
    with ticks() as tick:
        if weights is not None:
            opening = Opening(codec, text, size, steps, guidance, device)
            model = OpenModel.of(weights, opening)
            for case in found.cases:
                model.check_horizon(case.asked.latents, f"{cases}: {case.name}, action")
            tilt = model.pitch if pitch is None else pitch
            how = MadeWith(seed, yaw, tilt, _identity(weights, opening))
            world = LateWorld(weights, model, tick)
            made = make_videos(world, found, folder, how, tick, world.check)
            err.print(f"{made} videos made, {len(found.cases) - made} were there")
        elif videos is not None:
            take_videos(found, folder, videos)
        place = videos or folder / VIDEOS
        if not endpoint:
            out.print(f"{place}: no judge was given; the same command with --endpoint URL goes on from here")
            return
        config = JudgeConfig(content_checks=ContentChecks.ADVISE if advise else ContentChecks.ENFORCE)
        report = judge_videos(found, place, folder, config, EndpointConfig(endpoints=tuple(endpoint)), tick)
    for category, row in report.categories.items():
        shown = "  ".join(f"{score} {_number(row[score]['mean'])}" for score in SCORES)
        out.print(f"{category}: {shown}  ({row['judged']} of {row['cases']} judged)", markup=False)
    macro = "  ".join(f"{score} {_number(report.macro[score])}" for score in SCORES)
    out.print(f"macro mean: {macro}", markup=False)
    if other is not None:
        for category, differences in compare(report, other).items():
            for score, by in differences.items():
                line = f"{category} {score}: {by.mean:+.1f} ({by.low:+.1f} to {by.high:+.1f}) of {by.n} cases"
                out.print(line, markup=False)
    out.print(f"{write(page_of(report, place), folder)}  {folder / REPORT}", markup=False, soft_wrap=True)
    for name, reason in report.unjudged.items():
        err.print(f"wp2: {name} is not judged: {reason}", markup=False, soft_wrap=True)
    if report.unjudged:
        raise typer.Exit(1)


@evaluate.command()
def wbench(
    weights: WeightsArg,
    data: Annotated[Path, typer.Option(metavar="DATA", help="WBench's data folder: cases/ and pictures")],
    codec: CodecOpt,
    folder: Annotated[Path, typer.Option("--out", help="work_dirs/MODEL of WBench; the same one goes on")],
    text: TextOpt = "minilm",
    part: Annotated[
        str, typer.Option(metavar="K/N", help="every N-th case from the K-th on, K from 0")
    ] = "0/1",
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    device: DeviceOpt = "cpu",
) -> None:
    """Play WBench's navigation cases, and write the videos where its own scorer looks for them."""
    from jobs.evaluate.late import LateWorld
    from jobs.evaluate.wbench import NAVIGATION_CASES, PlayWith, play, read_wbench
    from jobs.model import Opening, OpenModel

    found = read_wbench(data)
    out.print(f"{len(found.cases)} navigation cases of {found.of} (published: {NAVIGATION_CASES} of 289)")
    k, _, n = part.partition("/")
    if not (k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise UserError(f"--part {part!r}: give K/N with K from 0 to N-1, as 0/8")
    folder.mkdir(parents=True, exist_ok=True)
    with ticks() as tick:
        opening = Opening(codec, text, size, steps, guidance, device)
        model = OpenModel.of(weights, opening)
        for case in found.cases:
            model.check_horizon(case.latents, f"{data}: case {case.name}")
        tilt = model.pitch if pitch is None else pitch
        how = PlayWith(seed, yaw, tilt, _identity(weights, opening), (int(k), int(n)))
        world = LateWorld(weights, model, tick)
        done = play(world, found.cases, folder, how, tick, world.check)
    out.print(f"{done.folder}: {done.made} videos made, {done.kept} were there", markup=False, soft_wrap=True)


def _identity(weights: Path, opening: Opening) -> dict[str, str | int | float]:
    """What else a video depends on; what was not given is left out."""
    from jobs.evaluate.pins import fingerprint

    told = {name: value for name, value in asdict(opening).items() if value not in (None, "")}
    return {"weights": fingerprint(weights), "noise": "of the case", **told}


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1f}"

"""`wp2 eval`: measures of a world model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress

from jobs.commands.base import app, err, out
from jobs.commands.weights import MODEL

if TYPE_CHECKING:
    from jobs.evaluate.report import Report
    from jobs.evaluate.starts import Start, StartOptions
    from jobs.evaluate.world import ModelWorld
    from jobs.model import Opening, OpenModel, Tick

evaluate = typer.Typer(
    no_args_is_help=True,
    help="Measures of a world model: is it the same room, did it do what was asked, does it hold.",
)
app.add_typer(evaluate, name="eval", rich_help_panel=MODEL)

WeightsArg = Annotated[Path, typer.Argument(help="folder with both experts; see `wp2 weights inspect`")]
OutOpt = Annotated[Path, typer.Option("--out", help="folder for index.html, numbers.json and videos")]
StartsOpt = Annotated[
    str, typer.Option(help="a corpus (its held-out clips' first frames), or a folder of pictures")
]
CodecOpt = Annotated[str, typer.Option(help="wan:PATH, or linear:statistics/codec-v*.json")]
TextOpt = Annotated[str, typer.Option(help="umt5:PATH, or minilm")]
SizeOpt = Annotated[str, typer.Option(help="HEIGHTxWIDTH; what the weights are made for if not given")]
SeedOpt = Annotated[int, typer.Option(help="same seed, same actions and videos")]
StepsOpt = Annotated[int | None, typer.Option(min=1, help="of the sampler; 40 if not given")]
GuidanceOpt = Annotated[float | None, typer.Option(help="3.5 if not given; 1 takes half the time")]
YawOpt = Annotated[float, typer.Option(min=0.1, help="degrees per latent of a held turn")]
PitchOpt = Annotated[
    float | None, typer.Option(min=0.1, help="degrees per latent of a held look; 3, with 4-step weights 1")
]
DeviceOpt = Annotated[str, typer.Option(help="cpu or cuda; on cuda in bfloat16")]
SplitOpt = Annotated[str, typer.Option(help="of a corpus: val is held out from training")]
PromptOpt = Annotated[str, typer.Option(help="of pictures; NAME.txt beside NAME.png goes first")]
ViewOpt = Annotated[Literal["fps", "tps"], typer.Option(help="of pictures: first or third person")]
FilmsOpt = Annotated[int, typer.Option(min=0, help="videos that are put into the page")]


@evaluate.command()
def revisit(
    weights: WeightsArg,
    codec: CodecOpt,
    starts: StartsOpt,
    folder: OutOpt,
    text: TextOpt = "minilm",
    trajectories: Annotated[
        int, typer.Option(min=1, help="a quarter of 10 s out, the rest of 30 s: 50 and 150 of 200")
    ] = 200,
    loops: Annotated[
        str, typer.Option(help="a corpus with recorded loops whose poses the game gave: the ceiling")
    ] = "",
    most_loops: Annotated[int, typer.Option(min=1, help="recorded loops at most")] = 20,
    lpips: Annotated[
        Path | None, typer.Option(help="state dict of torchvision's alexnet or vgg16; adds LPIPS")
    ] = None,
    lpips_heads: Annotated[
        Path | None, typer.Option(help="linear heads of LPIPS 0.1; those of torchmetrics if not given")
    ] = None,
    met3r: Annotated[
        Path | None, typer.Option(help="Python of an environment that has met3r and its weights; adds MEt3R")
    ] = None,
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    split: SplitOpt = "val",
    prompt: PromptOpt = "",
    perspective: ViewOpt = "fps",
    films: FilmsOpt = 4,
    device: DeviceOpt = "cpu",
) -> None:
    """Random actions out and their exact reverse: is it the same room when I come back."""
    from jobs.evaluate import revisit as bench
    from jobs.evaluate.loops import recorded_loops
    from jobs.evaluate.measures import Lpips, Measure, Met3r, plain
    from jobs.model import Opening

    measures: list[Measure] = list(plain(device))
    if lpips is not None:
        measures.append(Lpips(lpips, lpips_heads, device))
    opening = Opening(codec, text, size, steps, guidance, device)
    options = _start_options(split, prompt, perspective)
    with _ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        look = run.model.pitch if pitch is None else pitch
        protocol = bench.Protocol.of(trajectories, yaw, look, seed, films)
        run.model.check_horizon(protocol.latents, "--trajectories")
        recorded = recorded_loops(loops, run.model.preset.geometry, most_loops) if loops else ()
        with ExitStack() as held:
            if met3r is not None:
                measures.append(held.enter_context(closing(Met3r(met3r, device))))
            world = run.load(tick)
            found = bench.run(world, run.starts, protocol, measures, recorded, folder, tick, run.told)
    _finish(found, folder)


@evaluate.command()
def control(
    weights: WeightsArg,
    codec: CodecOpt,
    starts: StartsOpt,
    folder: OutOpt,
    text: TextOpt = "minilm",
    trajectories: Annotated[int, typer.Option(min=1, help="of random actions, and as many pairs")] = 50,
    latents: Annotated[int, typer.Option(min=4, help="of a trajectory; whole chunks of 4")] = 32,
    focal: Annotated[
        float | None,
        typer.Option(min=0.1, help="fx as a share of the width; measured from the held turns if not given"),
    ] = None,
    look: Annotated[
        Literal["tilt", "shear"], typer.Option(help="what looking up does, with --focal; see docs/vo.md")
    ] = "tilt",
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    split: SplitOpt = "val",
    prompt: PromptOpt = "",
    perspective: ViewOpt = "fps",
    films: FilmsOpt = 4,
    device: DeviceOpt = "cpu",
) -> None:
    """Action following: the camera of what was generated, and left against right from the same start."""
    from jobs.evaluate import control as bench
    from jobs.model import Opening
    from pipeline.pose.vo_fit import Look

    _whole_chunks(latents)
    opening = Opening(codec, text, size, steps, guidance, device)
    options = _start_options(split, prompt, perspective)
    with _ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        tilt = run.model.pitch if pitch is None else pitch
        protocol = bench.Protocol(
            trajectories,
            trajectories,
            latents,
            yaw=yaw,
            pitch=tilt,
            focal=focal,
            look=Look(look),
            seed=seed,
            films=films,
        )
        run.model.check_horizon(latents, "--latents")
        found = bench.run(run.load(tick), run.starts, protocol, folder, tick, run.told)
    _finish(found, folder)


@evaluate.command()
def drift(
    weights: WeightsArg,
    codec: CodecOpt,
    starts: StartsOpt,
    folder: OutOpt,
    text: TextOpt = "minilm",
    trajectories: Annotated[int, typer.Option(min=1, help="long rollouts of random actions")] = 8,
    latents: Annotated[int, typer.Option(min=4, help="of each; whole chunks of 4; 320 are 80 s")] = 320,
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    split: SplitOpt = "val",
    prompt: PromptOpt = "",
    perspective: ViewOpt = "fps",
    films: FilmsOpt = 2,
    device: DeviceOpt = "cpu",
) -> None:
    """Does it hold: sharpness, colours, motion and the character over long rollouts."""
    from jobs.evaluate import drift as bench
    from jobs.model import Opening

    _whole_chunks(latents)
    opening = Opening(codec, text, size, steps, guidance, device)
    options = _start_options(split, prompt, perspective)
    with _ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        tilt = run.model.pitch if pitch is None else pitch
        run.model.check_horizon(latents, "--latents")
        protocol = bench.Protocol(trajectories, latents, yaw, tilt, seed, films)
        found = bench.run(run.load(tick), run.starts, protocol, folder, tick, run.told)
    _finish(found, folder)


# --- what they share --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What was looked at before weights are loaded. told: for the report."""

    weights: Path
    model: OpenModel
    starts: tuple[Start, ...]
    told: dict[str, Any]

    def load(self, tick: Tick) -> ModelWorld:
        from jobs.evaluate.world import ModelWorld

        return ModelWorld.loaded(self.weights, self.model, tick)


def _start_options(split: str, prompt: str, perspective: str) -> StartOptions:
    from jobs.evaluate.starts import StartOptions
    from schemas.clip import Perspective

    return StartOptions(split, prompt, Perspective(perspective))


def _begin(
    weights: Path, opening: Opening, place: str, count: int, options: StartOptions, tick: Tick
) -> _Run:
    """Opens everything but the weights, and reads `count` starts at most, of the model's size."""
    from jobs.evaluate.starts import read_starts
    from jobs.model import OpenModel

    tick("reading starts", 0, 1)
    model = OpenModel.of(weights, opening)
    starts = read_starts(place, count, model.preset.geometry, options)
    told = {"weights": str(weights), **asdict(opening), "starts_from": place, "split": options.split}
    tick("loading codec and text encoder", 0, 1)
    told |= {"codec_identity": model.codec.identity, "text_identity": model.encoder.identity}
    return _Run(weights, model, starts, told)


def _whole_chunks(latents: int) -> None:
    from jobs.evaluate.world import EvaluationError
    from schemas.timeline import LATENTS_PER_CHUNK

    if latents % LATENTS_PER_CHUNK:
        raise EvaluationError(f"--latents {latents}: give a multiple of {LATENTS_PER_CHUNK}")


@contextmanager
def _ticks() -> Iterator[Tick]:
    with Progress(*Progress.get_default_columns(), console=err, transient=True) as bar:
        task = bar.add_task("reading")

        def tick(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield tick


def _finish(found: Report, folder: Path) -> None:
    from jobs.evaluate.page import write

    for n in found.numbers:
        value = n.value
        between = f" [{value.low:.4g}, {value.high:.4g}]" if value.groups > 1 else ""
        chance = f", chance {n.chance:.4g}" if n.chance is not None else ""
        out.print(
            f"{n.part}: {n.measure} {value.mean:.4g}{between} of {value.n}{chance}",
            markup=False,
            soft_wrap=True,
        )
    out.print(f"{write(found, folder)}", markup=False, soft_wrap=True)

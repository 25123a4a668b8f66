"""`wp2 eval`: measures of a world model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress

from jobs.commands.base import app, err, out
from jobs.commands.weights import MODEL
from schemas.errors import UserError

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
MOST_CASES = 100_000


def finite(value: float | None) -> float | None:
    """nan is inside every range."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


WeightsArg = Annotated[Path, typer.Argument(help="folder with both experts; see `wp2 weights inspect`")]
OutOpt = Annotated[Path, typer.Option("--out", help="folder for index.html, numbers.json and videos")]
StartsOpt = Annotated[
    str, typer.Option(help="a corpus (its held-out clips' first frames), or a folder of pictures")
]
CodecOpt = Annotated[str, typer.Option(help="wan:PATH, or linear:statistics/codec-v*.json")]
TextOpt = Annotated[str, typer.Option(help="umt5:PATH, or minilm")]
SizeOpt = Annotated[str, typer.Option(help="HEIGHTxWIDTH; what the weights are made for if not given")]
SeedOpt = Annotated[int, typer.Option(help="same seed, same actions and videos")]
StepsOpt = Annotated[int | None, typer.Option(min=1, max=1000, help="of the sampler; 40 if not given")]
GuidanceOpt = Annotated[
    float | None,
    typer.Option(min=0, max=100, callback=finite, help="3.5 if not given; 1 takes half the time"),
]
YawOpt = Annotated[
    float, typer.Option(min=0.1, max=90, callback=finite, help="degrees per latent of a held turn")
]
PitchOpt = Annotated[
    float | None,
    typer.Option(
        min=0.1, max=90, callback=finite, help="degrees per latent of a held look; 3, with 4-step weights 1"
    ),
]
DeviceOpt = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; on cuda in bfloat16")]
SplitOpt = Annotated[
    str | None, typer.Option(help="of a corpus: val, which is held out from training, if not given")
]
PromptOpt = Annotated[
    str, typer.Option(help="of starts without one: pictures without NAME.txt, clips without a caption")
]
ViewOpt = Annotated[
    Literal["fps", "tps"] | None, typer.Option(help="of pictures: first or third person; fps if not given")
]
FilmsOpt = Annotated[int, typer.Option(min=0, max=1000, help="videos that are put into the page")]


@evaluate.command()
def revisit(
    weights: WeightsArg,
    codec: CodecOpt,
    starts: StartsOpt,
    folder: OutOpt,
    text: TextOpt = "minilm",
    trajectories: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_CASES, help="a quarter of 10 s out, the rest of 30 s: 50 and 150 of 200"
        ),
    ] = 200,
    loops: Annotated[
        str, typer.Option(help="a corpus with recorded loops whose poses the game gave: the ceiling")
    ] = "",
    most_loops: Annotated[
        int | None, typer.Option(min=1, help="recorded loops at most; 20 if not given")
    ] = None,
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
    split: SplitOpt = None,
    prompt: PromptOpt = "",
    perspective: ViewOpt = None,
    films: FilmsOpt = 4,
    device: DeviceOpt = "cpu",
) -> None:
    """Random actions out and their exact reverse: is it the same room when I come back."""
    from jobs.evaluate import revisit as bench
    from jobs.evaluate.loops import recorded_loops
    from jobs.evaluate.measures import Lpips, Measure, Met3r, check, plain
    from jobs.evaluate.pins import fingerprint
    from jobs.model import Opening

    _only_with("--lpips-heads", lpips_heads, "--lpips", lpips)
    _only_with("--most-loops", most_loops, "--loops", loops or None)
    opening = Opening(codec, text, size, steps, guidance, device)
    measures: list[Measure] = list(plain(device))
    if lpips is not None:
        measures.append(Lpips(lpips, lpips_heads, device))
    files = {
        name: path for name, path in (("lpips", lpips), ("lpips_heads", lpips_heads)) if path is not None
    }
    options = _start_options(split, prompt, perspective)
    with ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        look = run.model.pitch if pitch is None else pitch
        protocol = bench.Protocol.of(trajectories, yaw, look, seed, films)
        run.model.check_horizon(protocol.latents, "--trajectories")
        geometry = run.model.preset.geometry
        recorded = recorded_loops(loops, geometry, most_loops or 20, prompt) if loops else None
        bare = recorded.uncaptioned if recorded is not None else []
        if bare and not prompt:
            raise UserError(f"--loops {loops}: clip {bare[0]} has no caption: give --prompt")
        if not bare:
            run.check_prompt(prompt)
        if recorded is not None:
            run.model.check_horizon(recorded.latents, f"--loops {loops}")
        told = run.told | {"loops": loops, "recorded_loops": len(recorded or ()), "met3r": str(met3r or "")}
        told |= {f"{name}_file": str(path) for name, path in files.items()}
        told |= {f"{name}_sha256": fingerprint(path) for name, path in files.items()}
        with ExitStack() as held:
            if met3r is not None:
                measures.append(held.enter_context(closing(Met3r(met3r, device))))
            check(measures, geometry.height, geometry.width)
            world = run.load(tick)
            found = bench.run(world, run.starts, protocol, measures, recorded or (), folder, tick, told)
    _finish(found, folder)


@evaluate.command()
def control(
    weights: WeightsArg,
    codec: CodecOpt,
    starts: StartsOpt,
    folder: OutOpt,
    text: TextOpt = "minilm",
    trajectories: Annotated[
        int, typer.Option(min=1, max=MOST_CASES, help="of random actions, and as many pairs")
    ] = 50,
    latents: Annotated[int, typer.Option(min=4, help="of a trajectory; whole chunks of 4")] = 32,
    focal: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=10,
            callback=finite,
            help="fx as a share of the width; measured from the held turns if not given",
        ),
    ] = None,
    look: Annotated[
        Literal["tilt", "shear"] | None,
        typer.Option(help="what looking up does, with --focal; tilt if not given; see docs/vo.md"),
    ] = None,
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    split: SplitOpt = None,
    prompt: PromptOpt = "",
    perspective: ViewOpt = None,
    films: FilmsOpt = 4,
    device: DeviceOpt = "cpu",
) -> None:
    """Action following: the camera of what was generated, and left against right from the same start."""
    from jobs.evaluate import control as bench
    from jobs.model import Opening
    from pipeline.pose.vo_fit import Look

    _whole_chunks(latents)
    _only_with("--look", look, "--focal", focal)
    opening = Opening(codec, text, size, steps, guidance, device)
    options = _start_options(split, prompt, perspective)
    with ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        run.check_prompt(prompt)
        tilt = run.model.pitch if pitch is None else pitch
        protocol = bench.Protocol(
            trajectories,
            trajectories,
            latents,
            yaw=yaw,
            pitch=tilt,
            focal=focal,
            look=Look(look or "tilt"),
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
    trajectories: Annotated[
        int, typer.Option(min=1, max=MOST_CASES, help="long rollouts of random actions")
    ] = 8,
    latents: Annotated[int, typer.Option(min=8, help="of each; whole chunks of 4; 320 are 80 s")] = 320,
    size: SizeOpt = "",
    seed: SeedOpt = 0,
    steps: StepsOpt = None,
    guidance: GuidanceOpt = None,
    yaw: YawOpt = 3.0,
    pitch: PitchOpt = None,
    split: SplitOpt = None,
    prompt: PromptOpt = "",
    perspective: ViewOpt = None,
    films: FilmsOpt = 2,
    device: DeviceOpt = "cpu",
) -> None:
    """Does it hold: sharpness, colours, motion and the character over long rollouts."""
    from jobs.evaluate import drift as bench
    from jobs.model import Opening

    _whole_chunks(latents)
    opening = Opening(codec, text, size, steps, guidance, device)
    options = _start_options(split, prompt, perspective)
    with ticks() as tick:
        run = _begin(weights, opening, starts, trajectories, options, tick)
        run.check_prompt(prompt)
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

    def check_prompt(self, prompt: str) -> None:
        """Raises UserError where no start takes it."""
        if prompt and all(start.prompt != prompt for start in self.starts):
            raise UserError(f"--prompt: each of {len(self.starts)} starts has its own: leave it out")

    def load(self, tick: Tick) -> ModelWorld:
        from jobs.evaluate.world import ModelWorld

        return ModelWorld.loaded(self.weights, self.model, tick)


def _start_options(split: str | None, prompt: str, perspective: str | None) -> StartOptions:
    from jobs.evaluate.starts import StartOptions
    from schemas.clip import Perspective

    return StartOptions(split, prompt, Perspective(perspective) if perspective else None)


def _only_with(name: str, value: object, other: str, given: object) -> None:
    if value is not None and given is None:
        raise UserError(f"{name} does nothing without {other}: give both, or neither")


def _begin(
    weights: Path, opening: Opening, place: str, count: int, options: StartOptions, tick: Tick
) -> _Run:
    """Opens everything but the weights, and reads `count` starts at most, of the model's size."""
    from jobs.evaluate.pins import fingerprint
    from jobs.evaluate.starts import SPLIT, is_corpus, read_starts
    from jobs.model import OpenModel

    tick("reading starts", 0, 1)
    model = OpenModel.of(weights, opening)
    starts = read_starts(place, count, model.preset.geometry, options)
    told: dict[str, Any] = {"wp2": version("wp2"), "weights": str(weights)}
    told["weights_sha256"] = fingerprint(weights)
    told |= {**asdict(opening), "starts_from": place, "prompt": options.prompt}
    told["split"] = (options.split or SPLIT) if is_corpus(place) else None
    told |= {"prompts": {s.name: s.prompt for s in starts}}
    told |= {"perspectives": {s.name: str(s.perspective) for s in starts}}
    tick("loading codec and text encoder", 0, 1)
    told |= {"codec_identity": model.codec.identity, "text_identity": model.encoder.identity}
    return _Run(weights, model, starts, told)


def _whole_chunks(latents: int) -> None:
    from jobs.evaluate.world import EvaluationError
    from schemas.timeline import LATENTS_PER_CHUNK

    if latents % LATENTS_PER_CHUNK:
        raise EvaluationError(f"--latents {latents}: give a multiple of {LATENTS_PER_CHUNK}")


@contextmanager
def ticks() -> Iterator[Tick]:
    with Progress(*Progress.get_default_columns(), console=err, transient=True) as bar:
        task = bar.add_task("reading")

        def tick(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield tick


def _finish(found: Report, folder: Path) -> None:
    from jobs.evaluate.page import shown, write

    for n in found.numbers:
        value = n.value
        between = f" [{value.low:.4g}, {value.high:.4g}]" if value.groups > 1 else ""
        chance = f", chance {n.chance:.4g}" if n.chance is not None else ""
        out.print(
            f"{n.part}: {n.measure} {shown(value.mean)}{between} of {value.n}{chance}",
            markup=False,
            soft_wrap=True,
        )
    out.print(f"{write(found, folder)}", markup=False, soft_wrap=True)

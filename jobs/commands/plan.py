"""`wp2 plan`: what a run will cost before it starts: captions of a corpus, or a stage of training."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table
from typer.core import TyperGroup

from jobs.commands.base import SEE, ConfigOpt, CorpusArg, app, open_for, out
from schemas.errors import UserError

FALLBACK = "captions"
RESERVE_GB = 8.0
"""Of a GPU, kept for the CUDA context, buffers of NCCL and what the allocator cannot use."""


class _PlanGroup(TyperGroup):
    """`wp2 plan CORPUS` is `wp2 plan captions CORPUS`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in (*self.commands, "--help"):
            args = [FALLBACK, *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(cls=_PlanGroup, no_args_is_help=True)
app.add_typer(
    plan,
    name="plan",
    rich_help_panel=SEE,
    help="What a run will cost: `plan CORPUS` its captions, `plan train` a stage of training.",
)


@plan.command(FALLBACK)
def captions(
    corpus: CorpusArg,
    config: ConfigOpt = None,
    clips: Annotated[
        int | None, typer.Option(min=1, help="clips of the whole run; those of the corpus if not given")
    ] = None,
) -> None:
    """What captioning will cost, from the clips of this corpus that were captioned."""
    from jobs.config import load
    from pipeline.caption.accounts import estimate
    from pipeline.caption.attempts import read_attempts
    from pipeline.catalogue import Catalogue

    store, settings = open_for(corpus, config), load(config)
    many = clips or len(Catalogue.load(store))
    try:
        found = estimate(read_attempts(store), many, settings.serve.prices)
    except ValueError as error:
        raise UserError(f"{corpus}: {error}") from None
    table = Table(title=f"captions of {many} clips", title_justify="left", box=SIMPLE)
    for column in ("", "a clip", "in total", "+-"):
        table.add_column(column, justify="right" if column else "left")
    for name, forecast in found.items():
        numbers = (forecast.mean, forecast.total, forecast.spread)
        table.add_row(name.replace("_", " "), *(f"{n:,.4g}" for n in numbers))
    out.print(table)


@plan.command()
def train(
    stage: Annotated[str, typer.Option(help="as 3, 2a or 1-5; a number stands for all its phases")],
    preset: Annotated[str, typer.Option(help="tiny, small, wan1_3b or a14b")] = "a14b",
    gpus: Annotated[int, typer.Option(min=1, help="of a node")] = 8,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpu_mem: Annotated[float, typer.Option(min=1, help="GB of a GPU")] = 96.0,
    host_mem: Annotated[float, typer.Option(min=1, help="GB of a node")] = 1500.0,
    limit: Annotated[
        float | None,
        typer.Option(min=0.1, help="GB of a GPU to be used; --gpu-mem less 8 if not given"),
    ] = None,
    tflops: Annotated[float, typer.Option(min=0.001, help="dense bf16 TFLOP/s of a GPU")] = 148.0,
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="share of them that training reaches")] = 0.5,
    batch: Annotated[
        int | None, typer.Option(min=1, help="samples (stage 5: rollouts) a step; the stage's if not given")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="the stage's if not given")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="ranks a sample; all that fit if not given")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything, for machines")] = False,
) -> None:
    """Memory by part, FLOPs, time and days of training, and the recipes that fit, from the real network."""
    from jobs.commands.base import err
    from jobs.estimate.recipes import GB, Machine, judge
    from jobs.estimate.show import show, show_preset, values
    from jobs.estimate.work import stages_of, work_of
    from trainer import config as sizes

    usable = gpu_mem - RESERVE_GB if limit is None else limit
    if usable <= 0:
        raise UserError(
            f"--gpu-mem {gpu_mem:g} leaves nothing beside the {RESERVE_GB:g} GB kept back: give --limit"
        )
    machine = Machine(gpus, usable * GB, host_mem * GB, nodes, tflops * 1e12, mfu)
    found = []
    try:
        chosen = sizes.preset(preset)
        for each in stages_of(chosen, stage):
            given = replace(
                each, batch=batch or each.batch, steps=steps or each.steps, micro=1 if batch else each.micro
            )
            with err.status(f"stage {each.name}: running {preset} on the meta device"):
                verdict = judge(chosen, work_of(chosen, given), machine, sequence)
            found.append(verdict)
    except sizes.ConfigError as error:
        raise UserError(str(error)) from None
    if as_json:
        out.print_json(json.dumps([values(chosen, verdict) for verdict in found]))
    else:
        show_preset(chosen, out)
        for verdict in found:
            show(chosen, verdict, out)
    if any(verdict.best is None for verdict in found):
        raise typer.Exit(1)

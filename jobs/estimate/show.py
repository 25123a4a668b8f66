"""A verdict as tables for a terminal, and as values for JSON."""

from __future__ import annotations

from typing import Any

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from jobs.estimate.footprint import Parameters, parameters
from jobs.estimate.recipes import GB, READ, Estimate, Verdict
from trainer.config import Preset

STATE = ("masters", "gradients", "moments", "average")
SHOWN = 8
"""Recipes of each kind that a terminal shows; JSON has all."""


def duration(seconds: float) -> str:
    """Readable: 41 s, 9.1 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def show_preset(preset: Preset, out: Console) -> None:
    size = parameters(preset.model)
    parts = ", ".join(f"{name} {_count(n)}" for name, n in size.parts.items())
    out.print(
        f"{preset.name}: {_count(size.total)} parameters an expert ({parts}); "
        f"{' and '.join(preset.experts)}; {preset.geometry.height}x{preset.geometry.width}",
        soft_wrap=True,
    )


def show(preset: Preset, verdict: Verdict, out: Console) -> None:
    """One stage: what a step runs, the recipes, the best one by part, and its command."""
    work, machine = verdict.work, verdict.machine
    out.print(
        f"\nstage {work.stage.name} ({work.stage.objective}): batch {work.stage.batch}, "
        f"{work.stage.steps:,} steps{' of each expert' if work.rounds > 1 else ''}, "
        f"{work.tokens() * work.stage.batch:,.0f} tokens a step; {machine.world} GPUs of "
        f"{machine.flops / 1e12:g} TFLOP/s at {machine.mfu:.0%}",
        soft_wrap=True,
    )
    out.print(_work_table(preset, verdict))
    out.print(_recipe_table(verdict))
    best = verdict.best
    if best is None:
        nearest = _lack(verdict.others[0], verdict)
        out.print(f"stage {verdict.work.stage.name}: no recipe fits; the nearest needs {nearest} more (GB)")
        return
    out.print(_part_table(verdict, best))
    out.print(f"{_command(preset, verdict)}\n\n# train.yaml", markup=False, soft_wrap=True)
    settings = best.recipe.settings(preset, verdict.work, verdict.machine)
    out.print(yaml.safe_dump(settings, sort_keys=False).rstrip(), markup=False, soft_wrap=True)


def values(preset: Preset, verdict: Verdict) -> dict[str, Any]:
    """Everything, for JSON: bytes, FLOPs, seconds, days."""
    work, machine, best = verdict.work, verdict.machine, verdict.best
    size: Parameters = parameters(preset.model)
    return {
        "preset": preset.name,
        "parameters": {"expert": size.total, "block": size.block, "parts": dict(size.parts)},
        "stage": work.stage.name,
        "machine": vars(machine),
        "step": {
            "batch": work.stage.batch,
            "tokens": work.tokens() * work.stage.batch,
            "flops": {n: f * work.stage.batch for n, f in _flops(preset, verdict).items()},
        },
        "steps": work.stage.steps * work.rounds,
        "best": None if best is None else _row(verdict, best),
        "settings": None if best is None else best.recipe.settings(preset, work, machine),
        "command": None if best is None else _command(preset, verdict),
        "fit": [_row(verdict, e) for e in verdict.fitting],
        "do_not_fit": [_row(verdict, e) for e in verdict.others],
    }


def _row(verdict: Verdict, found: Estimate) -> dict[str, Any]:
    over_gpu, over_host = found.over(verdict.machine)
    return {
        "recipe": found.recipe.words(),
        "options": vars(found.recipe),
        "gpu": dict(found.gpu),
        "gpu_bytes": found.gpu_bytes,
        "host": dict(found.host),
        "weights being loaded": found.loading,
        "host_bytes": found.host_bytes,
        "gpu_over": over_gpu,
        "host_over": over_host,
        "step_s": found.step_s,
        "days": found.days,
    }


def _flops(preset: Preset, verdict: Verdict) -> dict[str, float]:
    """Of one sample, by what it is for, with the checkpointing of the best recipe."""
    best = verdict.best
    again = True if best is None else best.recipe.checkpointing
    found: dict[str, float] = {}
    for run in verdict.work.runs:
        found[run.what] = found.get(run.what, 0.0) + run.flops(preset.model, checkpointing=again)
    return found


def _work_table(preset: Preset, verdict: Verdict) -> Table:
    work, machine = verdict.work, verdict.machine
    rate = machine.world * machine.flops * machine.mfu
    sample = "rollout" if work.is_stable else "sample"
    table = Table(box=SIMPLE)
    for column in ("", f"PFLOP a {sample}", f"a {sample}", "a step"):
        table.add_column(column, justify="right" if column else "left")
    found = _flops(preset, verdict)
    for what, flops in [*found.items(), ("in all", sum(found.values()))]:
        seconds = flops / rate
        table.add_row(what, f"{flops / 1e15:.3g}", duration(seconds), duration(seconds * work.stage.batch))
    return table


def _recipe_table(verdict: Verdict) -> Table:
    machine, tried = verdict.machine, len(verdict.fitting) + len(verdict.others)
    title = (
        f"recipes under {machine.gpu_bytes / GB:g} GB a GPU and {machine.host_bytes / GB:g} GB a host: "
        f"{len(verdict.fitting)} of {tried} fit (GB)"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE)
    memory = ("state", "read", "gathered", "active", "caches", "rollouts", "GPU", "host")
    for column in ("", *memory, "step", "days", "over by"):
        table.add_column(column, justify="right" if column else "left")
    for found in [*verdict.fitting[:SHOWN], *verdict.others[:SHOWN]]:
        state = sum(found.gpu.get(part, 0.0) for part in STATE)
        rest = [found.gpu.get(part, 0.0) for part in (READ, "gathered", "activations", "caches", "rollouts")]
        numbers = [_gb(value) for value in (state, *rest, found.gpu_bytes)]
        fits = found.fits(machine)
        time = [duration(found.step_s), f"{found.days:,.1f}"]
        over = "" if fits else _lack(found, verdict)
        style = None if fits else "dim"
        table.add_row(
            found.recipe.words(), *numbers, f"{found.host_bytes / GB:,.0f}", *time, over, style=style
        )
    return table


def _part_table(verdict: Verdict, best: Estimate) -> Table:
    table = Table(title=f"best: {best.recipe.words()}", title_justify="left", box=SIMPLE)
    for column in ("GB", "a GPU", "a host"):
        table.add_column(column, justify="left" if column == "GB" else "right")
    for part in dict.fromkeys([*best.gpu, *best.host]):
        table.add_row(part, _gb(best.gpu.get(part, 0.0)), _gb(best.host.get(part, 0.0)))
    table.add_row("in training", _gb(best.gpu_bytes), _gb(sum(best.host.values())))
    table.add_row("before it: weights being loaded", "", _gb(best.loading))
    return table


def _lack(found: Estimate, verdict: Verdict) -> str:
    gpu, host = found.over(verdict.machine)
    parts = [f"{gpu / GB:.1f} a GPU"] if gpu else []
    return " and ".join(parts + ([f"{host / GB:.0f} a host"] if host else []))


def _command(preset: Preset, verdict: Verdict) -> str:
    machine = verdict.machine
    nodes = f"--nnodes {machine.nodes} --rdzv-backend c10d --rdzv-endpoint HOST " if machine.nodes > 1 else ""
    return (
        f"torchrun {nodes}--nproc-per-node {machine.gpus} -m jobs train CORPUS --out RUN "
        f"--preset {preset.name} --stages {verdict.work.stage.name} --config train.yaml"
    )


def _gb(value: float) -> str:
    return f"{value / GB:,.1f}" if value else ""


def _count(parameters: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters:.0f}"

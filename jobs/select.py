"""`wp2 select` and `wp2 calibrate-quality`: run selection over a corpus, and show what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jobs.stages import STAGES
from pipeline.clips.stage import Clips
from pipeline.corpus import open_corpus, sole_writer
from pipeline.quality.facts import Facts, read_facts
from pipeline.quality.select import Report, select
from pipeline.quality.thresholds import KIND, applied, measure
from pipeline.shards.inventory import ROOT
from pipeline.shards.stage import Shards
from pipeline.shards.write import write_root
from pipeline.statistics import freeze
from pipeline.store import Store
from schemas.policy import AXES, OUT, Applied, Policy

CLIP_STAGES = tuple(name for name in STAGES if name not in (Clips.name, Shards.name))
"""What a clip passes, in order: recordings are cut before it is one, and shards are of partitions."""

_TIER, _FLOOR = "#1f6f8b", "#d1495b"
_STYLES = ("-", "--", "-.", ":")


def run_select(corpus_url: str, policy: Policy, options: dict[str, Any], console: Console) -> Report:
    """Judge a corpus and write tiers. Raises CorpusError, StoreError, ScaleError."""
    corpus = open_corpus(corpus_url, options)
    with sole_writer(corpus):
        return select_with_progress(corpus, policy, console)


def select_with_progress(corpus: Store, policy: Policy, console: Console) -> Report:
    """As `run_select`, for who holds the corpus already."""
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as bar:
        task = bar.add_task("selecting", total=None)
        return select(
            corpus, policy, CLIP_STAGES, lambda done, of: bar.update(task, completed=done, total=of)
        )


def run_calibrate(
    corpus_url: str, policy: Policy, options: dict[str, Any], sample: int | None, picture: Path | None
) -> tuple[int, Applied]:
    """Freeze the distribution of a corpus's scores as the next version; tiers stay until `wp2 select`.

    sample: most clips of a game or source. picture: PNG of the distributions with the policy's thresholds.
    Raises CorpusError, StoreError, ScaleError.
    """
    corpus = open_corpus(corpus_url, options)
    with sole_writer(corpus):
        facts = read_facts(corpus, CLIP_STAGES)
        record = measure(facts, policy.min_clips, sample)
        version = freeze(corpus, KIND, record)
        if corpus.exists(ROOT):
            write_root(corpus)
    groups = sorted(set(facts.column("group")[facts.judged]))
    levels = applied(policy, record, version, groups)
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(facts, levels, picture)
    return version, levels


# --- in the terminal --------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """The funnel, the share that each game keeps, and the thresholds on which most hangs."""
    console.print(_funnel(report))
    if report.shares:
        console.print(_shares(report))
    moved = sorted(report.sensitivity, key=lambda m: -max(m.lower, m.higher))
    if moved and moved[0].lower + moved[0].higher > 0:
        table = _table("clips that change tier when a threshold moves", "tier", "axis", "-10 %", "+10 %")
        for m in moved[:5]:
            table.add_row(m.tier, m.axis, str(m.lower), str(m.higher))
        console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        words = column in ("step", "left behind", "game or source", "percentiles of", "tier", "axis")
        table.add_column(column, justify="left" if words else "right")
    return table


def _funnel(report: Report) -> Table:
    table = _table("", "step", "clips", "share", "left behind")
    table.add_row("recordings", str(report.recordings), "", "")
    table.add_row("clips", str(report.clips), "100 %", "")
    for step in report.steps:
        left = ", ".join(f"{n} {reason}" for reason, n in step.left.items())
        table.add_row(step.name, str(step.clips), _percent(step.clips, report.clips), left)
    for tier, n in report.tiers.items():
        table.add_row(f"  {tier}", str(n), _percent(n, report.clips), "")
    return table


def _shares(report: Report) -> Table:
    names = list(report.shares[0].tiers)
    title = (
        f"what each game keeps of the clips that it scored (thresholds version {report.thresholds_version})"
    )
    table = _table(title, "game or source", "clips", *(t for t in names if t != OUT), OUT, "percentiles of")
    for share in report.shares:
        n = sum(share.tiers.values())
        kept = [f"{share.tiers[t]} ({_percent(share.tiers[t], n)})" for t in names]
        table.add_row(share.group, str(n), *kept, share.of)
    return table


def _percent(n: int, of: int) -> str:
    return f"{n / of:.0%}".replace("%", " %") if of else ""


# --- as a picture -----------------------------------------------------------------------------------------


def draw(facts: Facts, levels: Applied, target: Path, most: int = 8) -> None:
    """The scores of each axis by game or source, the largest first, and where the thresholds lie."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    judged, group = facts.judged, facts.column("group")
    names, counts = np.unique(group[judged].astype(str), return_counts=True)
    names = names[np.argsort(-counts, kind="stable")][:most]
    figure, grid = plt.subplots(
        max(1, len(names)),
        len(AXES),
        figsize=(2.3 * len(AXES), 0.8 + 1.5 * max(1, len(names))),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    policy = levels.policy
    for row, name in zip(grid, names, strict=False):
        rows = judged & (group == name)
        for axis, panel, scores in zip(AXES, row, facts.scores[rows].T, strict=True):
            there = scores[~np.isnan(scores)]
            panel.hist(there, bins=np.linspace(0, 1, 41), color="0.75")
            panel.axvline(policy.floor[axis], color=_FLOOR, lw=1, label="floor")
            panel.axvline(policy.enough[axis], color="0.4", lw=0.8, ls=":", label="enough")
            for tier, level in levels.groups[name][axis].tiers.items():
                style = _STYLES[min(list(policy.tiers).index(tier), len(_STYLES) - 1)]
                panel.axvline(level.value, color=_TIER, lw=1.4, ls=style, label=tier)
            panel.set_yticks([])
        row[0].set_ylabel(f"{name[-24:]}\n{int(rows.sum())} clips", fontsize=7)
    for axis, panel in zip(AXES, grid[0], strict=True):
        panel.set_title(axis.replace("_", " "), fontsize=9)
    figure.legend(*grid[0][-1].get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=6)
    grid[0][0].set_xlim(0, 1)
    figure.savefig(target, dpi=110)
    plt.close(figure)

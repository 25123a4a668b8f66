"""A report as `numbers.json` and one HTML page that needs nothing else: figures and videos are inside it."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing

from jobs.evaluate.report import Figure, Film, Number, Report
from jobs.evaluate.stats import Interval

PAGE, NUMBERS = "index.html", "numbers.json"
MOST_FILM = 8_000_000
"""Bytes of a video that is put into the page; a larger one lies beside it."""
COLOURS = ("#1f6f8b", "#d1495b", "#5c8001", "#8f4fbf", "#b36a00", "#333333")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.interval { color: #777; }
figure { margin: 1.5rem 0; } figcaption { color: #555; }
video { width: 100%; max-width: 60rem; image-rendering: pixelated; background: #000; }
code { background: #f3f3f3; padding: 0 .2rem; } svg { max-width: 100%; height: auto; }
details { margin: 1rem 0; }
"""


def write(report: Report, folder: Path) -> Path:
    """Both files; the page is there when it is whole. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NUMBERS).write_text(json.dumps(report.json(), indent=1, allow_nan=False) + "\n")
    partial = folder / f".{PAGE}"
    partial.write_text(_page(report))
    partial.rename(folder / PAGE)
    return folder / PAGE


def _page(report: Report) -> str:
    title = f"{report.what}: {report.world}"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f"<p>{html.escape(note)}</p>" for note in report.notes]
    parts.append(_table(report.numbers))
    parts += [_figure(f) for f in report.figures if any(line.x for line in f.lines)]
    parts += [_film(f) for f in report.films]
    parts.append(_settings(report))
    parts.append(_cases(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(numbers: tuple[Number, ...]) -> str:
    arrow = {"higher": "&uarr;", "lower": "&darr;", "": ""}
    rows = "".join(
        f"<tr><td>{html.escape(n.part)}</td><td>{html.escape(n.measure)} {arrow[n.better]}</td>"
        f"<td><b>{shown(n.value.mean)}</b></td><td class=interval>{_range(n.value)}</td>"
        f"<td>{'' if n.chance is None else shown(n.chance)}</td>"
        f"<td>{n.value.n}</td><td>{n.value.groups}</td></tr>"
        for n in numbers
    )
    return (
        "<table><tr><th>part</th><th>measure</th><th>mean</th><th>95 % interval</th><th>chance</th>"
        f"<th>cases</th><th>starts</th></tr>{rows}</table>"
    )


def _figure(figure: Figure) -> str:
    drawing = Drawing(figsize=(9, 3.6), layout="constrained")
    FigureCanvasSVG(drawing)
    axes = drawing.add_subplot()
    for line, colour in zip(figure.lines, COLOURS * len(figure.lines)):
        if not line.x:
            continue
        axes.plot(line.x, [y.mean for y in line.y], color=colour, label=line.name, marker=".", markersize=4)
        axes.fill_between(
            line.x, [y.low for y in line.y], [y.high for y in line.y], color=colour, alpha=0.15, linewidth=0
        )
    axes.set_xlabel(figure.across)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(figure.lines) > 1:
        axes.legend(frameon=False, fontsize=8)
    sink = io.StringIO()
    drawing.savefig(sink, format="svg", metadata={"Date": None})
    svg = sink.getvalue()
    return f"<figure><figcaption>{html.escape(figure.title)}</figcaption>{svg[svg.index('<svg') :]}</figure>"


def _film(film: Film) -> str:
    data = film.path.read_bytes()
    source = film.path.name
    if len(data) <= MOST_FILM:
        source = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return (
        f"<figure><figcaption>{html.escape(film.title)}</figcaption>"
        f'<video controls loop muted preload="metadata" src="{source}"></video></figure>'
    )


def _settings(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td><code>{html.escape(str(v))}</code></td></tr>"
        for k, v in report.settings.items()
    )
    return f"<details><summary>settings</summary><table>{rows}</table></details>"


def _cases(report: Report) -> str:
    if not report.cases:
        return ""
    names = list(dict.fromkeys(name for case in report.cases for name in case))
    head = "".join(f"<th>{html.escape(n)}</th>" for n in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(case.get(n, ''))}</td>" for n in names) + "</tr>"
        for case in report.cases
    )
    return (
        f"<details><summary>{len(report.cases)} cases</summary><table><tr>{head}</tr>{rows}</table></details>"
    )


def _cell(value: object) -> str:
    return shown(value) if isinstance(value, float) else html.escape(str(value))


def shown(value: float, form: str = ".4g") -> str:
    return f"{value:{form}}" if math.isfinite(value) else "not known"


def _range(value: Interval) -> str:
    if not math.isfinite(value.low):
        return "one start" if value.groups == 1 else ""
    return f"{value.low:.4g} to {value.high:.4g}"

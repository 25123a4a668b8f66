"""`wp2 show`: one clip as a picture: frames, trajectory from above, yaw rate against its log, its scores."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pipeline.frames import Picture, frame_pass
from pipeline.media import media, read_frames
from pipeline.pose.stage import read_poses, turns
from pipeline.pose.windows import read_windows
from pipeline.quality.stage import SCORES, SMOOTHNESS, read_quality
from pipeline.stage import Unit
from pipeline.tables import clip_status
from schemas.action import runs
from schemas.clip import FrameTable
from schemas.quality import Status

PICTURES = 12
NUMBERED = 24
"""Most windows whose scores are written out; of more, the colours are shown alone."""
_YAW, _INPUT = "#1f6f8b", "#d1495b"


class _Contact:
    """Keeps small copies of a few frames of a pass."""

    def __init__(self, wanted: npt.NDArray[np.int64], width: int = 320) -> None:
        self._wanted = set(wanted.tolist())
        self._width = width
        self.pictures: dict[int, npt.NDArray[np.uint8]] = {}

    def see(self, index: int, picture: Picture) -> None:
        if index in self._wanted:
            rgb = picture.rgb
            step = max(1, rgb.shape[1] // self._width)
            self.pictures[index] = rgb[::step, ::step].copy()


def draw(unit: Unit, target: Path) -> None:
    """Draw a clip to a PNG. A clip without frames gets its verdict in words."""
    quality = unit.receipts.get("quality")
    scored = quality is not None and quality.status is Status.OK
    figure = plt.figure(figsize=(15, 12 if scored else 9), layout="constrained")
    figure.suptitle(_title(unit), ha="left", x=0.01, fontsize=11, family="monospace")
    ingest = unit.receipts.get("ingest")
    if ingest is None or not ingest.has("frames.parquet"):
        figure.text(0.02, 0.8, "no frame of this clip was decoded", fontsize=14)
    else:
        table = read_frames(unit)
        sheet, below, *rest = figure.subfigures(2 + scored, 1, height_ratios=(9, 11, 7)[: 2 + scored])
        _contact_sheet(sheet, unit, table)
        left, right = below.subplots(1, 2, width_ratios=(1, 2))
        _trajectory(left, unit)
        _yaw(right, unit, table)
        if scored:
            _scores(rest[0].subplots(), unit, table)
    figure.savefig(target, dpi=100)
    plt.close(figure)


def _title(unit: Unit) -> str:
    clip, (status, reasons) = unit.clip, clip_status(unit.receipts)
    facts = unit.receipts["ingest"].facts if "ingest" in unit.receipts else {}
    size = (
        f"{facts['frames']} frames at {facts['fps']:.5g}/s, {facts['width']}x{facts['height']}, "
        f"{facts['duration_s']:.2f} s, working copy: {facts['working_copy']}"
        if "frames" in facts
        else "not decoded"
    )
    game = f"{clip.game or 'no game'}, {clip.perspective}, {clip.licence}"
    return f"{clip.clip_id}  {clip.source_path}\n{size}\n{game}\n{' | '.join((status, *reasons))}"


def _contact_sheet(figure: Any, unit: Unit, table: FrameTable) -> None:
    wanted = np.unique(np.linspace(0, len(table) - 1, PICTURES).round().astype(np.int64))
    contact = _Contact(wanted)
    with media(unit) as path:
        frame_pass(path, (contact,))
    axes = figure.subplots(2, PICTURES // 2)
    for axis in axes.flat:
        axis.axis("off")
    for axis, index in zip(axes.flat, wanted, strict=False):
        if index in contact.pictures:
            axis.imshow(contact.pictures[index])
        mark = "" if table.ok[index] else "  damaged"
        axis.set_title(f"{index}  {table.seconds[index]:.2f} s{mark}", fontsize=9)


def _trajectory(axis: Any, unit: Unit) -> None:
    axis.set_title("trajectory from above", fontsize=10)
    pose = unit.receipts.get("pose")
    if pose is None or pose.status is not Status.OK or not pose.facts["valid_share"]:
        axis.text(0.5, 0.5, "no poses", ha="center", va="center")
        axis.axis("off")
        return
    track = read_poses(unit)
    up = np.array(track.up if track.up is not None else (0.0, -1.0, 0.0))
    # Two axes of the ground plane, whatever the world's: the world axis least along gravity, and its normal.
    east = np.eye(3)[int(np.argmin(np.abs(up)))]
    east = east - (east @ up) * up
    east /= np.linalg.norm(east)
    north = np.cross(up, east)
    x, y = track.translation @ east, track.translation @ north
    where = axis.scatter(x, y, c=np.arange(len(x)), s=3, cmap="viridis")
    first, last = np.flatnonzero(track.valid)[[0, -1]]
    axis.plot(x[first], y[first], "o", color="black", label="start")
    axis.plot(x[last], y[last], "s", color=_INPUT, label="end")
    directions = any(w["segment"] < 0 for w in read_windows(unit)["windows"])
    unit_name = "m" if track.scale == "metre" else "each step counts 1" if directions else "unit unknown"
    axis.set(aspect="equal", xlabel=f"{unit_name}; poses: {track.estimator}")
    axis.legend(fontsize=8)
    axis.figure.colorbar(where, ax=axis, label="frame", shrink=0.7)


def _yaw(axis: Any, unit: Unit, table: FrameTable) -> None:
    axis.set_title("yaw rate, right positive, against the log", fontsize=10)
    axis.set(xlabel="s", ylabel="deg/s")
    seconds = table.seconds
    pose = unit.receipts.get("pose")
    if pose is not None and pose.status is Status.OK and pose.facts["valid_share"]:
        track = read_poses(unit)
        rate = turns(track)[:, 0] / np.diff(seconds, append=np.nan)
        axis.plot(seconds, rate, color=_YAW, lw=1, label=f"from poses: {track.estimator}")
        for start, stop in runs(~track.valid):
            axis.axvspan(seconds[start], seconds[min(stop, len(seconds) - 1)], color="0.88", lw=0)
        for seam in read_windows(unit)["seams"]:
            style = ":" if seam["verdict"] in ("joined", "directions", "scale_kept") else "-"
            axis.axvline(seconds[seam["cut"]], color="0.6", lw=0.8, ls=style)
        notes = f"{track.valid.mean():.1%} of the frames valid (grey: not); lines: seams"
        axis.text(0.99, 0.02, notes, transform=axis.transAxes, ha="right", fontsize=8, color="0.4")
    else:
        axis.text(0.5, 0.9, "no poses: yaw is unknown", transform=axis.transAxes, ha="center")
        axis.set_yticks([])
    actions = unit.receipts.get("actions")
    if actions is not None and actions.status is Status.OK:
        turning = _turn_inputs(unit)
        if turning:
            other = axis.twinx()
            other.set_ylabel("logged input, " + ", ".join(turning), color=_INPUT, fontsize=8)
            for name, values in turning.items():
                other.step(seconds, values, where="post", color=_INPUT, lw=0.8, alpha=0.7, label=name)
            low, high = other.get_ylim()
            other.set_ylim(-max(abs(low), abs(high)), max(abs(low), abs(high)))
            facts = actions.facts
            if facts["lag_measured"]:
                lag = f"lag {facts['lag_frames']} frames, score {facts['lag_score']:.3f}"
                axis.set_title(f"yaw rate against the log: {lag}", fontsize=10)
    low, high = axis.get_ylim()
    axis.set_ylim(-max(abs(low), abs(high)), max(abs(low), abs(high)))
    axis.axhline(0, color="0.8", lw=0.5)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, loc="upper left")


def _scores(axis: Any, unit: Unit, table: FrameTable) -> None:
    """Scores as a grid: a row an axis, a column a window; grey where a score is unknown."""
    rows, facts = read_quality(unit), unit.receipts["quality"].facts
    grid = np.array([rows[name].to_numpy(zero_copy_only=False) for name in SCORES], np.float64)
    colours = plt.get_cmap("RdYlGn").with_extremes(bad="0.85")
    shown = axis.imshow(grid, vmin=0, vmax=1, cmap=colours, aspect="auto", alpha=0.8)
    medians = [f"{facts[f'q_{name}']:.2f}" if f"q_{name}" in facts else "unknown" for name in SCORES]
    labels = [f"{name.replace('_', ' ')}  {m}" for name, m in zip(SCORES, medians, strict=True)]
    axis.set_yticks(range(len(SCORES)), labels)
    every = max(1, math.ceil(rows.num_rows / NUMBERED))
    starts = rows["start"].to_numpy()
    axis.set_xticks(
        range(0, rows.num_rows, every), [f"{table.seconds[k]:.1f} s" for k in starts[::every]], fontsize=8
    )
    overlays = ", ".join(f"{n} {facts[n]}" for n in ("hud_share", "text_share", "watermark") if n in facts)
    title = f"scores by window, and their median; aesthetics by {facts['aesthetics_by']}; {overlays}"
    axis.set_title(title.removesuffix("; "), fontsize=10)
    if rows.num_rows <= NUMBERED:
        for (row, window), value in np.ndenumerate(grid):
            by = rows["smoothness_by"][window].as_py() if SCORES[row] == SMOOTHNESS else ""
            text = "" if np.isnan(value) else f"{value:.2f}" + (f"\n{by}" if by and value < 0.9 else "")
            axis.text(window, row, text, ha="center", va="center", fontsize=8)
    axis.figure.colorbar(shown, ax=axis, shrink=0.8, pad=0.01)


def _turn_inputs(unit: Unit) -> dict[str, npt.NDArray[np.float64]]:
    """Logged columns that drive yaw, with their sign, as the actions stage stored them."""
    path = unit.receipts["actions"].output("inputs.parquet").path
    table = pq.read_table(io.BytesIO(unit.corpus.read(path)))
    out = {}
    for field in table.schema:
        about = field.metadata or {}
        if about.get(b"action") == b"yaw":
            values = table.column(field.name).to_numpy() * float(about[b"sign"])
            if np.nanmax(np.abs(values), initial=0.0) > 0:
                out[field.name.removeprefix("input.")] = values
    return out

"""The actions stage: inputs per frame and the 6-vector per latent, as files and facts.

Source: spec/worldplay2.md a.6; DESIGN 2; spec/faults.md W3, W5, W7.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from pipeline import lag
from pipeline.inputs import Inputs, read_inputs
from pipeline.latent_actions import latent_actions
from pipeline.latent_turns import agreement
from pipeline.media import read_frames
from pipeline.pose.stage import read_poses, turns
from pipeline.sources import SourceConfig
from pipeline.sources.gameplay import entry_of
from pipeline.sources.sidecar import SidecarError
from pipeline.stage import Fact, Result, Unit
from schemas import SCHEMA_VERSION, timeline
from schemas.action import PITCH, YAW, InputRate, LatentActions, RotationRates, Witness
from schemas.clip import Clip, FrameTable
from schemas.pose import PoseTrack
from schemas.quality import Reason, Verdict, because

ACTIONS = "actions.npz"
INPUTS = "inputs.parquet"


class ActionsConfig(BaseModel):
    """Settings of the actions stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rates: RotationRates = Field(
        default=RotationRates(), description="rates that you know; they go before calibrated ones"
    )


class Actions:
    """Stage: actions.npz (see `read_actions`), and inputs.parquet, one row a frame of the media file.

    source: where the key map is, as in `Pose`. calibrated: frozen record, by value.
    """

    name: ClassVar[str] = "actions"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("ingest", "pose")
    reads: ClassVar[tuple[str, ...]] = ("game", "perspective", "log")

    def __init__(self, config: ActionsConfig, source: SourceConfig, calibrated: RotationRates) -> None:
        self.config: ActionsConfig = config
        self._calibrated = calibrated
        self._source = source

    def frozen(self, clip: Clip) -> object:
        return self._calibrated.rates.get(clip.game, {})

    def _rates(self, game: str) -> dict[str, InputRate]:
        return self._calibrated.rates.get(game, {}) | self.config.rates.rates.get(game, {})

    def run(self, unit: Unit, scratch: Path) -> Result:
        table, track = read_frames(unit), read_poses(unit)
        grid = timeline.grid(table.pts, table.time_base)
        if not grid.latents:
            return Result(Verdict.rejected(because(Reason.TOO_SHORT, "no whole chunk on the 16 fps grid")))
        try:
            inputs = self._inputs(unit, table)
        except SidecarError as error:
            return Result(Verdict.failed(because(Reason.BAD_SIDECAR, str(error))))
        if inputs is not None and not inputs.alignment.known.any():
            detail = f"no row of the log meets a frame ({inputs.alignment.rows} rows, {len(table)} frames)"
            return Result(Verdict.rejected(because(Reason.LOG_MISMATCH, detail)))
        rates = self._rates(unit.clip.game)
        actions, turned = latent_actions(table, grid, track, inputs, unit.clip.perspective, rates)
        write_actions(scratch / ACTIONS, actions, grid)
        pq.write_table(_inputs_table(len(table), inputs), scratch / INPUTS, compression="zstd")
        facts: dict[str, Fact] = {
            "latents": grid.latents,
            "witness": str(actions.witness),
            "unknown_yaw_share": round(float(np.isnan(actions.rows[:, YAW]).mean()), 6),
            "grid_jitter_max_s": round(float(np.abs(grid.jitter_s).max()), 6),
            **agreement(turned[YAW], "yaw"),
            **agreement(turned[PITCH], "pitch"),
            **_lag_facts(inputs, track),
            **_log_facts(inputs, table),
        }
        files = {ACTIONS: scratch / ACTIONS, INPUTS: scratch / INPUTS}
        return Result(Verdict.ok(), files, facts)

    def _inputs(self, unit: Unit, table: FrameTable) -> Inputs | None:
        if unit.clip.log is None:
            return None
        entry = entry_of(unit, self._source)
        if entry.log is None:
            raise SidecarError(f"{unit.clip.source_path} has no log in its key map")
        return read_inputs(unit.source, unit.clip.log.path, entry.log, table)


# --- facts and files --------------------------------------------------------------------------------------


def _lag_facts(inputs: Inputs | None, track: PoseTrack) -> dict[str, Fact]:
    signal = inputs.turning() if inputs is not None else None
    found = lag.scan(signal, turns(track)[:, 0]) if signal is not None and track.valid.any() else None
    if found is None:
        return {"lag_measured": False, "lag_frames": 0, "lag_score": 0.0}
    return {"lag_measured": True, "lag_frames": found.frames, "lag_score": round(found.score, 4)}


def _log_facts(inputs: Inputs | None, table: FrameTable) -> dict[str, Fact]:
    """What became of the log's rows. repeats_while_moving: pictures equal to the one before while something
    was pressed: a wall or a menu, or a capture that lost frames where the player did not stop (W7)."""
    if inputs is None:
        return {
            "log_rows": 0,
            "log_gap_frames": 0,
            "log_extra_rows": 0,
            "drift_frames": 0.0,
            "repeats_while_moving": 0,
        }
    pressed = np.any([np.abs(v) > 0 for v in inputs.values.values()], axis=0)
    before = np.concatenate(([False], pressed[:-1]))
    return {
        "log_rows": inputs.alignment.rows,
        "log_gap_frames": int(np.count_nonzero(~inputs.alignment.known)),
        "log_extra_rows": inputs.alignment.extra_rows,
        "drift_frames": inputs.alignment.drift_frames,
        "repeats_while_moving": int(np.count_nonzero(table.repeat & before)),
    }


def _inputs_table(frames: int, inputs: Inputs | None) -> pa.Table:
    """A column "input.<log column>" for each mapped input; its metadata says what it drives."""
    columns = [pa.array(np.arange(frames, dtype=np.int64))]
    fields = [pa.field("frame", pa.int64())]
    if inputs is not None:
        for i in inputs.part.inputs:
            columns.append(pa.array(inputs.values[i.column].astype(np.float32)))
            about = {"action": str(i.action), "unit": str(i.unit), "sign": str(i.sign)}
            fields.append(pa.field(f"input.{i.column}", pa.float32(), metadata=about))
    schema = pa.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION)})
    return pa.table(columns, schema=schema)


def write_actions(path: Path, actions: LatentActions, grid: timeline.Grid) -> None:
    """rows float32 [T, 6], grid int32 [G], about: JSON with witness and reasons. Same input, same bytes."""
    held = {"schema_version": SCHEMA_VERSION, "witness": actions.witness, "reasons": actions.reasons}
    about = json.dumps(held, sort_keys=True)
    np.savez(path, rows=actions.rows, grid=grid.frames.astype(np.int32), about=np.array(about))


def read_actions(unit: Unit) -> tuple[LatentActions, npt.NDArray[np.int32]]:
    """(action rows, grid) of a clip, from the actions stage's output."""
    data = unit.corpus.read(unit.receipts["actions"].output(ACTIONS).path)
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        about = json.loads(str(stored["about"]))
        reasons = {axis: tuple((a, b, r) for a, b, r in found) for axis, found in about["reasons"].items()}
        return LatentActions(stored["rows"], reasons, Witness(about["witness"])), stored["grid"]

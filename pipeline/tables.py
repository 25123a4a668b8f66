"""The tables of a corpus (schemas/tables.py), streamed a clip or a partition at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.actions import read_actions
from pipeline.calibration import CAMERA, ROTATION
from pipeline.caption.leak import caption_row
from pipeline.caption.stage import read_unit_caption
from pipeline.catalogue import Catalogue, to_clips
from pipeline.clips.stage import Clips, read_segments
from pipeline.corpus import CorpusError
from pipeline.ledger import Ledger
from pipeline.media import read_frames
from pipeline.pose.stage import read_poses, read_reasons, turns
from pipeline.pose.windows import read_windows
from pipeline.quality.facts import QUALITY
from pipeline.quality.select import selection_path
from pipeline.quality.stage import SCHEMA, read_quality
from pipeline.recordings import clips_of, recordings_of
from pipeline.shards.inventory import index_path
from pipeline.stage import Receipt, Unit
from pipeline.statistics import newest, versions
from pipeline.store import Store
from schemas.action import AXES, RotationRates
from schemas.camera import Cameras
from schemas.clip import Clip
from schemas.policy import AXES as QUALITY_AXES
from schemas.quality import Status
from schemas.sample import FAMILIES, OPTIONAL
from schemas.tables import TABLES
from schemas.timeline import latent_ends

Row = dict[str, Any]
Columns = dict[str, Any]
LAST_STAGE = "caption"


def batches(corpus: Store, name: str, clip_id: str = "") -> Iterator[pa.RecordBatch]:
    """Record batches of a table, in catalogue order; with `clip_id`, of one clip only."""
    schema = TABLES[name]
    if name in _PER_CLIP:
        stage, make = _PER_CLIP[name]
        for unit in units(corpus, clip_id):
            if unit.receipts.get(stage) and unit.receipts[stage].status is Status.OK:
                yield pa.RecordBatch.from_pydict(make(unit), schema=schema)
        return
    if name in _PER_CORPUS:
        yield pa.RecordBatch.from_pylist(_PER_CORPUS[name](corpus), schema=schema)
        return
    if name == "segments":
        corpus = recordings_of(corpus)
    if name == "failures" and not clip_id:  # recordings that could not be cut are no clips yet
        recordings = recordings_of(corpus)
        for partition in (held := Catalogue.load(recordings)).parts:
            rows = _failures(recordings, partition, list(to_clips(held.read(partition))))
            yield pa.RecordBatch.from_pylist(rows, schema=schema)
    catalogue = Catalogue.load(corpus)
    for partition in catalogue.parts:
        rows = _PER_PARTITION[name](corpus, partition, list(to_clips(catalogue.read(partition))))
        chosen = [r for r in rows if not clip_id or r["clip_id"] == clip_id]
        yield pa.RecordBatch.from_pylist(chosen, schema=schema)


def units(corpus: Store, clip_id: str = "") -> Iterator[Unit]:
    """Every clip of a corpus with its receipts, or one of them."""
    ledger, catalogue = Ledger(corpus), Catalogue.load(corpus)
    for partition in catalogue.parts:
        table = catalogue.read(partition)
        if clip_id and clip_id not in set(table.column("clip_id").to_pylist()):
            continue
        receipts = ledger.load(partition)
        for clip, _ in to_clips(table):
            if not clip_id or clip.clip_id == clip_id:
                source = Store(clip.source.partition(":")[2])
                yield Unit(clip, partition, source, corpus, receipts.get(clip.clip_id, {}))


def find_clip(corpus: Store, text: str) -> str:
    """Clip id from an id, its first digits, or a file name. Raises CorpusError unless exactly one matches."""
    table = Catalogue.load(corpus).table(["clip_id", "source_path"])
    ids, paths = table.column("clip_id").to_pylist(), table.column("source_path").to_pylist()
    named = [i for i, p in zip(ids, paths, strict=True) if text in (p, p.rsplit("/", 1)[-1])]
    found = named or [i for i in ids if i.startswith(text)]
    if not found:
        named = [i for i, p in zip(ids, paths, strict=True) if text in p]
        found = named
    if len(found) != 1:
        what = "no clip matches" if not found else f"{len(found)} clips match"
        raise CorpusError(f"{what} {text!r} in {corpus.url}: see `wp2 table {corpus.url} clips`")
    return str(found[0])


def verdict_against(receipts: dict[str, Receipt] | Any) -> Receipt | None:
    """The receipt that speaks against a clip, if there is one."""
    return next((r for r in receipts.values() if r.status is not Status.OK), None)


def clip_status(receipts: Any) -> tuple[str, tuple[str, ...]]:
    """(ok, rejected, failed or pending; reasons) of a clip."""
    against = verdict_against(receipts)
    if against is not None:
        return str(against.status), against.reasons
    return ("ok" if LAST_STAGE in receipts else "pending"), ()


def _clips(corpus: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    ledger = Ledger(corpus).load(partition)
    return [_clip(partition, clip, split, ledger.get(clip.clip_id, {})) for clip, split in rows]


def _clip(partition: str, clip: Clip, split: str, receipts: dict[str, Receipt]) -> Row:
    status, reasons = clip_status(receipts)
    facts = receipts["ingest"].facts if "ingest" in receipts else {}
    latents = receipts["actions"].facts.get("latents") if "actions" in receipts else None
    return {
        "clip_id": clip.clip_id,
        "source_path": clip.source_path,
        "also_at": "|".join(clip.also_at),
        "source": clip.source,
        "start": clip.start,
        "stop": clip.stop,
        "kind": str(clip.kind),
        "game": clip.game,
        "perspective": str(clip.perspective),
        "split": split,
        "status": status,
        "reasons": "|".join(reasons),
        **{k: facts.get(k) for k in ("frames", "fps", "width", "height", "duration_s", "working_copy")},
        "latents": latents,
        "log_pose_correlation": _agreement(receipts),
        "why_copied": facts.get("why", ""),
        "loop": _loop(receipts),
        "bytes": clip.bytes,
        "licence": clip.licence,
        "partition": partition,
    }


def _agreement(receipts: dict[str, Receipt]) -> float | None:
    facts = receipts["actions"].facts if "actions" in receipts else {}
    return float(facts["yaw_log_pose_correlation"]) if facts.get("yaw_latents_compared") else None


def _loop(receipts: dict[str, Receipt]) -> str:
    facts = receipts["observe"].facts if "observe" in receipts else {}
    return f"{facts['loop_start']}-{facts['loop_end']}" if facts.get("loop_closed") else ""


def _failures(corpus: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    ledger = Ledger(corpus).load(partition)
    out = []
    for clip, _ in rows:
        against = verdict_against(ledger.get(clip.clip_id, {}))
        if against is not None:
            out.append(
                {
                    "clip_id": clip.clip_id,
                    "source_path": clip.source_path,
                    "stage": against.stage,
                    "status": str(against.status),
                    "reasons": "|".join(against.reasons),
                    "attempts": against.attempts,
                }
            )
    return out


def _segments(recordings: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    ledger = Ledger(recordings).load(partition)
    out = []
    for recording, _ in rows:
        receipt = ledger.get(recording.clip_id, {}).get(Clips.name)
        if receipt is None or receipt.status is not Status.OK:
            continue
        ids = {c.start: c.clip_id for c in clips_of(recording, receipt)}
        for s in read_segments(recordings, receipt):
            out.append(
                {
                    "recording": recording.clip_id,
                    "source_path": recording.source_path,
                    "start": s.start,
                    "stop": s.stop,
                    "clip_id": ids[s.start] if s.kind else "",
                    "kind": str(s.kind or ""),
                    "left_out": str(s.left_out or ""),
                }
            )
    return out


def _samples(corpus: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    if not corpus.exists(index_path(partition)):
        return []
    index = corpus.table(index_path(partition), "delete it and run `wp2 curate` again").to_pylist()
    return [
        {
            **{k: row[k] for k in ("sample_id", "clip_id", "split")},
            "family": family,
            **{k: row[family][k] for k in ("tar", "offset", "size")},
        }
        for row in index
        for family in FAMILIES
        if row[family] is not None
    ]


def _latents(corpus: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    ledger, out = Ledger(corpus).load(partition), []
    for clip, _ in rows:
        held = ledger.get(clip.clip_id, {})
        latents, text = (
            held[name].facts if name in held and held[name].status is Status.OK else {} for name in OPTIONAL
        )
        if latents or text:
            about = {k: latents.get(k) for k in ("height", "width", "latents", "segments")}
            about |= {k: text.get(k) for k in ("prompts", "tokens", "cut_prompts")}
            names = {"codec": latents.get("codec", ""), "encoder": text.get("encoder", "")}
            out.append({"clip_id": clip.clip_id, **names, **about})
    return out


def _selection(corpus: Store, partition: str, rows: list[tuple[Clip, str]]) -> list[Row]:
    path = selection_path(partition)
    if not corpus.exists(path):
        return []
    held = {r["clip_id"]: r for r in corpus.table(path, "delete it and run `wp2 select` again").to_pylist()}
    ledger = Ledger(corpus).load(partition)
    out = []
    for clip, split in rows:
        receipt = ledger.get(clip.clip_id, {}).get(QUALITY)
        facts = receipt.facts if receipt is not None else {}
        about = {"source_path": clip.source_path, "game": clip.game, "split": split}
        scores = {axis: facts.get(f"q_{axis}") for axis in QUALITY_AXES}
        out.append({**held[clip.clip_id], **about, **scores})
    return out


def _frames(unit: Unit) -> Columns:
    table = read_frames(unit)
    return {
        "clip_id": [unit.clip.clip_id] * len(table),
        "frame": np.arange(len(table)),
        "time_s": table.seconds,
        "source_index": table.source_index,
        "pixels": table.pixels,
        "ok": table.ok,
        "repeat": table.repeat,
    }


def _poses(unit: Unit) -> Columns:
    track, frames = read_poses(unit), read_frames(unit)
    step = np.diff(frames.seconds, append=np.nan)
    rates = turns(track) / step[:, None]
    position = [_nullable(track.translation[:, i]) for i in range(3)]
    return {
        "clip_id": [unit.clip.clip_id] * len(track),
        "frame": np.arange(len(track)),
        "valid": track.valid,
        "reason": read_reasons(unit),
        "x_right": position[0],
        "y_down": position[1],
        "z_forward": position[2],
        "yaw_rate_deg_s": _nullable(rates[:, 0]),
        "pitch_rate_deg_s": _nullable(rates[:, 1]),
        "scale": [str(track.scale)] * len(track),
        "estimator": [track.estimator] * len(track),
    }


def _joins(name: str) -> Callable[[Unit], Columns]:
    def columns(unit: Unit) -> Columns:
        rows = read_windows(unit)[name]
        made: Columns = {"clip_id": [unit.clip.clip_id] * len(rows)}
        for column in TABLES[name].names[1:]:
            values = [row[column] for row in rows]
            made[column] = ["|".join(v) for v in values] if column == "reasons" else values
        return made

    return columns


def _rotation(corpus: Store) -> list[Row]:
    held = versions(corpus, ROTATION)
    record = newest(corpus, ROTATION, RotationRates) or RotationRates()
    rows = []
    for game, inputs in sorted(record.rates.items()):
        for name, rate in sorted(inputs.items()):
            first = rate.ramp[0] if len(rate.ramp) > 1 else None
            rows.append(
                {
                    "game": game,
                    "input": name,
                    **rate.model_dump(include={"axis", "value", "n", "mad", "spread"}),
                    "unit": str(rate.unit or ""),
                    "onset": first and first.value,
                    "onset_n": first and first.n,
                    "onset_mad": first and first.mad,
                    "ramp_s": rate.ramp[-1].from_s if first else None,
                    "recordings": len(rate.recordings),
                    "status": str(rate.status),
                    "version": held[-1],
                }
            )
    return rows


def _cameras(corpus: Store) -> list[Row]:
    held = versions(corpus, CAMERA)
    record = newest(corpus, CAMERA, Cameras) or Cameras()
    return [
        {
            "game": game,
            "shape": shape,
            **camera.model_dump(exclude={"clips"}),
            "clips": len(camera.clips),
            "version": held[-1],
        }
        for game, shapes in sorted(record.games.items())
        for shape, camera in sorted(shapes.items())
    ]


def _actions(unit: Unit) -> Columns:
    actions, grid = read_actions(unit)
    count = len(actions.rows)
    unknown: list[list[str]] = [[] for _ in range(count)]
    for axis, runs in sorted(actions.reasons.items()):
        for start, stop, reason in runs:
            for k in range(start, stop):
                unknown[k].append(f"{axis}={reason}")
    return {
        "clip_id": [unit.clip.clip_id] * count,
        "latent": np.arange(count),
        "frame": latent_ends(grid.astype(np.int64)),
        **{axis: _nullable(actions.rows[:, i].astype(np.float64)) for i, axis in enumerate(AXES)},
        "unknown": ["|".join(u) for u in unknown],
        "witness": [str(actions.witness)] * count,
    }


def _quality(unit: Unit) -> Columns:
    table = read_quality(unit)
    return {"clip_id": [unit.clip.clip_id] * table.num_rows} | {
        n: table[n].combine_chunks() for n in SCHEMA.names
    }


def _captions(unit: Unit) -> Columns:
    row = {"clip_id": unit.clip.clip_id} | caption_row(read_unit_caption(unit), unit.clip.perspective)
    return {name: [value] for name, value in row.items()}


def _nullable(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


_PER_PARTITION: dict[str, Callable[[Store, str, list[tuple[Clip, str]]], list[Row]]] = {
    "clips": _clips,
    "failures": _failures,
    "latents": _latents,
    "samples": _samples,
    "selection": _selection,
    "segments": _segments,
}
_PER_CORPUS: dict[str, Callable[[Store], list[Row]]] = {"rotation": _rotation, "cameras": _cameras}
_PER_CLIP: dict[str, tuple[str, Callable[[Unit], Columns]]] = {
    "frames": ("ingest", _frames),
    "poses": ("pose", _poses),
    "windows": ("pose", _joins("windows")),
    "seams": ("pose", _joins("seams")),
    "actions": ("actions", _actions),
    "captions": ("caption", _captions),
    "quality": ("quality", _quality),
}

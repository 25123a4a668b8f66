"""The tables that `wp2 table` answers with: columns, types and meaning. docs/tables.md is made from here."""

from __future__ import annotations

import pyarrow as pa

from schemas import SCHEMA_VERSION
from schemas.action import AXES

_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_COLUMNS: dict[str, list[tuple[str, pa.DataType, str]]] = {
    "clips": [
        ("clip_id", _S, "16 hex digits of the sha256 of the file's bytes"),
        ("source_path", _S, "path relative to the source"),
        ("also_at", _S, "other paths with the same bytes, separated by |"),
        ("source", _S, "kind:url of the source"),
        ("game", _S, "entry of the key map that matched; empty when none did"),
        ("perspective", _S, "fps, tps or unknown"),
        ("split", _S, "train or val, by recording"),
        ("status", _S, "ok, rejected, failed, or pending while stages are open"),
        ("reasons", _S, "reasons against the clip, in order, separated by |"),
        ("frames", _I, "frames of the media file"),
        ("fps", _F, "rate of the media file"),
        ("width", _I, "of the media file, in pixels, upright"),
        ("height", _I, "of the media file, in pixels, upright"),
        ("duration_s", _F, "from the first frame to the end of the last"),
        ("latents", _I, "action rows (whole chunks of the 16 fps grid)"),
        ("working_copy", _S, "none: the source file is the media file; remux or encode: a copy was made"),
        ("why_copied", _S, "what made a working copy necessary"),
        ("bytes", _I, "size of the source file"),
        ("licence", _S, "as the source states it"),
        ("partition", _S, "partition, and with it generation, of the clip"),
    ],
    "frames": [
        ("clip_id", _S, "clip"),
        ("frame", _I, "k-th presented frame of the media file"),
        ("time_s", _F, "presentation time from the first frame"),
        ("source_index", _I, "frame of the source file that it shows"),
        ("pixels", pa.uint64(), "xxh3 of the decoded picture in its own pixel format"),
        ("ok", _B, "false where the decoder reported damage or concealed it"),
        ("repeat", _B, "bit-equal to the frame before"),
    ],
    "poses": [
        ("clip_id", _S, "clip"),
        ("frame", _I, "frame of the media file"),
        ("valid", _B, "is there a pose for this frame"),
        ("x_right", _F, "camera position, first axis of the world; the world is the estimator's"),
        ("y_down", _F, "camera position, second axis"),
        ("z_forward", _F, "camera position, third axis"),
        ("yaw_rate_deg_s", _F, "turn to the next frame, right positive; empty where unknown"),
        ("pitch_rate_deg_s", _F, "tilt to the next frame, up positive; empty where unknown"),
        ("scale", _S, "unit of the position: metre or unknown"),
        ("estimator", _S, "what made the pose"),
    ],
    "actions": [
        ("clip_id", _S, "clip"),
        ("latent", _I, "latent frame; row 0 is idle"),
        ("frame", _I, "media frame at the latent's end"),
        *((axis, _F, "see schemas/action.py; empty where unknown") for axis in AXES),
        ("unknown", _S, "axis=reason of each unknown value, separated by |"),
        ("witness", _S, "what pitch and yaw come from: poses, log or none"),
    ],
    "samples": [
        ("sample_id", _S, "sample; equal to the clip's id"),
        ("clip_id", _S, "clip"),
        ("split", _S, "train or val"),
        ("family", _S, "kind of tar: media, annotations"),
        ("tar", _S, "tar file, relative to the corpus"),
        ("offset", _I, "first byte of the sample's members in the tar, headers included"),
        ("size", _I, "bytes of the range that holds them all"),
    ],
    "failures": [
        ("clip_id", _S, "clip, or partition for a shard"),
        ("source_path", _S, "path relative to the source"),
        ("stage", _S, "stage that spoke against it"),
        ("status", _S, "rejected or failed"),
        ("reasons", _S, "in order, separated by |"),
        ("attempts", _I, "tries"),
    ],
}

TABLES: dict[str, pa.Schema] = {
    name: pa.schema(
        [pa.field(column, kind, metadata={"doc": doc}) for column, kind, doc in columns],
        metadata={"schema_version": str(SCHEMA_VERSION)},
    )
    for name, columns in _COLUMNS.items()
}


def describe() -> str:
    """docs/tables.md, as Markdown."""
    lines = ["# Tables", "", "`wp2 table CORPUS NAME [--csv]`. Made from `schemas/tables.py`.", ""]
    for name, schema in TABLES.items():
        lines += [f"## {name}", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| {f.name} | {f.type} | {(f.metadata or {})[b'doc'].decode()} |" for f in schema]
        lines.append("")
    return "\n".join(lines)

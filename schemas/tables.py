"""The tables that `wp2 table` answers with: columns, types and meaning. docs/tables.md is made from here."""

from __future__ import annotations

import pyarrow as pa

from schemas import SCHEMA_VERSION
from schemas.action import AXES
from schemas.policy import AXES as QUALITY
from schemas.quality import SMOOTHNESS_RAWS, VISUAL_RAWS

_COUNTS = ("stutters", "skips", "frozen_start", "frozen_stop", "cuts")
_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()

_COLUMNS: dict[str, list[tuple[str, pa.DataType, str]]] = {
    "clips": [
        ("clip_id", _S, "16 hex digits of the sha256 of the file's bytes, and of the frames of a part"),
        ("source_path", _S, "path relative to the source"),
        ("also_at", _S, "other paths with the same bytes, separated by |"),
        ("source", _S, "kind:url of the source"),
        ("start", _I, "first frame of the source file that is in the clip"),
        ("stop", _I, "last such frame + 1; 0 where the clip is the whole file"),
        ("kind", _S, "navigation or event"),
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
        (
            "log_pose_correlation",
            _F,
            "yaw of calibrated log and poses, by latent; empty unless both",
        ),
        ("working_copy", _S, "none: the source file is the media file; remux or encode: a copy was made"),
        ("why_copied", _S, "what made a working copy necessary"),
        ("loop", _S, "start-end frames that show the same view again; empty where the clip closes no loop"),
        ("bytes", _I, "size of the source file"),
        ("licence", _S, "as the source states it"),
        ("partition", _S, "partition, and with it generation, of the clip"),
    ],
    "segments": [
        ("recording", _S, "16 hex digits of the sha256 of the recording's bytes"),
        ("source_path", _S, "path relative to the source"),
        ("start", _I, "first presented frame of the recording"),
        ("stop", _I, "last frame + 1"),
        ("clip_id", _S, "the clip that these frames are; empty where they are left out"),
        ("kind", _S, "navigation or event; empty where left out"),
        ("left_out", _S, "why these frames are in no clip: menu, death, loading, idle or short"),
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
        ("reason", _S, "why there is none"),
        ("x_right", _F, "camera position, first axis of the world; the world is the estimator's"),
        ("y_down", _F, "camera position, second axis"),
        ("z_forward", _F, "camera position, third axis"),
        ("yaw_rate_deg_s", _F, "turn to the next frame, right positive; empty where unknown"),
        ("pitch_rate_deg_s", _F, "tilt to the next frame, up positive; empty where unknown"),
        ("scale", _S, "unit of the position: metre or unknown"),
        ("estimator", _S, "what made the pose"),
    ],
    "windows": [
        ("clip_id", _S, "clip"),
        ("window", _I, "pose window, in order"),
        ("start", _I, "first frame"),
        ("stop", _I, "last frame + 1; the last window is back-aligned"),
        ("estimator", _S, "what made its poses"),
        ("valid_share", _F, "share of its frames with a pose"),
        ("world", _I, "turns compare only inside one world"),
        ("segment", _I, "lengths compare only inside one segment; -1 where there are none"),
        ("scale", _F, "its unit in units of the first window of its segment; empty where unknown"),
        ("scale_spread", _F, "relative standard deviation of that"),
        ("scale_kept", _B, "rests on a scale that was kept, not measured"),
        ("reasons", _S, "of the seams beside it, separated by |"),
    ],
    "seams": [
        ("clip_id", _S, "clip"),
        ("seam", _I, "join of two neighbouring windows, in order"),
        ("left", _I, "window"),
        ("right", _I, "window"),
        ("start", _I, "first frame that both cover"),
        ("stop", _I, "last frame that both cover, + 1"),
        ("shared", _I, "of these, frames valid in both"),
        ("cut", _I, "first frame whose pose comes from the right window"),
        ("rotation_deg", _F, "median disagreement of the orientations after the join"),
        ("scale", _F, "unit of the right window in units of the left"),
        ("scale_spread", _F, "relative standard deviation of that"),
        ("votes", _I, "frames that agree on scale and position"),
        ("translation_residual", _F, "rms disagreement of positions, in median steps of the overlap"),
        ("focal_ratio", _F, "focal length, right by left"),
        ("verdict", _S, "joined, scale_kept, scale_break, break or directions"),
        ("reason", _S, "why not joined whole; empty when it was"),
    ],
    "rotation": [
        ("game", _S, "entry of the key map"),
        ("input", _S, "log column; with +run, held together with the run modifier"),
        ("axis", _S, "yaw or pitch"),
        ("value", _F, "rate: deg/s held in the long run, or degrees per count; empty unless status is ok"),
        ("unit", _S, "deg_per_s or deg_per_count"),
        ("onset", _F, "deg/s right after the press, where the key ramps"),
        ("onset_n", _I, "steps behind the onset"),
        ("onset_mad", _F, "median absolute deviation of the onset"),
        ("ramp_s", _F, "seconds from the press to the value"),
        ("n", _I, "steps behind the value"),
        ("mad", _F, "median absolute deviation, in the unit"),
        ("spread", _F, "(largest - smallest) / value between recordings"),
        ("recordings", _I, "clips that spoke"),
        ("status", _S, "ok, uncalibrated, two_modes or sign_contradicted"),
        ("version", _I, "version of the frozen record"),
    ],
    "cameras": [
        ("game", _S, "entry of the key map"),
        ("shape", _S, "width/height of the picture"),
        ("focal", _F, "fx as a share of the picture's width; empty where uncalibrated"),
        ("aspect", _F, "fy / fx; 1 unless the key map states it"),
        ("look", _S, "looking up: tilt (the camera turns) or shear (the picture slides)"),
        ("look_known", _B, "false where the footage does not show which; tilt then stands"),
        ("n", _I, "turns on the spot behind it"),
        ("mad", _F, "spread of single turns, as a share"),
        ("clips", _I, "clips that spoke"),
        ("version", _I, "version of the frozen record"),
    ],
    "actions": [
        ("clip_id", _S, "clip"),
        ("latent", _I, "latent frame; row 0 is idle"),
        ("frame", _I, "media frame at the latent's end"),
        *((axis, _F, "see schemas/action.py; empty where unknown") for axis in AXES),
        ("unknown", _S, "axis=reason of each unknown value, separated by |"),
        ("witness", _S, "what pitch and yaw come from: poses, log, both or none"),
    ],
    "quality": [
        ("clip_id", _S, "clip"),
        ("window", _I, "window, in order; a clip shorter than 150 frames is one short window"),
        ("sharpness", _F, "score, 0 to 1, higher is better; width of strong edges"),
        ("detail", _F, "score; how much of the picture has structure"),
        ("noise", _F, "score; high where the picture is free of noise"),
        ("compression", _F, "score; high where no codec shows"),
        ("dynamic_range", _F, "score; spread of luma, less what is lost in black or white"),
        ("aesthetics", _F, "score by `aesthetics_by`"),
        ("smoothness", _F, "score of the worst part known; empty where nothing is known of the motion"),
        ("start", _I, "first frame"),
        ("stop", _I, "last frame + 1; the last window is back-aligned"),
        ("aesthetics_by", _S, "model that judged, or the proxy used without weights"),
        ("smoothness_by", _S, "part that the score comes from: shake, travel, stutter, frozen, timing, cut"),
        (
            "motion_by",
            _S,
            "what the shake was measured on: poses, points followed in the picture, or nothing",
        ),
        ("smoothness_unknown", _S, "parts that could not be known, separated by |"),
        *((name, _F, f"raw measure; {doc}") for name, doc in VISUAL_RAWS.items()),
        *((name, _I if name in _COUNTS else _F, doc) for name, doc in SMOOTHNESS_RAWS.items()),
    ],
    "captions": [
        ("clip_id", _S, "clip"),
        ("provenance", _S, "what wrote it: a model's name, log, or empty where there is no caption"),
        ("perspective", _S, "fps, tps or unknown"),
        ("intervals", _I, "of 5 s, the last one may be shorter"),
        ("events", _I, "intervals in which something happens"),
        ("scene", _S, "layout, objects, light, style"),
        ("character", _S, "the controlled character as it looks; empty in first person"),
        ("ui", _S, "interface; never part of a prompt"),
        ("scene_leak", _F, "share of its sentences that belong to another field; empty where the field is"),
        ("character_leak", _F, "as scene_leak"),
        ("ui_leak", _F, "as scene_leak"),
        ("events_leak", _F, "as scene_leak"),
        ("leaks", _S, "the words that leak, by field"),
        ("text_heavy", _S, "yes, no or unknown"),
        ("watermark", _S, "yes, no or unknown"),
        ("unsafe", _S, "yes, no or unknown"),
        ("personal_data", _S, "yes, no or unknown"),
    ],
    "latents": [
        ("clip_id", _S, "clip"),
        ("codec", _S, "kind, weights or frozen record, precision; empty where there are no latents"),
        ("height", _I, "of the pictures that were encoded"),
        ("width", _I, "of the pictures that were encoded"),
        ("latents", _I, "of the continuous stream; half as many at low resolution"),
        ("segments", _I, "independent segments of 32 latents, for stage 1"),
        ("encoder", _S, "kind, weights, precision; empty where there is no text"),
        ("prompts", _I, "that have embeddings"),
        ("tokens", _I, "of all of them"),
        ("cut_prompts", _I, "of more than 512 tokens: their end is left out"),
    ],
    "samples": [
        ("sample_id", _S, "sample; equal to the clip's id"),
        ("clip_id", _S, "clip"),
        ("split", _S, "train or val"),
        ("family", _S, "kind of tar: media, annotations, latents, text"),
        ("tar", _S, "tar file, relative to the corpus"),
        ("offset", _I, "first byte of the sample's members in the tar, headers included"),
        ("size", _I, "bytes of the range that holds them all"),
    ],
    "selection": [
        ("clip_id", _S, "clip"),
        ("source_path", _S, "path relative to the source"),
        ("game", _S, "entry of the key map; empty when none matched"),
        ("split", _S, "train or val, by recording"),
        ("tier", _S, "tier of the policy; out, or pending while stages are open"),
        ("reasons", _S, "why not a better tier, in order, separated by |"),
        ("duplicate_of", _S, "clip that stands for it; empty unless it is a near-duplicate"),
        *((axis, _F, "median score over the clip's windows, 0 to 1, higher is better") for axis in QUALITY),
    ],
    "failures": [
        ("clip_id", _S, "clip, or recording that could not be cut"),
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

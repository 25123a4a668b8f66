"""Small corpora whose every number tells where it comes from, written as any partition is written."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipeline.geometry import Cover
from pipeline.shards.write import Sample, ShardConfig, write_partition, write_root
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, prompts
from schemas.clip import ClipKind, Perspective
from schemas.latents import NEGATIVE, LatentsNote, TextNote, prompt_key, segment_starts
from schemas.pose import Scale
from schemas.quality import Unknown
from schemas.sample import FAMILIES, ActionUnknown, Annotation, index_schema
from schemas.timeline import intervals
from trainer.config import TINY, Geometry

PRESET = replace(TINY, geometry=Geometry(64, 64), model=replace(TINY.model, text_dim=8, text_len=64))
LATENTS = 48  # 189 grid entries: 11.8 s, three caption intervals, one segment of 32


def write(
    store: Store, count: int, events: int = 0, known: dict[int, int] | None = None, tar_bytes: int = 1 << 40
) -> None:
    """count samples, the last `events` of them event clips. known: leading latents with known actions, by
    sample; all of them where it does not say."""
    samples = [
        sample(n, ClipKind.EVENT if n >= count - events else ClipKind.NAVIGATION, (known or {}).get(n))
        for n in range(count)
    ]
    store.write("corpus.json", b"{}\n")
    sizes = ShardConfig(target_bytes=dict.fromkeys(FAMILIES, tar_bytes))
    write_partition(store, "g0000-p00000", samples, sizes, families=tuple(FAMILIES))
    write_root(store)


def name(number: int) -> str:
    return f"{number:016x}"


def caption(number: int) -> StructuredCaption:
    """Three intervals, each with an event of its own."""
    said = (IntervalEvent(category=EventCategory.OBJECT_CHANGE, text=f"Door {i} opens.") for i in range(3))
    return StructuredCaption(
        scene=f"Hall {number}.", character="A marine.", events=tuple(said), provenance="log"
    )


def arrays(number: int) -> dict[str, np.ndarray]:
    """float16 members: latent k of sample n holds n + k / 64 and noise of its own."""
    rng = np.random.default_rng(number)

    def rows(count: int, side: int) -> np.ndarray:
        ramp = number + np.arange(count)[:, None, None, None] / 64
        return (ramp + rng.normal(size=(count, 16, side, side)) / 1024).astype(np.float16)

    return {
        "hr.npy": rows(LATENTS, 8),
        "lr.npy": rows(LATENTS // 2, 2),
        "hr_y.npy": rows(3, 8),
        "lr_y.npy": rows(1, 2),
        "segments.npy": rows(32, 8)[None],
        "segments_y.npy": rows(2, 8)[None],
    }


def actions(number: int, known: int = LATENTS) -> np.ndarray:
    """Row k turns by k / 8 degrees; third person; yaw is not known from latent `known` on."""
    rows = np.zeros((LATENTS, len(AXES)), np.float32)
    rows[:, AXES.index("yaw")] = np.arange(LATENTS) / 8 + number
    rows[0] = 0.0
    rows[known:, AXES.index("yaw")] = np.nan
    return rows


def texts(number: int) -> tuple[TextNote, np.ndarray]:
    every = sorted({*prompts(caption(number), Perspective.THIRD), "", NEGATIVE}, key=prompt_key)
    tokens = [min(64, 1 + len(text.split())) for text in every]
    note = TextNote(
        encoder="words",
        width=8,
        negative=prompt_key(NEGATIVE),
        keys=tuple(map(prompt_key, every)),
        prompts=tuple(every),
        starts=tuple(int(k) for k in np.cumsum([0, *tokens[:-1]])),
        tokens=tuple(tokens),
        cut=(False,) * len(every),
    )
    rows = np.random.default_rng(1000 + number).normal(size=(sum(tokens), 8))
    return note, rows.astype(np.float16)


def sample(number: int, kind: ClipKind, known: int | None = None) -> Sample:
    frames, known = 4 * LATENTS - 3, LATENTS if known is None else known
    cover = Cover.of(64, 64, 64, 64)
    sides = {key: getattr(cover, key) for key in LatentsNote.model_fields if hasattr(cover, key)}
    coded = LatentsNote(codec="ramp", latents=LATENTS, segments=1, **sides)
    unknown = ActionUnknown()
    if known < LATENTS:
        unknown = ActionUnknown.of({"yaw": ((known, LATENTS, Unknown.UNCALIBRATED),)})
    assert len(intervals(Fraction(frames, 16))) == 3 and segment_starts(LATENTS, 4) == (0,)
    note = Annotation(
        sample_id=name(number),
        clip_id=name(number),
        recording_id=name(number),
        kind=kind,
        split="train",
        game="",
        perspective=Perspective.THIRD,
        licence="",
        frames=frames,
        fps=16.0,
        fps_num=16,
        fps_den=1,
        width=64,
        height=64,
        duration_s=frames / 16,
        latent_frames=LATENTS,
        actions_known=known,
        grid_jitter_max_s=0.0,
        pose_scale=Scale.UNKNOWN,
        pose_estimator="given",
        pose_valid_share=1.0,
        action_witness="log",
        action_unknown=unknown,
        action_lag_frames=0.0,
        caption=caption(number),
    )
    text, embeddings = texts(number)
    members: dict[str, bytes | Path] = {
        "mp4": b"no video is read",
        "json": note.model_dump_json().encode(),
        "actions.npy": npy(actions(number, known)),
        "grid.npy": npy(np.arange(frames, dtype=np.int32)),
        "poses.npy": npy(np.tile(np.eye(3, 4, dtype=np.float32), (frames, 1, 1))),
        "latents.json": coded.model_dump_json().encode(),
        **{suffix: npy(array) for suffix, array in arrays(number).items()},
        "segments_at.npy": npy(np.zeros(1, np.int32)),
        "text.json": text.model_dump_json().encode(),
        "text.npy": npy(embeddings),
    }
    facts = note.model_dump(mode="json")
    return Sample(
        name(number), {k: facts[k] for k in index_schema().names if k in facts and k != "sample_id"}, members
    )


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()

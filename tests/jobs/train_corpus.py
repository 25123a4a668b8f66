"""A published corpus of small random clips, as `wp2 train` reads it: latents, text and annotations."""

from __future__ import annotations

import functools
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipeline.shards.write import Sample, ShardConfig, write_partition, write_root
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, prompts
from schemas.clip import ClipKind, Perspective
from schemas.latents import NEGATIVE, LatentsNote, TextNote, prompt_key, segment_starts
from schemas.pose import Scale
from schemas.sample import ActionUnknown, Annotation, index_schema
from schemas.timeline import intervals
from tests.pipeline.shards_corpus import npy
from tests.trainer.tiny_codecs import fitted
from trainer.config import TINY, Preset

LATENTS = 48
FAMILIES = ("media", "annotations", "latents", "text")


@functools.cache
def codec() -> tuple[str, bytes]:
    record = fitted(TINY.geometry.height, TINY.geometry.width)
    return f"linear-{record.identity()}", record.model_dump_json().encode()


def write_corpus(
    folder: Path,
    train: int = 5,
    val: int = 2,
    latents: int = LATENTS,
    preset: Preset = TINY,
    text_dim: int | None = None,
    events: int = 1,
) -> str:
    """`train` and `val` clips of so many latents; the first `events` of each are event clips. Its path."""
    corpus = Store(str(folder), {})
    corpus.write("corpus.json", b'{"kind": "wp2-corpus", "schema_version": 1}\n')
    corpus.write("catalogue/g0000.parquet", b"no reader of these tests opens it")
    corpus.write("statistics/codec-v0001.json", codec()[1])
    made = [
        _sample(f"{split}{n:02d}", split, n < events, latents, preset, text_dim or preset.model.text_dim)
        for split, count in (("train", train), ("val", val))
        for n in range(count)
    ]
    write_partition(
        corpus, "g0000-p00000", sorted(made, key=lambda s: s.sample_id), ShardConfig(), families=FAMILIES
    )
    write_root(corpus)
    return str(folder)


def _sample(name: str, split: str, event: bool, latents: int, preset: Preset, text_dim: int) -> Sample:
    rng = np.random.default_rng(sum(name.encode()) * 1009)
    seconds = Fraction(4 * latents - 3, 16)
    said = (
        IntervalEvent(category=EventCategory.OBJECT_CHANGE, text="a door opens") if event else IntervalEvent()
    )
    caption = StructuredCaption(
        scene=f"hall {name}", events=(said,) * len(intervals(seconds)), provenance="log"
    )
    actions = np.zeros((latents, len(AXES)), np.float32)
    actions[1:, 1] = rng.uniform(-6, 6, latents - 1)
    actions[1:, 2] = rng.integers(-1, 2, latents - 1)
    actions[:, 4] = 1
    note = Annotation(
        sample_id=name,
        clip_id=name,
        recording_id=name,
        kind=ClipKind.EVENT if event else ClipKind.NAVIGATION,
        split=split,
        game="drawn",
        perspective=Perspective.FIRST,
        licence="CC0-1.0",
        frames=4 * latents - 3,
        fps=16.0,
        fps_num=16,
        fps_den=1,
        width=preset.geometry.width,
        height=preset.geometry.height,
        duration_s=float(seconds),
        latent_frames=latents,
        actions_known=latents,
        grid_jitter_max_s=0.0,
        pose_scale=Scale.UNKNOWN,
        pose_estimator="none",
        pose_valid_share=0.0,
        action_witness="log",
        action_unknown=ActionUnknown(),
        action_lag_frames=0.0,
        caption=caption,
    )
    facts = {n: note.model_dump(mode="json")[n] for n in index_schema().names if hasattr(note, n)}
    del facts["sample_id"]
    members = {
        "mp4": b"never read",
        "json": note.model_dump_json().encode(),
        "actions.npy": npy(actions),
        "grid.npy": npy(np.arange(4 * latents - 3, dtype=np.int32)),
        "poses.npy": npy(np.full((4 * latents - 3, 3, 4), np.nan, np.float32)),
        **_latents(latents, preset, rng),
        **_text(caption, text_dim, rng),
    }
    return Sample(name, facts, members)


def _latents(latents: int, preset: Preset, rng: np.random.Generator) -> dict[str, bytes]:
    size = {"height": preset.geometry.height, "width": preset.geometry.width}
    starts = segment_starts(latents, 2)
    note = LatentsNote(
        codec=codec()[0],
        **size,
        source_height=size["height"],
        source_width=size["width"],
        scaled_height=size["height"],
        scaled_width=size["width"],
        top=0,
        left=0,
        latents=latents,
        segments=len(starts),
    )
    high, low = preset.geometry.latent, preset.geometry.low_latent
    shapes = {
        "hr.npy": (latents, 16, *high),
        "lr.npy": (latents // 2, 16, *low),
        "hr_y.npy": (3, 16, *high),
        "lr_y.npy": (2, 16, *low),
        "segments.npy": (len(starts), 32, 16, *high),
        "segments_y.npy": (len(starts), 3, 16, *high),
    }
    arrays = {name: npy(rng.normal(size=shape).astype(np.float16)) for name, shape in shapes.items()}
    at = {"segments_at.npy": npy(np.array(starts, np.int32))}
    return {"latents.json": note.model_dump_json().encode(), **arrays, **at}


def _text(caption: StructuredCaption, width: int, rng: np.random.Generator) -> dict[str, bytes]:
    texts = sorted({*prompts(caption, Perspective.FIRST), "", NEGATIVE}, key=prompt_key)
    tokens = [len(text.split()) + 1 for text in texts]
    note = TextNote(
        encoder="words",
        width=width,
        negative=prompt_key(NEGATIVE),
        keys=tuple(map(prompt_key, texts)),
        prompts=tuple(texts),
        starts=tuple(int(n) for n in np.cumsum([0, *tokens[:-1]])),
        tokens=tuple(tokens),
        cut=(False,) * len(texts),
    )
    rows = rng.normal(size=(sum(tokens), width)).astype(np.float16)
    return {"text.json": note.model_dump_json().encode(), "text.npy": npy(rows)}

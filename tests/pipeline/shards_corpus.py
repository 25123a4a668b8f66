"""A corpus of twelve clips of the footage pack in three tars a family, for the tests of pipeline/shards."""

from __future__ import annotations

import functools
import hashlib
import io
import os
from pathlib import Path

import av
import numpy as np

from pipeline.geometry import Cover
from pipeline.shards.write import Sample, ShardConfig, write_partition, write_root
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, prompts
from schemas.clip import ClipKind, Perspective
from schemas.latents import NEGATIVE, LatentsNote, TextNote, prompt_key
from schemas.pose import Scale
from schemas.quality import Unknown
from schemas.sample import FAMILIES, ActionUnknown, Annotation, index_schema
from schemas.timeline import grid, intervals, latents_of

FOOTAGE = Path(os.environ.get("WP2_FOOTAGE", Path(__file__).parents[3] / "shared/data/footage"))
CLIPS = [
    *("odd_64x36", "q_compress_crf51", "q_compress_crf38", "q_noise_10", "tc_h264_10bits", "tc_h265_video"),
    *("bad04_menu", "odd_hevc10", "odd_exactly_150f", "odd_60fps", "odd_short_140f", "odd_637x359_yuv444"),
]
CONFIG = ShardConfig(
    target_bytes={"media": 640_000, "annotations": 60_000, "latents": 240_000, "text": 24_000}
)
PARTITION = "g0000-p00000"
put = functools.partial(write_partition, families=tuple(FAMILIES))


@functools.cache
def samples() -> tuple[Sample, ...]:
    """Twelve samples, sorted by id: first person at first, third person later; captions, events and unknown
    actions only in the later ones, which is what breaks readers that take types from the first rows."""
    paths = sorted((hashlib.sha256(p.read_bytes()).hexdigest()[:16], p) for p in map(_clip, CLIPS))
    return tuple(sample(name, path, i) for i, (name, path) in enumerate(paths))


def _clip(name: str) -> Path:
    return FOOTAGE / f"{name}.mp4"


def sample(name: str, path: Path, number: int) -> Sample:
    """A sample of a real video: its frame times, and poses of a camera that goes straight ahead."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        pts = np.array(sorted(p.pts for p in container.demux(stream) if p.pts is not None))
        base, rate, width, height = stream.time_base, stream.average_rate, stream.width, stream.height
    shown = grid(pts, base)
    seconds = (int(pts[-1] - pts[0]) + int(np.median(np.diff(pts)))) * base
    latents = latents_of(len(shown.frames))
    third = number >= 6
    actions = np.zeros((latents, len(AXES)), np.float32)
    actions[1:, AXES.index("forward")] = 1
    actions[:, AXES.index("perspective")] = not third
    poses = np.tile(np.eye(3, 4, dtype=np.float32), (len(pts), 1, 1))
    poses[:, 2, 3] = np.arange(len(pts)) * (number + 1)
    unknown = ActionUnknown()
    if third:
        actions[1:, AXES.index("yaw")] = np.nan
        unknown = ActionUnknown.of({"yaw": ((1, latents, Unknown.UNCALIBRATED),)})
    note = Annotation(
        sample_id=name,
        clip_id=name,
        recording_id=name,
        kind=ClipKind.EVENT if third else ClipKind.NAVIGATION,
        split="train",
        game="fdoom_keys",
        perspective=Perspective.THIRD if third else Perspective.FIRST,
        licence="BSD-3-Clause",
        frames=len(pts),
        fps=float(rate),
        fps_num=rate.numerator,
        fps_den=rate.denominator,
        width=width,
        height=height,
        duration_s=float(seconds),
        latent_frames=latents,
        actions_known=1 if third else latents,
        grid_jitter_max_s=float(np.abs(shown.jitter_s).max()),
        pose_scale=Scale.UNKNOWN,
        pose_estimator="given",
        pose_valid_share=1.0,
        action_witness="poses",
        action_unknown=unknown,
        action_lag_frames=0.0,
        caption=_caption(len(intervals(seconds)), third),
    )
    facts = {n: note.model_dump(mode="json")[n] for n in index_schema().names if hasattr(note, n)}
    del facts["sample_id"]
    members = {
        "mp4": path,
        "json": note.model_dump_json().encode(),
        "actions.npy": npy(actions),
        "grid.npy": npy(shown.frames.astype(np.int32)),
        "poses.npy": npy(poses),
        **_latents(Cover.of(height, width, 64, 64), latents, number),
        **_text(note.caption, note.perspective, number),
    }
    return Sample(name, facts, members)


def _latents(cover: Cover, latents: int, number: int) -> dict[str, bytes]:
    """Latents of another codec a sample, noise. The clips are too short for segments."""
    rng = np.random.default_rng(number)
    sides = {name: getattr(cover, name) for name in LatentsNote.model_fields if hasattr(cover, name)}
    note = LatentsNote(codec=f"codec-{number}", latents=latents, segments=0, **sides)
    shapes = {
        "hr.npy": (latents, 16, 8, 8),
        "lr.npy": (latents // 2, 16, 2, 2),
        "hr_y.npy": (2 + number % 3, 16, 8, 8),
        "lr_y.npy": (1, 16, 2, 2),
        "segments.npy": (0, 32, 16, 8, 8),
        "segments_y.npy": (0, 1, 16, 8, 8),
    }
    arrays = {name: npy(rng.normal(size=shape).astype(np.float16)) for name, shape in shapes.items()}
    return {
        "latents.json": note.model_dump_json().encode(),
        **arrays,
        "segments_at.npy": npy(np.zeros(0, np.int32)),
    }


def _text(caption: StructuredCaption, perspective: Perspective, number: int) -> dict[str, bytes]:
    """Embeddings of 16 numbers a token: as many tokens as the prompt has words, and the end."""
    texts = sorted({*prompts(caption, perspective), "", NEGATIVE}, key=prompt_key)
    tokens = [len(text.split()) + 1 for text in texts]
    note = TextNote(
        encoder="words",
        width=16,
        negative=prompt_key(NEGATIVE),
        keys=tuple(map(prompt_key, texts)),
        prompts=tuple(texts),
        starts=tuple(int(n) for n in np.cumsum([0, *tokens[:-1]])),
        tokens=tuple(tokens),
        cut=(False,) * len(texts),
    )
    rows = np.random.default_rng(number).normal(size=(sum(tokens), 16)).astype(np.float16)
    return {"text.json": note.model_dump_json().encode(), "text.npy": npy(rows)}


def _caption(count: int, third: bool) -> StructuredCaption:
    if not third:
        return StructuredCaption(events=(IntervalEvent(),) * count)
    event = IntervalEvent(category=EventCategory.OBJECT_CHANGE, text="A door opens.")
    return StructuredCaption(
        scene="A stone hall.",
        character="A marine in green armour.",
        events=(event,) * count,
        provenance="log",
    )


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def write(corpus: Store, config: ShardConfig = CONFIG) -> None:
    """The whole corpus: catalogue and statistics (any bytes do), a partition, an empty one, the root."""
    corpus.write("corpus.json", b'{"schema_version": 1}\n')
    corpus.write("catalogue/g0000.parquet", b"catalogue of generation 0" * 20)
    corpus.write("statistics/rotation-v0.json", b'{"fdoom_keys": 123.0}\n')
    put(corpus, PARTITION, samples(), config)
    put(corpus, "g0000-p00001", [], config)
    write_root(corpus)


def content(member: bytes | Path) -> bytes:
    return member if isinstance(member, bytes) else member.read_bytes()


def snapshot(corpus: Store) -> dict[str, bytes]:
    """Every file of a corpus by path."""
    return {stat.path: corpus.read(stat.path) for stat in corpus.list()}

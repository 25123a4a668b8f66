"""The trainer's loader against the least that any reader must do, and against plain `webdataset`.

    python -m benchmarks.loader [--samples 256] [--large 8] [--rounds 5] [--folder DIR]

Corpora are written with `write_partition`: noise in the shapes of the presets `small` (160 latents of 8x16)
and `a14b` (120 latents of 56x104), four tars a family. Read are stage 1 and stage 3 of each preset, the
latter with 6 chunks of history (`small`: its most) or 16.

raw         the same tars front to back, with the checksum (xxh64) of every member: what any reader must do
whole       the loader, reading every member of a sample, needed or not
loader      the loader, reading the members that the stage needs: about two thirds of the bytes
webdataset  `WebDataset(tars).decode()`, families side by side, and the same tensors in batches of the same
            size; with a DataLoader of 0 or 2 workers

Bars, for both stages of `small`: `loader` at least 0.55 times the samples a second of `raw`; at most a
quarter of the CPU seconds a sample of `webdataset`, with one thread against no worker, and with four threads
against two. Reported: the bytes a second of `whole` against `raw`, and all of `a14b`. Files lie in the page
cache; rounds are interleaved and the best of each counts. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import io
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from jobs.corpus_reader import Corpus
from pipeline.geometry import Cover
from pipeline.shards.write import Sample, ShardConfig, write_partition, write_root
from pipeline.store import Store
from schemas.action import AXES
from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, prompts
from schemas.clip import ClipKind, Perspective
from schemas.latents import NEGATIVE, LatentsNote, TextNote, prompt_key, segment_starts
from schemas.pose import Scale
from schemas.sample import FAMILIES as EVERY
from schemas.sample import ActionUnknown, Annotation, index_schema
from schemas.timeline import intervals
from trainer.codec.condition import extend, mask
from trainer.config import PRESETS, Preset
from trainer.curriculum import Stage, curriculum
from trainer.data.plan import Plan, latents_read
from trainer.data.sample import FAMILIES, Reader
from trainer.data.stream import Loader

RATE_BAR, CPU_BAR = 0.55, 4.0
PARTITIONS, EPOCHS = 4, 4
LATENTS = {"small": 160, "a14b": 120}
CONDITION = {"small": 2, "a14b": 30}  # latents of y until it is constant: linear codec, released VAE
WORDS = 90  # tokens of a full prompt


# --- a corpus ---------------------------------------------------------------------------------------------


def write(store: Store, preset: Preset, count: int) -> None:
    store.write("corpus.json", b"{}\n")
    names = [f"{i:016x}" for i in range(count)]
    for k in range(PARTITIONS):
        own = names[k * count // PARTITIONS : (k + 1) * count // PARTITIONS]
        samples = (_sample(name, int(name, 16), preset) for name in own)
        sizes = ShardConfig(target_bytes=dict.fromkeys(EVERY, 1 << 40))
        write_partition(store, f"g0000-p{k:05d}", samples, sizes, families=tuple(EVERY))
    write_root(store)


def _sample(name: str, number: int, preset: Preset) -> Sample:
    rng = np.random.default_rng(number)
    latents, n = LATENTS[preset.name], CONDITION[preset.name]
    frames = 4 * latents - 3
    (h, w), (lh, lw) = preset.geometry.latent, preset.geometry.low_latent
    height, width = preset.geometry.height, preset.geometry.width
    count = len(intervals(Fraction(frames, 16)))
    said = [f"{number} {i} " + "A door opens. " * 8 for i in range(count)]
    caption = StructuredCaption(
        scene="A stone hall with a long table. " * 5,
        character="A marine in green armour.",
        events=tuple(IntervalEvent(category=EventCategory.OBJECT_CHANGE, text=t) for t in said),
        provenance="log",
    )
    note = Annotation(
        sample_id=name,
        clip_id=name,
        recording_id=name,
        kind=ClipKind.NAVIGATION,
        split="train",
        game="",
        perspective=Perspective.THIRD,
        licence="",
        frames=frames,
        fps=16.0,
        fps_num=16,
        fps_den=1,
        width=width,
        height=height,
        duration_s=frames / 16,
        latent_frames=latents,
        actions_known=latents,
        grid_jitter_max_s=0.0,
        pose_scale=Scale.UNKNOWN,
        pose_estimator="given",
        pose_valid_share=1.0,
        action_witness="log",
        action_unknown=ActionUnknown(),
        action_lag_frames=0.0,
        caption=caption,
    )
    dump = note.model_dump(mode="json")
    starts = segment_starts(latents, 4)
    cover = Cover.of(height, width, height, width)
    sides = {key: getattr(cover, key) for key in LatentsNote.model_fields if hasattr(cover, key)}
    coded = LatentsNote(codec="noise", latents=latents, segments=len(starts), **sides)

    def noise(*shape: int) -> bytes:
        return _npy(rng.standard_normal(shape, np.float32).astype(np.float16))

    texts = sorted({*prompts(caption, note.perspective), "", NEGATIVE}, key=prompt_key)
    tokens = [min(WORDS, 1 + len(text.split())) for text in texts]
    text = TextNote(
        encoder="noise",
        width=preset.model.text_dim,
        negative=prompt_key(NEGATIVE),
        keys=tuple(map(prompt_key, texts)),
        prompts=tuple(texts),
        starts=tuple(int(k) for k in np.cumsum([0, *tokens[:-1]])),
        tokens=tuple(tokens),
        cut=(False,) * len(texts),
    )
    members: dict[str, bytes | Path] = {
        "mp4": b"no video is read",
        "json": note.model_dump_json().encode(),
        "actions.npy": _npy(np.zeros((latents, len(AXES)), np.float32)),
        "grid.npy": _npy(np.arange(frames, dtype=np.int32)),
        "poses.npy": _npy(np.tile(np.eye(3, 4, dtype=np.float32), (frames, 1, 1))),
        "latents.json": coded.model_dump_json().encode(),
        "hr.npy": noise(latents, 16, h, w),
        "lr.npy": noise(latents // 2, 16, lh, lw),
        "hr_y.npy": noise(n, 16, h, w),
        "lr_y.npy": noise(n, 16, lh, lw),
        "segments.npy": noise(len(starts), 32, 16, h, w),
        "segments_y.npy": noise(len(starts), n, 16, h, w),
        "segments_at.npy": _npy(np.array(starts, np.int32)),
        "text.json": text.model_dump_json().encode(),
        "text.npy": noise(sum(tokens), preset.model.text_dim),
    }
    return Sample(name, {k: dump[k] for k in index_schema().names if k in dump and k != "sample_id"}, members)


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


# --- what is measured -------------------------------------------------------------------------------------


def raw(corpus: Corpus) -> int:
    """Bytes of the tars read front to back, with the checksum of every member."""
    total = 0
    for family in FAMILIES:
        places = corpus.places[family]
        for number, tar in enumerate(places.tars):
            own = np.flatnonzero(places.tar == number)
            offset, size, xxh64 = (c[own].ravel() for c in (places.offset, places.size, places.xxh64))
            with Path(corpus.store.full(tar)).open("rb", buffering=0) as file:
                for start, count, checksum in zip(
                    offset.tolist(), size.tolist(), xxh64.tolist(), strict=True
                ):
                    file.seek(start)
                    if xxhash.xxh64_intdigest(file.read(count)) != checksum:
                        raise SystemExit(f"{tar} is damaged")
                    total += count
    return total


class Ours:
    """The loader on one stage. Its memory is warm after the first round, as it is in a run."""

    def __init__(self, corpus: Corpus, stage: Stage, preset: Preset, reader: Reader, threads: int) -> None:
        plan = Plan(corpus.table, stage, preset, 0)
        self._loader = Loader(plan, reader, stage, preset, 0, threads=threads)
        self._count = EPOCHS * len(corpus.table) // stage.batch

    def __call__(self) -> int:
        steps = self._loader.steps(0)
        count = sum(len(batch) for _ in range(self._count) for batch in next(steps))
        steps.close()
        return count


class Tars(IterableDataset[dict[str, Any]]):
    """The same samples by `webdataset`: families side by side, arrays decoded, and the same tensors made."""

    def __init__(self, corpus: Corpus, stage: Stage, preset: Preset) -> None:
        self._tars = {f: [corpus.store.full(tar) for tar in corpus.places[f].tars] for f in FAMILIES}
        self._latents, self._segments = latents_read(stage, preset, stage.histories[0]), stage.segments

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parts = [webdataset.WebDataset(t, shardshuffle=False).decode() for t in self._tars.values()]
        latents = self._latents
        for notes, coded, text in zip(*parts, strict=True):
            embedded = _embeddings(notes["json"], text["text.json"], text["text.npy"], self._segments)
            if self._segments:
                at = coded["segments_at.npy"][0]
                rows = notes["actions.npy"][at : at + 32].copy()
                rows[0, :4] = rows[0, 5] = 0.0
                yield {
                    "latents": _tensor(coded["segments.npy"][0]),
                    "condition": _condition(coded["segments_y.npy"][0], latents),
                    "actions": torch.from_numpy(rows),
                    "text": embedded,
                }
                continue
            low = _tensor(coded["lr.npy"][: latents // 2])
            yield {
                "latents": _tensor(coded["hr.npy"][:latents]),
                "condition": _condition(coded["hr_y.npy"], latents),
                "low": torch.cat([low, _condition(coded["lr_y.npy"], latents // 2)]),
                "actions": torch.from_numpy(notes["actions.npy"][:latents]),
                "text": embedded,
            }


def _tensor(rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(rows).float().transpose(0, 1)


def _condition(head: np.ndarray, latents: int) -> torch.Tensor:
    y = extend(_tensor(head)[None], latents)[0]
    return torch.cat([mask(latents).expand(-1, -1, *y.shape[2:]), y])


def _embeddings(note: dict[str, Any], text: dict[str, Any], rows: np.ndarray, one: bool) -> torch.Tensor:
    """Of the one prompt of a segment, or of two: windows of 40 latents touch no more. Padded."""
    caption, found = note["caption"], []
    for event in caption["events"][: 1 if one else 2]:
        said = [caption["scene"], caption["character"], event["text"]]
        starts = ("The scene in the video is: ", "The character is: ", "The event is: ")
        prompt = " ".join(f"{a}{b.rstrip('. ')}." for a, b in zip(starts, said, strict=True))
        k = text["keys"].index(prompt_key(prompt))
        found.append(
            torch.from_numpy(rows[text["starts"][k] : text["starts"][k] + text["tokens"][k]]).float()
        )
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def iterated(corpus: Corpus, stage: Stage, preset: Preset, workers: int) -> int:
    batches = DataLoader(Tars(corpus, stage, preset), batch_size=stage.micro, num_workers=workers)
    return sum(len(batch["latents"]) for batch in batches)


def _used() -> float:
    """CPU seconds of this process and of its ended workers."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def timed(rounds: int, works: dict[str, Callable[[], int]]) -> dict[str, tuple[float, float, int]]:
    """Of each: wall seconds and CPU seconds of its best round, and what it returned."""
    seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in works}
    for number in range(rounds + 1):  # the first brings files and memory in
        for name, work in works.items():
            wall, cpu = time.perf_counter(), _used()
            made = work()
            if number:
                seen[name].append((time.perf_counter() - wall, _used() - cpu, made))
    return {
        name: (min(s[0] for s in found), min(s[1] for s in found), found[0][2])
        for name, found in seen.items()
    }


def measure(corpus: Corpus, stage: Stage, preset: Preset, rounds: int) -> dict[str, float]:
    """Prints a table, returns the ratios."""

    def ours(reader: Reader, threads: int) -> Ours:
        return Ours(corpus, stage, preset, reader, threads)

    works: dict[str, Callable[[], int]] = {
        "raw": lambda: raw(corpus),
        "whole, 1 thread": ours(corpus.read, 1),
        "whole, 4 threads": ours(corpus.read, 4),
        "loader, 1 thread": ours(corpus.reader(stage), 1),
        "loader, 4 threads": ours(corpus.reader(stage), 4),
        "webdataset, 0 workers": lambda: iterated(corpus, stage, preset, 0),
        "webdataset, 2 workers": lambda: iterated(corpus, stage, preset, 2),
    }
    found = timed(rounds, works)
    count = len(corpus.table)
    size = found["raw"][2] / count
    latents = latents_read(stage, preset, stage.histories[0])
    print(
        f"{preset.name}, stage {stage.name}: {count} samples of {size / 1e6:.2f} MB, {latents} latents read"
    )
    each = {}
    for name, (wall, cpu, made) in found.items():
        made = count if name == "raw" else made
        each[name] = wall / made, cpu / made
        rate = f"  {size * made / wall / 1e6:6.0f} MB/s" if "loader" not in name else ""
        print(f"  {name:22} {1e3 * wall / made:9.3f} ms  {1e3 * cpu / made:9.3f} CPU ms a sample{rate}")
    ratios = {
        "loader / raw, samples a second": each["raw"][0]
        / min(each["loader, 1 thread"][0], each["loader, 4 threads"][0]),
        "whole / raw, bytes a second": each["raw"][0]
        / min(each["whole, 1 thread"][0], each["whole, 4 threads"][0]),
        "CPU alone": each["webdataset, 0 workers"][1] / each["loader, 1 thread"][1],
        "CPU together": each["webdataset, 2 workers"][1] / each["loader, 4 threads"][1],
    }
    print("  " + ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
    return ratios


def stages(preset: Preset) -> list[Stage]:
    """With one history each, so that samples make the same batches in whatever order they come."""
    longest = {"1": 0, "3": 6 if preset.name == "small" else 16}
    return [
        replace(s, histories=(longest[s.name],), events=0.0, batch=4, micro=4, text_drop=0.0, field_drop=0.0)
        for s in curriculum(preset.name)
        if s.name in longest
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="The loader's cost; see the head of this file.")
    parser.add_argument("--samples", type=int, default=256, help="of size `small`")
    parser.add_argument("--large", type=int, default=8, help="samples of size `a14b`, 76 MB each; 0 for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: temporary)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    small: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for preset, count in ((PRESETS["small"], args.samples), (PRESETS["a14b"], args.large)):
            if not count:
                continue
            store = Store(str(Path(name) / preset.name))
            write(store, preset, count)
            corpus = Corpus.open(store)
            found = [measure(corpus, stage, preset, args.rounds) for stage in stages(preset)]
            small += found if preset.name == "small" else []
    met = all(
        r["loader / raw, samples a second"] >= RATE_BAR and min(r["CPU alone"], r["CPU together"]) >= CPU_BAR
        for r in small
    )
    print(f"bars: samples a second >= {RATE_BAR}, CPU >= {CPU_BAR} times fewer: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

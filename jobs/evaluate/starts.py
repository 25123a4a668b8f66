"""Pictures to start from: the first frames of a corpus's clips, or a folder of pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from jobs.evaluate.world import Case, EvaluationError, Rows
from jobs.model import covered, read_image
from pipeline.corpus import open_corpus
from pipeline.picture import Picture
from pipeline.shards.read import read_index, read_sample
from schemas.caption import render
from schemas.clip import Perspective
from schemas.sample import Annotation
from schemas.timeline import LATENTS_PER_CHUNK
from trainer.config import Geometry

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
KNOWN = (Perspective.FIRST, Perspective.THIRD)
_MARKER = "corpus.json"


@dataclass(frozen=True)
class Start:
    """image: uint8 [H, W, 3]."""

    name: str
    image: npt.NDArray[np.uint8]
    perspective: Perspective
    prompt: str

    def case(self, name: str, rows: Rows) -> Case:
        """Rows from this start, under its one prompt."""
        chunks = len(rows) // LATENTS_PER_CHUNK
        return Case(name, self.image, self.perspective, rows, (self.prompt,) * chunks)


@dataclass(frozen=True)
class StartOptions:
    """split: of a corpus. prompt, perspective: of pictures; a text NAME.txt beside NAME.png goes first."""

    split: str = "val"
    prompt: str = ""
    perspective: Perspective = Perspective.FIRST


def read_starts(place: str, count: int, geometry: Geometry, options: StartOptions) -> tuple[Start, ...]:
    """At most `count` starts of a corpus (folder or URL) or a folder of pictures, in order of their names, as
    pictures of the model's size.

    Raises EvaluationError where there is none, or a picture has no prompt.
    """
    if "://" in place or (Path(place) / _MARKER).is_file():
        found = tuple(islice(_of_corpus(place, options), count))
        if not found:
            raise EvaluationError(
                f"{place} has no clip of split {options.split!r} whose perspective is known: give --split"
            )
        return _sized(found, geometry)
    if not Path(place).is_dir():
        raise EvaluationError(f"--starts {place}: neither a corpus nor a folder of pictures")
    pictures = sorted(p for p in Path(place).iterdir() if p.suffix.lower() in PICTURES)[:count]
    if not pictures:
        raise EvaluationError(f"--starts {place} holds no picture ({', '.join(PICTURES)})")
    return _sized([_of_picture(p, options) for p in pictures], geometry)


def _sized(starts: Iterable[Start], geometry: Geometry) -> tuple[Start, ...]:
    return tuple(replace(start, image=covered(start.image, geometry)) for start in starts)


def _of_picture(path: Path, options: StartOptions) -> Start:
    said = path.with_suffix(".txt")
    prompt = said.read_text().strip() if said.is_file() else options.prompt
    if not prompt:
        raise EvaluationError(f"{path} has no prompt: write {said.name} beside it, or give --prompt")
    return Start(path.stem, read_image(path, "--starts"), options.perspective, prompt)


def _of_corpus(url: str, options: StartOptions) -> Iterator[Start]:
    corpus = open_corpus(url)
    columns = ["sample_id", "split", "perspective", "media", "annotations"]
    rows = read_index(corpus, columns).sort_by("sample_id").to_pylist()
    for row in rows:
        if row["split"] != options.split or row["perspective"] not in KNOWN:
            continue
        about = Annotation.model_validate_json(read_sample(corpus, row["annotations"])["json"])
        image = first_frame(read_sample(corpus, row["media"])["mp4"])
        prompt = render(about.caption, about.perspective, 0)
        yield Start(row["sample_id"], image, about.perspective, prompt)


def first_frame(video: bytes) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3]: frame 0, which is entry 0 of the grid and latent 0."""
    container: Any
    with av.open(io.BytesIO(video)) as container:
        frame = next(container.decode(video=0))
        return np.array(Picture(frame, VideoReformatter()).rgb, np.uint8)

"""Pictures to start from: the first frames of a corpus's clips, or a folder of pictures."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import av
import av.error
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
SPLIT = "val"
"""Of a corpus: what no training reads."""
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
    """split: of a corpus, val if not given. perspective: of pictures, first person if not given. prompt: of
    starts that have none of their own; a picture's is NAME.txt beside NAME.png, a clip's is its caption."""

    split: str | None = None
    prompt: str = ""
    perspective: Perspective | None = None


def is_corpus(place: str) -> bool:
    return "://" in place or (Path(place) / _MARKER).is_file()


def read_starts(place: str, count: int, geometry: Geometry, options: StartOptions) -> tuple[Start, ...]:
    """At most `count` starts of a corpus (folder or URL) or a folder of pictures, in order of their names, as
    pictures of the model's size.

    Raises EvaluationError where there is none, one has no prompt, or an option is for starts of another kind.
    """
    if is_corpus(place):
        if options.perspective is not None:
            raise EvaluationError(f"--perspective: clips of {place} have one each: leave it out")
        found = [*islice(_of_corpus(place, options), count)]
    elif not Path(place).is_dir():
        raise EvaluationError(f"--starts {place}: neither a corpus nor a folder of pictures")
    elif options.split is not None:
        raise EvaluationError(f"--split: {place} is a folder of pictures, which has none: leave it out")
    else:
        found = _of_pictures(Path(place), count, options)
    return tuple(replace(start, image=covered(start.image, geometry)) for start in found)


def _of_pictures(folder: Path, count: int, options: StartOptions) -> list[Start]:
    pictures = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
    if not pictures:
        raise EvaluationError(f"--starts {folder} holds no picture ({', '.join(PICTURES)})")
    for one, other in pairwise(pictures):
        if one.stem == other.stem:
            raise EvaluationError(f"--starts: {one} and {other.name} are two starts of one name: rename one")
    return [_of_picture(p, options) for p in pictures[:count]]


def _of_picture(path: Path, options: StartOptions) -> Start:
    said = path.with_suffix(".txt")
    try:
        prompt = said.read_text("utf-8").strip() if said.is_file() else options.prompt
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{said} is no text in UTF-8: {error.reason} at byte {error.start}") from None
    if not prompt:
        raise EvaluationError(f"{path} has no prompt: write {said.name} beside it, or give --prompt")
    return Start(path.stem, read_image(path, "--starts"), options.perspective or Perspective.FIRST, prompt)


def _of_corpus(url: str, options: StartOptions) -> Iterator[Start]:
    """Raises EvaluationError where there is none."""
    split, found = options.split or SPLIT, False
    corpus = open_corpus(url)
    columns = ["sample_id", "split", "perspective", "media", "annotations"]
    rows = read_index(corpus, columns).sort_by("sample_id").to_pylist()
    for row in rows:
        if row["split"] != split or row["perspective"] not in KNOWN:
            continue
        found = True
        about = Annotation.model_validate_json(read_sample(corpus, row["annotations"])["json"])
        try:
            image = first_frame(read_sample(corpus, row["media"])["mp4"])
        except (av.error.FFmpegError, IndexError, StopIteration):  # no video, or one without a frame
            raise EvaluationError(f"{url}: clip {row['sample_id']} has no frame that can be read") from None
        prompt = render(about.caption, about.perspective, 0) or options.prompt
        if not prompt:
            raise EvaluationError(
                f"{url}: clip {row['sample_id']} has no caption at its start: give --prompt"
            )
        yield Start(row["sample_id"], image, about.perspective, prompt)
    if not found:
        raise EvaluationError(
            f"{url} has no clip of split {split!r} whose perspective is known: give --split"
        )


def first_frame(video: bytes) -> npt.NDArray[np.uint8]:
    """uint8 [H, W, 3]: frame 0, which is entry 0 of the grid and latent 0."""
    container: Any
    with av.open(io.BytesIO(video)) as container:
        frame = next(container.decode(video=0))
        return np.array(Picture(frame, VideoReformatter()).rgb, np.uint8)

"""Recorded clips that come back to where they were: what a perfect memory would score, and cases to play.

Two frames show the same view when their poses are the same and they lie 2 seconds apart or more. Poses that
drift find no such pairs, or wrong ones, so only those that a game gave are taken.
Source: spec/worldplay2.md j.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jobs.evaluate.stats import Floats
from jobs.evaluate.world import Case, EvaluationError, Frames, Rows
from jobs.model import covered
from pipeline.corpus import open_corpus
from pipeline.frames import frame_pass
from pipeline.picture import Picture
from pipeline.pose.given import Given
from pipeline.shards.read import read_index, read_sample
from pipeline.store import Store
from schemas.caption import render_latents
from schemas.sample import Annotation
from schemas.timeline import GRID_RATE, LATENTS_PER_CHUNK, chunk_latents
from trainer.config import Geometry

Ints = npt.NDArray[np.int64]

APART = 2 * GRID_RATE
"""Grid frames (2 s) that lie between two frames of a pair at least."""
SAME_DEG, SAME_STEP = 1.0, 0.25
"""A view is the same within a degree and a quarter of the median step between moving frames. Of 90
pairs of loop01 and 71 of loop04 half lie within 0.003 of a step and nine of ten within 0.17."""
FEWEST = 8
"""Pairs without which a clip is no loop: half a second. loop03, which looks the other way on its way back,
has 13 at its end; nav01 and nonloop01, which do not come back, have 3 at most."""


@dataclass(frozen=True)
class Pairs:
    """Frames that show the same view, in order of the later ones. first, later: int64 [P]."""

    first: Ints
    later: Ints

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class RecordedLoop:
    """case: what the player did. frames: uint8 [4T-3, H, W, 3], what the game showed."""

    case: Case
    frames: Frames
    pairs: Pairs


@dataclass(frozen=True)
class Recording:
    """A world that shows what was recorded, whatever its rows: the identity control."""

    loops: tuple[RecordedLoop, ...]
    name: str = "recorded"

    def play(self, case: Case, seed: int) -> Iterator[Frames]:
        """Raises KeyError on a case that was not recorded."""
        found = {loop.case.name: loop.frames for loop in self.loops}
        frames = found[case.name]
        yield frames[: GRID_RATE - 3]
        for start in range(GRID_RATE - 3, len(frames), GRID_RATE):
            yield frames[start : start + GRID_RATE]


def same_views(rotation: Floats, position: Floats, apart: int = APART) -> Pairs:
    """For every frame the earlier one with the nearest pose, if that is the same one and was left between.

    rotation: [F, 3, 3] camera-to-world; position: [F, 3]; NaN where not known.
    """
    step = np.linalg.norm(np.diff(position, axis=0), axis=1)
    moving = step[np.isfinite(step) & (step > 0)]
    reach = SAME_STEP * float(np.median(moving)) if len(moving) else 1.0
    first, later = [], []
    for f in range(apart, len(position)):
        far = np.linalg.norm(position[:f] - position[f], axis=1) / reach
        trace = np.einsum("nij,ij->n", rotation[:f], rotation[f])
        turned = np.degrees(np.arccos(np.clip((trace - 1) / 2, -1, 1))) / SAME_DEG
        off = np.where(np.isfinite(far + turned), np.maximum(far, turned), np.inf)
        best = int(np.argmin(off[: f - apart + 1]))
        if off[best] <= 1 and (off[best:] > 1).any():
            first.append(best)
            later.append(f)
    return Pairs(np.array(first, np.int64), np.array(later, np.int64))


@dataclass(frozen=True)
class RecordedLoops:
    """Loops that were found; their pictures are read one loop at a time. clips: a row of the index, what is
    known of the clip, its action rows, its grid and its pairs. prompt: of clips without a caption."""

    corpus: Store
    geometry: Geometry
    prompt: str
    clips: tuple[tuple[dict[str, Any], Annotation, Rows, Ints, Pairs], ...]

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def latents(self) -> int:
        """Of the longest."""
        return max(len(rows) for _, _, rows, _, _ in self.clips)

    def __iter__(self) -> Iterator[RecordedLoop]:
        for row, about, rows, grid, pairs in self.clips:
            frames = grid_frames(read_sample(self.corpus, row["media"])["mp4"], grid, self.geometry)
            prompts = _prompts(about)
            if not any(prompts):
                prompts = (self.prompt,) * len(prompts)
            case = Case(row["sample_id"], frames[0], about.perspective, rows, prompts)
            yield RecordedLoop(case, frames, pairs)

    @property
    def uncaptioned(self) -> list[str]:
        """Clips whose every chunk has an empty prompt of its own."""
        return [row["sample_id"] for row, about, _, _, _ in self.clips if not any(_prompts(about))]


def _prompts(about: Annotation) -> tuple[str, ...]:
    """Of each chunk."""
    duration = Fraction(about.frames * about.fps_den, about.fps_num)
    return tuple(
        render_latents(about.caption, about.perspective, duration, chunk_latents(chunk))
        for chunk in range(about.latent_frames // LATENTS_PER_CHUNK)
    )


def recorded_loops(url: str, geometry: Geometry, most: int, prompt: str = "") -> RecordedLoops:
    """Loops among the clips of a corpus whose poses the game gave and whose rows are all known, at most
    `most`, by id. geometry: size of the pictures. prompt: of clips without a caption. Raises EvaluationError
    where there is none, with why.
    """
    corpus = open_corpus(url)
    columns = ["sample_id", "media", "annotations"]
    found: list[tuple[dict[str, Any], Annotation, Rows, Ints, Pairs]] = []
    left_out: Counter[str] = Counter()
    for row in read_index(corpus, columns).sort_by("sample_id").to_pylist():
        if len(found) >= most:
            break
        said = read_sample(corpus, row["annotations"])
        about = Annotation.model_validate_json(said["json"])
        rows, grid, poses = (np.load(io.BytesIO(said[n])) for n in ("actions.npy", "grid.npy", "poses.npy"))
        if about.pose_estimator != Given.name:
            left_out["without poses of the game"] += 1
            continue
        if not len(grid) or not np.isfinite(rows).all():
            left_out["with actions that are not known"] += 1
            continue
        at = poses[grid].astype(np.float64)
        pairs = same_views(at[:, :, :3], at[:, :, 3])
        if len(pairs) < FEWEST:
            left_out["that never come back to where they were"] += 1
            continue
        found.append((row, about, rows, grid, pairs))
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "it has no clip"
        raise EvaluationError(f"--loops {url}: none of {left_out.total()} clips is a loop: {why}")
    return RecordedLoops(corpus, geometry, prompt, tuple(found))


def grid_frames(video: bytes | Path, grid: Ints, geometry: Geometry) -> Frames:
    """The pictures of the grid, of the model's size: uint8 [G, H, W, 3]."""
    wanted: dict[int, list[int]] = {}
    for entry, frame in enumerate(grid):
        wanted.setdefault(int(frame), []).append(entry)
    out = np.zeros((len(grid), geometry.height, geometry.width, 3), np.uint8)

    class Take:
        def see(self, index: int, picture: Picture) -> None:
            for entry in wanted.get(index, ()):
                out[entry] = covered(picture.rgb, geometry)

    if isinstance(video, Path):
        frame_pass(video, [Take()])
        return out
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(video)
        file.flush()
        frame_pass(Path(file.name), [Take()])
    return out

"""What a sequence of tokens is made of: one `Frame` for each latent in it, and who may see whom.

A layout is a plain value, known before any tensor exists. Positions, action rows, masks, cache checks and
padding all follow from it. Source: spec/worldplay2.md a.4, a.5, d.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import torch
from torch import Tensor

from trainer.config import LATENTS_PER_PAIR, Grid, Preset


class LayoutError(ValueError):
    """A sequence that the model does not know."""


class Kind(IntEnum):
    SINK = 0  # the first latents of the video, full resolution, clean
    CMP = 1  # one compressed latent: two latents of the history
    TMP = 2  # the last latents before a chunk, full resolution, clean
    PRED = 3  # a latent that is being generated
    PAD = 4  # brings a sequence to the length of its bucket; seen by nobody else


class Rule(StrEnum):
    """Who sees whom: everything (stages 1 and 2), or the past of the own chunk (from stage 3 on)."""

    FULL = "full"
    CAUSAL = "causal"


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens of one latent.

    chunk: CMP the chunk that it stands for; TMP, PRED the chunk that is being generated; SINK 0.
    time: position on the temporal axis, and row of the action table: the latent's own index for full
    resolution, 2j for compressed latent j.
    """

    kind: Kind
    chunk: int
    time: int
    grid: Grid


@dataclass(frozen=True)
class Run:
    """Tokens [start, stop): `frames` whole frames of one grid, from frame `first` on."""

    first: int
    frames: int
    start: int
    stop: int

    @property
    def last(self) -> int:
        return self.first + self.frames


@dataclass(frozen=True)
class Layout:
    """Frames in the order of their tokens. Predicted frames come last."""

    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        kinds = [frame.kind for frame in self.frames]
        if any(kind is not Kind.PRED for kind in kinds[len(kinds) - kinds.count(Kind.PRED) :]):
            raise LayoutError("predicted frames must be the last of a sequence")

    def __add__(self, other: Layout) -> Layout:
        return Layout(self.frames + other.frames)

    def __len__(self) -> int:
        return len(self.frames)

    @cached_property
    def tokens(self) -> int:
        return sum(frame.grid.tokens for frame in self.frames)

    @cached_property
    def times(self) -> tuple[int, ...]:
        return tuple(frame.time for frame in self.frames)

    def count(self, kind: Kind) -> int:
        return sum(frame.kind is kind for frame in self.frames)

    def only(self, *kinds: Kind) -> Layout:
        return Layout(tuple(frame for frame in self.frames if frame.kind in kinds))

    def without(self, kind: Kind) -> Layout:
        return Layout(tuple(frame for frame in self.frames if frame.kind is not kind))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The sequence as stretches of one grid: what a value per frame is broadcast over."""
        runs: list[Run] = []
        token = 0
        for index, frame in enumerate(self.frames):
            end = token + frame.grid.tokens
            if runs and self.frames[runs[-1].first].grid == frame.grid:
                runs[-1] = Run(runs[-1].first, runs[-1].frames + 1, runs[-1].start, end)
            else:
                runs.append(Run(index, 1, token, end))
            token = end
        return tuple(runs)

    def frame_of_token(self) -> Tensor:
        """[N] int64: the frame that each token belongs to."""
        sizes = torch.tensor([frame.grid.tokens for frame in self.frames], dtype=torch.int64)
        return torch.arange(len(self.frames)).repeat_interleave(sizes)

    def positions(self) -> Tensor:
        """[N, 3] int64: time, row, column of each token. A compressed latent counts on its own grid.

        Source: spec/worldplay2.md a.4.
        """
        parts = []
        for frame in self.frames:
            rows, cols = torch.meshgrid(
                torch.arange(frame.grid.rows), torch.arange(frame.grid.cols), indexing="ij"
            )
            time = torch.full((frame.grid.tokens,), frame.time)
            parts.append(torch.stack([time, rows.flatten(), cols.flatten()], dim=1))
        return torch.cat(parts)


NOTHING = Layout(())


def visible(queries: Layout, keys: Layout, rule: Rule) -> Tensor:
    """[Lq, Lk] bool: may the frames of `queries` attend to the frames of `keys`?

    CAUSAL, with n the chunk of a TMP or PRED frame:
      SINK sees SINK; CMP of chunk j sees SINK and CMP of chunks <= j;
      TMP sees SINK, CMP of chunks < n, TMP of n; PRED sees those and PRED of n;
      chunk 0 is generated without memory: it sees no SINK. PAD sees PAD in both rules.
    Every query sees at least its own frame, so that no row is empty when `keys` ends with `queries`.
    Source: spec/worldplay2.md a.5, d; spec/faults.md F8.
    """
    query, key = _columns(queries)[:, :, None], _columns(keys)[:, None, :]
    kq, kk = query[0], key[0]
    pads = (kq == Kind.PAD) & (kk == Kind.PAD)
    if rule is Rule.FULL:
        return pads | ((kq != Kind.PAD) & (kk != Kind.PAD))
    nq, nk = query[1], key[1]
    generating = (kq == Kind.TMP) | (kq == Kind.PRED)
    sink = (kk == Kind.SINK) & ((kq == Kind.SINK) | (kq == Kind.CMP) | (generating & (nq > 0)))
    compressed = (kk == Kind.CMP) & (((kq == Kind.CMP) & (nk <= nq)) | (generating & (nk < nq)))
    anchor = (kk == Kind.TMP) & generating & (nk == nq)
    own = (kk == Kind.PRED) & (kq == Kind.PRED) & (nk == nq)
    return pads | sink | compressed | anchor | own


def _columns(layout: Layout) -> Tensor:
    """[2, L]: kind and chunk of every frame."""
    return torch.tensor(
        [[f.kind for f in layout.frames], [f.chunk for f in layout.frames]], dtype=torch.int64
    )


def sink(preset: Preset) -> Layout:
    """The first latents of the video."""
    return Layout(tuple(Frame(Kind.SINK, 0, k, preset.grid) for k in range(preset.sink)))


def compressed(preset: Preset, first: int, stop: int) -> Layout:
    """The compressed latents of chunks [first, stop)."""
    pairs = preset.chunk // LATENTS_PER_PAIR
    return Layout(
        tuple(
            Frame(Kind.CMP, j // pairs, LATENTS_PER_PAIR * j, preset.low_grid)
            for j in range(first * pairs, stop * pairs)
        )
    )


def anchor(preset: Preset, chunk: int) -> Layout:
    """The last latents before a chunk; nothing before chunk 0."""
    start = chunk * preset.chunk
    times = range(start - preset.temporal, start) if chunk else range(0)
    return Layout(tuple(Frame(Kind.TMP, chunk, k, preset.grid) for k in times))


def target(preset: Preset, first: int, stop: int) -> Layout:
    """The latents of chunks [first, stop), to be predicted."""
    times = range(first * preset.chunk, stop * preset.chunk)
    return Layout(tuple(Frame(Kind.PRED, k // preset.chunk, k, preset.grid) for k in times))


def memory(preset: Preset, chunks: int) -> Layout:
    """[sink | compressed | anchor] of a history of whole chunks; nothing for an empty history."""
    if not chunks:
        return NOTHING
    return sink(preset) + compressed(preset, 0, chunks) + anchor(preset, chunks)


def clip(preset: Preset, history: int, chunks: int) -> Layout:
    """Stages 1 and 2, and the score models: `chunks` chunks after a history of `history` chunks, to be seen
    with `Rule.FULL`. Source: spec/worldplay2.md a.5 (BI mode), d (teacher)."""
    return memory(preset, history) + target(preset, history, history + chunks)


def frame_queries(preset: Preset, history: int, times: tuple[int, ...]) -> Layout:
    """Stage 2a: chosen latents of the history, to be predicted at their own positions from the compressed
    history alone, with `Rule.FULL`. Source: spec/worldplay2.md c.4."""
    if any(not 0 <= k < history * preset.chunk for k in times):
        raise LayoutError(f"latents {times} are not all in a history of {history} chunks")
    return compressed(preset, 0, history) + Layout(
        tuple(Frame(Kind.PRED, k // preset.chunk, k, preset.grid) for k in times)
    )


def teacher_forced(preset: Preset, history: int, chunks: int, compressed_frames: int | None = None) -> Layout:
    """Stage 3: [S | C | T.. | P..], `chunks` target chunks after `history` chunks, in one causal pass.

    compressed_frames: length to which the compressed part is padded, so that a few lengths serve all
    histories. Source: spec/worldplay2.md d.
    """
    stop = history + chunks
    past = compressed(preset, 0, stop - 1)
    padding = 0 if compressed_frames is None else compressed_frames - len(past)
    if padding < 0:
        raise LayoutError(f"{len(past)} compressed latents do not fit in {compressed_frames}")
    pads = Layout((Frame(Kind.PAD, 0, 0, preset.low_grid),) * padding)
    anchors = NOTHING
    for chunk in range(history, stop):
        anchors = anchors + anchor(preset, chunk)
    return sink(preset) + past + pads + anchors + target(preset, history, stop)


def prefill(preset: Preset, done: int, known: int = 0) -> Layout:
    """The memory tokens to run once `done` chunks are complete, of which `known` are cached already:
    [S | C | T] the first time, then [new C | new T]. Source: spec/worldplay2.md a.5."""
    if not 0 <= known < done:
        raise LayoutError(f"nothing to prefill: {done} chunks are complete and {known} are cached")
    first = sink(preset) if known == 0 else NOTHING
    return first + compressed(preset, known, done) + anchor(preset, done)


def chunk_prompts(layout: Layout) -> tuple[int, ...]:
    """The chunk whose prompt each frame reads: memory the one that it was made with, targets their own.

    Source: spec/worldplay2.md a.5, l.7.
    """
    return tuple(f.chunk - 1 if f.kind is Kind.TMP else f.chunk for f in layout.frames)

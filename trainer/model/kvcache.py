"""What is kept between forward passes, as immutable values: self-attention memory and text.

A cache is a tuple of segments, never one growing tensor: adding a chunk copies nothing, a cache at chunk i
shares its tensors with every later one, and replay takes a prefix for free. The layers join the segments
when they attend, one layer at a time. Source: spec/worldplay2.md a.2, a.5, g.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.model.layout import NOTHING, Kind, Layout


class CacheError(ValueError):
    """A segment that does not continue the cache, or a cache that does not belong to the sequence."""


class HorizonError(CacheError):
    """More latents than the weights can place."""


def check_horizon(latents: int, limit: int | None) -> None:
    """Raises HorizonError when a video of so many latents is longer than the weights can place."""
    if limit is not None and latents > limit:
        raise HorizonError(
            f"{latents} latents, but these weights place at most {limit}: ask for a shorter video"
        )


@dataclass(frozen=True)
class Segment:
    """Keys and values of a stretch of memory. keys, values: one [B, N, heads, d] a layer; keys are turned."""

    layout: Layout
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        lengths = {tensor.shape[1] for tensor in self.keys + self.values}
        if len(self.keys) != len(self.values) or lengths != {self.layout.tokens}:
            raise CacheError(
                f"segment of {self.layout.tokens} tokens met {len(self.keys)} keys and {len(self.values)} "
                f"values of {sorted(lengths)} tokens"
            )

    def part(self, first: int, stop: int) -> Segment:
        """Frames [first, stop), copied: a view would keep the dropped frames in memory."""
        frames = self.layout.frames
        start = Layout(frames[:first]).tokens
        end = start + Layout(frames[first:stop]).tokens
        return Segment(
            Layout(frames[first:stop]),
            tuple(tensor[:, start:end].clone() for tensor in self.keys),
            tuple(tensor[:, start:end].clone() for tensor in self.values),
        )


@dataclass(frozen=True)
class KvCache:
    """[sink | compressed | anchor]: a prefix that only grows, and a tail that is replaced."""

    prefix: tuple[Segment, ...] = ()
    tail: Segment | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.prefix if self.tail is None else (*self.prefix, self.tail)

    @property
    def layout(self) -> Layout:
        return Layout(tuple(frame for segment in self.segments for frame in segment.layout.frames))

    @property
    def chunks(self) -> int:
        """Chunks of history in the prefix."""
        return self.prefix[-1].layout.frames[-1].chunk + 1 if self.prefix else 0

    @property
    def bytes(self) -> int:
        tensors = [t for s in self.segments for t in s.keys + s.values]
        return sum(t.numel() * t.element_size() for t in tensors)

    def without_tail(self) -> KvCache:
        """What a prefill sees: the old anchor is gone."""
        return KvCache(self.prefix)

    def layer(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of one layer, segment by segment."""
        return [s.keys[index] for s in self.segments], [s.values[index] for s in self.segments]

    def extend(self, fresh: Segment) -> KvCache:
        """The cache after a prefill: new sink and compressed frames join the prefix, the anchors become
        the tail. Raises CacheError when the compressed frames do not continue the prefix."""
        frames = fresh.layout.frames
        stop = next((i for i, f in enumerate(frames) if f.kind is Kind.TMP), len(frames))
        if any(f.kind not in (Kind.SINK, Kind.CMP) for f in frames[:stop]) or any(
            f.kind is not Kind.TMP for f in frames[stop:]
        ):
            raise CacheError("a prefill is [sink | compressed | anchor]; other frames cannot be cached")
        if stop:
            compressed = fresh.layout.only(Kind.CMP).frames
            if not compressed or compressed[0].chunk != self.chunks:
                raise CacheError(f"the next chunk of this cache is {self.chunks}: prefill from there")
            if (frames[0].kind is Kind.SINK) != (not self.prefix):
                raise CacheError("the sink is cached with the first chunk, and only then")
        prefix = (*self.prefix, fresh.part(0, stop)) if stop else self.prefix
        return KvCache(prefix, fresh.part(stop, len(frames)) if stop < len(frames) else None)

    def at(self, chunk: int) -> KvCache:
        """The prefix as it was when `chunk` was about to be generated, without its anchor.

        Raises CacheError when the cache was filled in steps that do not end there.
        """
        kept = tuple(s for s in self.prefix if s.layout.frames[-1].chunk < chunk)
        cache = KvCache(kept)
        if cache.chunks != chunk:
            raise CacheError(f"the cache holds no step that ends before chunk {chunk}")
        return cache


EMPTY = KvCache()


def cache_layout(cache: KvCache | None) -> Layout:
    return NOTHING if cache is None else cache.layout


@dataclass(frozen=True)
class RawText:
    """Encoded prompts, [B, P, n, text_dim], n <= text_len; padded positions are zero."""

    embeddings: Tensor


@dataclass(frozen=True)
class ProjectedText:
    """Prompts after the text MLP: [B, P, text_len, D]."""

    tokens: Tensor


@dataclass(frozen=True)
class CrossCache:
    """Cross-attention keys and values of prompts: one [B, P, text_len, heads, d] a layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


Text = RawText | ProjectedText | CrossCache

"""Clips that show the same footage: found among a whole corpus, and told apart from two visits to one place.

Candidates: the hashes are sorted four times, each time beginning with another 16 of their 64 bits, and each
is compared with its next neighbours: O(N log N) for N hashes, whatever their values, where pairs in common
buckets would grow with the square of a common picture (a logo, a menu). A pair of clips that meets twice is
then compared hash by hash: it shows the same footage where a run of hashes, at one shift in time, agrees.
Source: docs/selection.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.quality.hashes import Bits

TURNS = (0, 16, 32, 48)
NEIGHBOURS = 8
NEAR = 12
"""Bits in which hashes of one picture differ at most. Re-encodes of the pack: 0-6, at 64x36 pixels and crf 38
up to 12. Of 1,728 pairs of different clips, some of one map, none has three that agree in a run."""
MEETINGS = 2
RUN = 3
"""Fewest hashes that agree in a run."""
AGREE = 0.5
"""Share of the hashes in the time that both clips cover."""
SHIFT_MS = 200
_BLOCK = 1 << 20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HashTable:
    """Hashes of C clips. start: int64 [C + 1], clip c has rows start[c] to start[c + 1]; ms: uint32 [N] and
    bits: uint64 [N], by clip and time."""

    start: Ints
    ms: npt.NDArray[np.uint32]
    bits: Bits

    def of(self, clip: int) -> tuple[npt.NDArray[np.int64], Bits]:
        rows = slice(self.start[clip], self.start[clip + 1])
        return self.ms[rows].astype(np.int64), self.bits[rows]


@dataclass(frozen=True, slots=True)
class Shared:
    """Footage that two clips share. hashes: how many agree; ms: how long it lasts."""

    hashes: int
    ms: int


Edges = dict[int, dict[int, Shared]]
"""By clip, the clips that it shares footage with; both ways."""


def find_shared(table: HashTable) -> Edges:
    """Every pair of clips that shows the same footage, by their numbers."""
    edges: Edges = {}
    for a, b in _candidates(table):
        found = compare(*table.of(a), *table.of(b))
        if found is not None:
            edges.setdefault(a, {})[b] = found
            edges.setdefault(b, {})[a] = found
    return edges


def compare(ms_a: Ints, bits_a: Bits, ms_b: Ints, bits_b: Bits) -> Shared | None:
    """What two clips share, or None. ms: int64, increasing; bits: uint64.

    Both run at one speed: the shift in time at which most hashes agree is tried.
    """
    first, second = np.nonzero(np.bitwise_count(bits_a[:, None] ^ bits_b[None, :]) <= NEAR)
    if len(first) < RUN:
        return None
    shifts = ms_b[second] - ms_a[first]
    ordered = np.sort(shifts)
    inside = np.searchsorted(ordered, ordered + 2 * SHIFT_MS, side="right") - np.arange(len(ordered))
    at = int(np.argmax(inside))
    shift = int(np.median(ordered[at : at + inside[at]]))
    fits = np.abs(shifts - shift) <= SHIFT_MS
    agree = min(len(np.unique(first[fits])), len(np.unique(second[fits])))
    begin = max(int(ms_a[0]), int(ms_b[0]) - shift) - SHIFT_MS
    end = min(int(ms_a[-1]), int(ms_b[-1]) - shift) + SHIFT_MS
    covered = min(_within(ms_a, begin, end), _within(ms_b, begin + shift, end + shift))
    if agree < RUN or agree < AGREE * covered:
        return None
    return Shared(agree, end - begin)


def _within(ms: Ints, begin: int, end: int) -> int:
    return int(np.searchsorted(ms, end, side="right") - np.searchsorted(ms, begin))


def _candidates(table: HashTable) -> list[tuple[int, int]]:
    """Pairs of clips (a < b) of which at least two hashes met as neighbours."""
    owner = np.repeat(np.arange(len(table.start) - 1, dtype=np.int32), np.diff(table.start))
    found = [pair for turn in TURNS for pair in _met(table.bits, owner, turn)]
    if not found:
        return []
    keys, rows = np.concatenate([k for k, _ in found]), np.concatenate([r for _, r in found])
    order = np.lexsort((rows, keys))
    keys, rows = keys[order], rows[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = (np.diff(keys) != 0) | (np.diff(rows) != 0)
    pairs, meetings = np.unique(keys[new], return_counts=True)
    chosen = pairs[meetings >= MEETINGS]
    return list(zip((chosen >> 32).tolist(), (chosen & 0xFFFFFFFF).tolist(), strict=True))


def _met(bits: Bits, owner: npt.NDArray[np.int32], turn: int) -> Iterator[tuple[Ints, Ints]]:
    """(pairs, rows): a pair is its first clip << 32 | its second; rows: int64, the hash of the first.

    Sorted in 16 parts by their leading bits, so that a copy of a part is all the memory it takes.
    """
    leading = np.empty(len(bits), np.uint8)
    for start in range(0, len(bits), _BLOCK):
        block = slice(start, start + _BLOCK)
        leading[block] = (bits[block] >> np.uint64(60 - turn)) & np.uint64(15)
    for part in range(16):
        rows = np.flatnonzero(leading == part)
        turned = bits[rows]
        if turn:
            turned = (turned << np.uint64(turn)) | (turned >> np.uint64(64 - turn))
        order = np.argsort(turned, kind="stable")
        turned, rows = turned[order], rows[order]
        clips = owner[rows]
        for step in range(1, NEIGHBOURS + 1):
            near = np.bitwise_count(turned[step:] ^ turned[:-step]) <= NEAR
            at = np.flatnonzero(near & (clips[step:] != clips[:-step]))
            one, two = clips[at].astype(np.int64), clips[at + step].astype(np.int64)
            first = np.where(one < two, rows[at], rows[at + step])
            yield np.minimum(one, two) << 32 | np.maximum(one, two), first


def drop(
    table: HashTable, edges: Edges, eligible: npt.NDArray[np.bool_], split: Sequence[str], least: float
) -> dict[int, int]:
    """Clips to leave out, each with the clip that stands for it. Clips are numbered in the order in which the
    first is kept.

    A clip goes when it shares at least `least` of its own footage with a clip that is kept, and when it hangs
    together, over any number of shared pieces, with a kept clip of another split. Clips that are not eligible
    are never kept, and join what they share footage with all the same.
    """
    kept: set[int] = set()
    instead: dict[int, int] = {}
    group = _groups(edges)
    first: dict[int, int] = {}
    for clip in sorted(edges):
        if not eligible[clip]:
            continue
        near = edges[clip]
        # In a long row of copies each meets the next few only: what stands for those is compared too.
        rivals = {n for n in near if n in kept} | {instead[n] for n in near if n in instead}
        ms, bits = table.of(clip)
        for rival in sorted(rivals):
            shared = near.get(rival) or compare(ms, bits, *table.of(rival))
            if shared is not None and shared.ms >= least * (ms[-1] - ms[0]):
                instead[clip] = rival
                break
        else:
            head = first.setdefault(group[clip], clip)
            if split[head] != split[clip]:
                instead[clip] = head
            else:
                kept.add(clip)
    return instead


def _groups(edges: Edges) -> dict[int, int]:
    """Clips that hang together have one number."""
    group: dict[int, int] = {}
    for clip in sorted(edges):
        reached = [] if clip in group else [clip]
        while reached:
            at = reached.pop()
            if at not in group:
                group[at] = clip
                reached += [n for n in edges[at] if n not in group]
    return group

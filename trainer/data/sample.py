"""From the members of a sample to its place in a batch: only what the window needs is decoded.

Source: DESIGN 2; spec/worldplay2.md a.3, a.6, c.2, k, l.7, n.1, n.2.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.action import AXES, PERSPECTIVE
from schemas.caption import (
    SENTENCES,
    SUBSETS,
    CaptionError,
    IntervalEvent,
    Sentence,
    StructuredCaption,
    render,
)
from schemas.clip import Perspective
from schemas.errors import UserError
from schemas.latents import CHANNELS, SEGMENT, TextNote, segment_entries
from schemas.timeline import CAPTION_INTERVAL_S, GRID_RATE, Span, interval_at, latent_entries
from trainer.config import LATENTS_PER_PAIR, Preset
from trainer.curriculum import Objective, Stage
from trainer.data.batch import Batch
from trainer.data.plan import Draw, latents_read, word

Buffer = bytes | memoryview
Members = Mapping[str, Mapping[str, Buffer]]
"""Bytes of a sample's members, by family and suffix."""
"""Of a sample, by family and suffix: JSON as bytes, arrays as either."""
Reader = Callable[[int, tuple[str, ...]], Members]
"""(row of the corpus index, families) -> members; one range read a family."""
FAMILIES = ("annotations", "latents", "text")
"""What training reads; the media are for people, and for codecs to come."""

_HEADER = 10  # bytes of a .npy file before its header: magic, version, length of the header
MASK = 4
"""Channels of the condition that say which latent holds the image."""
_PROPER = SUBSETS[:-1]
"""What is left of a prompt that lacks fields."""


def members_read(stage: Stage) -> dict[str, tuple[str, ...]]:
    """What a stage reads of a sample. In each family they are neighbours: half of the latents' bytes are
    independent segments, which stage 1 alone reads, and it reads nothing else."""
    continuous = ("hr.npy", "lr.npy", "hr_y.npy", "lr_y.npy")
    segments = ("segments.npy", "segments_y.npy", "segments_at.npy")
    latents = segments if stage.segments else continuous
    condition = ("hr_y.npy", "lr_y.npy")  # stage 5 makes its own video
    return {
        "annotations": ("json", "actions.npy"),
        "latents": condition if stage.objective is Objective.STABLE else latents,
        "text": ("text.json", "text.npy"),
    }


class SampleError(UserError):
    """A sample that does not give what a stage reads; one line that names it."""


@dataclass(frozen=True)
class Arrays:
    """Tensors of a batch of B samples, filled sample by sample; shapes as in `Batch`."""

    latents: Tensor
    condition: Tensor
    low: Tensor
    actions: Tensor

    @staticmethod
    def empty(count: int, stage: Stage, preset: Preset, history: int, new: Callable[..., Tensor]) -> Arrays:
        """Of a batch to be; its mask is written: ones at latent 0."""
        latents = latents_read(stage, preset, history)
        pairs = 0 if stage.segments else latents // LATENTS_PER_PAIR
        high, low = preset.geometry.latent, preset.geometry.low_latent
        made = Arrays(
            new(count, CHANNELS, latents, *high),
            new(count, MASK + CHANNELS, latents, *high),
            new(count, CHANNELS + MASK + CHANNELS, pairs, *low),
            new(count, latents, len(AXES)),
        )
        for part in (made.condition[:, :MASK], made.low[:, CHANNELS : CHANNELS + MASK]):
            part.zero_()
            part[:, :, :1] = 1.0
        return made


@dataclass(frozen=True)
class Told:
    """What of a sample has no fixed shape. texts: float16 [n, text_dim] of each prompt; prompts: as in
    `Batch`; negative: float16 [n', text_dim]."""

    sample: str
    texts: tuple[Tensor, ...]
    prompts: tuple[int, ...]
    negative: Tensor


def make_batch(
    draws: Sequence[Draw],
    reader: Reader,
    stage: Stage,
    preset: Preset,
    seed: int,
    new: Callable[..., Tensor] = torch.empty,
) -> Batch:
    """The batch of some draws of one history. new: float32 of a shape, any content.

    Raises SampleError where a sample does not give what the stage reads, and what the reader raises.
    """
    if len({d.history for d in draws}) != 1:
        raise ValueError("one batch has one history")
    into = Arrays.empty(len(draws), stage, preset, draws[0].history, new)
    told = [
        fill(into, slot, draw, reader(draw.row, FAMILIES), stage, preset, seed)
        for slot, draw in enumerate(draws)
    ]
    return Batch(
        positions=tuple(d.position for d in draws),
        samples=tuple(t.sample for t in told),
        history=draws[0].history,
        latents=into.latents,
        condition=into.condition,
        low=into.low,
        actions=into.actions,
        text=_padded([t.texts for t in told], new),
        prompts=told[0].prompts,  # of all: they follow from the history
        negative=told[0].negative.float(),
    )


def _padded(texts: Sequence[tuple[Tensor, ...]], new: Callable[..., Tensor]) -> Tensor:
    """[B, P, n, text_dim], with zeros behind the shorter ones."""
    longest = max(len(text) for each in texts for text in each)
    out = new(len(texts), len(texts[0]), longest, texts[0][0].shape[1])
    for b, each in enumerate(texts):
        for p, text in enumerate(each):
            out[b, p, : len(text)] = text
            out[b, p, len(text) :] = 0.0
    return out


def fill(
    into: Arrays, slot: int, draw: Draw, members: Members, stage: Stage, preset: Preset, seed: int
) -> Told:
    """Write a sample into place `slot` of the arrays. Its draws are keyed by (seed, position, role).

    Raises SampleError when the members are not those of such a sample, or too short for the draw.
    """
    # Checked when it was published, and by its checksum just now: to check it again as an Annotation takes 13
    # times as long as to read it (75 us of some 600 a sample of `small`).
    note = json.loads(bytes(members["annotations"]["json"]))
    try:
        actions = action_rows(members["annotations"]["actions.npy"])
        if stage.segments:
            entries = _fill_segment(into, slot, draw, members["latents"], actions, seed)
        else:
            entries = _fill_clip(into, slot, draw, members["latents"], actions, stage, preset)
        texts, prompts, negative = _texts(note, members["text"], draw, stage, preset, entries, seed)
    except (ValueError, KeyError, CaptionError) as error:
        why = error.args[0] if error.args else error
        size = f"{preset.geometry.height}x{preset.geometry.width}"
        raise SampleError(
            f"sample {note['sample_id']} does not give stage {stage.name} its "
            f"{into.latents.shape[2]} latents at {size}: {why}"
        ) from None
    return Told(note["sample_id"], texts, prompts, negative)


# --- latents and actions ----------------------------------------------------------------------------------


def _fill_segment(
    into: Arrays,
    slot: int,
    draw: Draw,
    members: Mapping[str, Buffer],
    actions: npt.NDArray[np.float32],
    seed: int,
) -> Span:
    """One of the independent encodes whose actions are all known. Returns the grid entries that it shows."""
    starts = array_of(members["segments_at.npy"]).tolist()
    known = [k for k, a in enumerate(starts) if _known(_segment_actions(actions, a))]
    if not known:
        raise ValueError(f"of {len(starts)} segments none has known actions throughout")
    k = known[word(seed, draw.position, "segment") % len(known)]
    _put(into.latents[slot], array_of(members["segments.npy"])[k])
    _put_extended(into.condition[slot, MASK:], array_of(members["segments_y.npy"])[k])
    into.actions[slot] = torch.from_numpy(_segment_actions(actions, starts[k]))
    entries = segment_entries(starts[k])
    return Span(entries.start, entries.stop)


def _segment_actions(actions: npt.NDArray[np.float32], start: int) -> npt.NDArray[np.float32]:
    """[32, 6]: an idle row, then the clip's rows start+1 .. start+31."""
    rows = actions[start : start + SEGMENT].copy()
    rows[0, :PERSPECTIVE] = rows[0, PERSPECTIVE + 1 :] = 0.0
    return rows


def _fill_clip(
    into: Arrays,
    slot: int,
    draw: Draw,
    members: Mapping[str, Buffer],
    actions: npt.NDArray[np.float32],
    stage: Stage,
    preset: Preset,
) -> Span:
    """The continuous encode from its first latent on. Returns the grid entries that the target shows; or the
    history, where the targets lie in it."""
    latents, pairs = into.latents.shape[2], into.low.shape[2]
    _put(into.latents[slot], array_of(members["hr.npy"])[:latents])
    _put_extended(into.condition[slot, MASK:], array_of(members["hr_y.npy"]))
    _put(into.low[slot, :CHANNELS], array_of(members["lr.npy"])[:pairs])
    _put_extended(into.low[slot, CHANNELS + MASK :], array_of(members["lr_y.npy"]))
    rows = actions[:latents]
    if not _known(rows):
        raise ValueError("not all of its actions are known")
    into.actions[slot] = torch.from_numpy(rows)
    history = 0 if stage.objective is Objective.QUERIES else preset.chunk * draw.history
    return Span(latent_entries(history).start, latent_entries(latents - 1).stop)


def action_rows(data: Buffer) -> npt.NDArray[np.float32]:
    """Action rows [T, 6]; NaN where unknown."""
    rows = array_of(data)
    if rows.dtype != np.float32 or rows.shape[1:] != (len(AXES),):
        raise ValueError(f"action rows of {rows.dtype} {rows.shape}")
    return rows.astype(np.float32)


def _known(rows: npt.NDArray[np.float32]) -> bool:
    return not np.isnan(rows).any()


def array_of(data: Buffer) -> npt.NDArray[np.generic]:
    """The array of a .npy member over the bytes that are held: nothing is copied."""
    start = _HEADER + int.from_bytes(data[_HEADER - 2 : _HEADER], "little")
    shape, dtype = _header(bytes(data[:start]))
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


@functools.lru_cache(maxsize=1024)
def _header(head: bytes) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """(shape, dtype) of the head of a .npy member. Few are different: 40 us each, 8 a sample."""
    file = io.BytesIO(head)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array member is not .npy of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran:
        raise ValueError("an array member does not lie row by row")
    return shape, dtype


def _put(into: Tensor, rows: npt.NDArray[np.generic]) -> None:
    """into: float32 [16, T, h, w]. rows: float16 [T, 16, h, w]."""
    want = (into.shape[1], into.shape[0], *into.shape[2:])
    if rows.shape != want:
        raise ValueError(f"latents of {rows.shape} where {want} are read")
    into.copy_(_tensor(rows).transpose(0, 1))


def _tensor(rows: npt.NDArray[np.generic]) -> Tensor:
    """Over the same memory where it is writable, which torch wants. Its conversion is 4 times as fast."""
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def _put_extended(into: Tensor, head: npt.NDArray[np.generic]) -> None:
    """y for any horizon: its head [n, 16, h, w], whose last latent is that of every later one."""
    stored = min(len(head), into.shape[1])
    _put(into[:, :stored], head[:stored])
    into[:, stored:] = into[:, stored - 1 : stored]


# --- prompts ----------------------------------------------------------------------------------------------


def _texts(
    note: Mapping[str, Any],
    members: Mapping[str, Buffer],
    draw: Draw,
    stage: Stage,
    preset: Preset,
    entries: Span,
    seed: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...], Tensor]:
    """(embeddings of each prompt, which of them each chunk reads, embeddings of the negative prompt)."""
    text = TextNote.model_validate_json(bytes(members["text.json"]))
    if text.width != preset.model.text_dim:
        raise ValueError(f"embeddings of {text.width} numbers, the model reads {preset.model.text_dim}")
    stored = array_of(members["text.npy"])
    count = latents_read(stage, preset, draw.history) // preset.chunk
    events = len(note["caption"]["events"])
    if stage.objective in (Objective.CLIP, Objective.QUERIES):
        intervals: tuple[int, ...] = (_interval(entries, events),)
        prompts: tuple[int, ...] = (0,) * count
    else:
        intervals, prompts = by_chunk(count, preset.chunk, events)

    def rows(at: slice) -> Tensor:
        if at.stop - at.start > preset.model.text_len:
            raise ValueError(
                f"a prompt of {at.stop - at.start} tokens, the model reads {preset.model.text_len}"
            )
        return _tensor(stored[at])

    k = text.keys.index(text.negative)
    negative = rows(slice(text.starts[k], text.starts[k] + text.tokens[k]))
    if _share(seed, draw, "text") < stage.text_drop:
        return (negative,) * len(intervals), prompts, negative
    keep = _kept_fields(seed, draw, stage.field_drop)
    return tuple(rows(text.rows(_prompt(note, i, keep))) for i in intervals), prompts, negative


def _prompt(note: Mapping[str, Any], interval: int, keep: tuple[Sentence, ...]) -> str:
    """The prompt of an interval: that of a caption which has no other."""
    said = note["caption"]
    event = IntervalEvent.model_construct(**said["events"][interval])
    caption = StructuredCaption.model_construct(**{**said, "events": (event,)})
    return render(caption, Perspective(note["perspective"]), 0, keep)


@functools.lru_cache(maxsize=4096)
def _interval(entries: Span, events: int) -> int:
    """The caption interval that holds the middle of these grid entries, in a clip of so many intervals. Its
    number does not depend on how long the last one is."""
    return interval_at(CAPTION_INTERVAL_S * events, Fraction(entries.start + entries.stop, 2 * GRID_RATE))


@functools.lru_cache(maxsize=4096)
def by_chunk(chunks: int, size: int, events: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(caption intervals whose prompts are read, which of them each chunk reads), for chunks of `size`
    latents in a clip of so many intervals; the same for all clips."""
    spans = [(latent_entries(c * size), latent_entries((c + 1) * size - 1)) for c in range(chunks)]
    of_chunk = [_interval(Span(first.start, last.stop), events) for first, last in spans]
    touched = tuple(sorted(set(of_chunk)))
    return touched, tuple(touched.index(i) for i in of_chunk)


def _kept_fields(seed: int, draw: Draw, share: float) -> tuple[Sentence, ...]:
    if _share(seed, draw, "fields") >= share:
        return SENTENCES
    return _PROPER[word(seed, draw.position, "subset") % len(_PROPER)]


def _share(seed: int, draw: Draw, role: str) -> float:
    """Uniform in [0, 1), keyed by the position."""
    return word(seed, draw.position, role) / 2.0**64

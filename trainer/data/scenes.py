"""What a rollout of stage 5 starts from: the first picture, the controls and the prompts of recorded clips.

No latents are read but those of the first picture's condition: the video itself is the student's. Controls
and prompts are made as long as the rollout: rows by a named law, prompts by keeping the scene and the
character of the clip and ending its events. Source: spec/worldplay2.md g.2 step 1, n.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.caption import SENTENCES, Sentence, render
from schemas.clip import Perspective
from schemas.latents import TextNote
from schemas.sample import Annotation
from schemas.timeline import CAPTION_INTERVAL_S, FRAMES_PER_LATENT, GRID_RATE
from trainer.config import Preset
from trainer.curriculum import Law
from trainer.data.plan import Draw
from trainer.data.sample import (
    FAMILIES,
    Buffer,
    Members,
    Reader,
    action_rows,
    array_of,
    by_chunk,
)
from trainer.rollout import Condition, Scene
from trainer.stable.controls import Rows, extended

_ENDED = (Sentence.SCENE, Sentence.CHARACTER)


def make_scene(
    draws: Sequence[Draw],
    reader: Reader,
    rows_of: Callable[[int, tuple[str, ...]], Members],
    preset: Preset,
    latents: int,
    law: Law,
    same_game: Callable[[Draw], Iterator[int]],
) -> Scene:
    """The scene of some draws. reader: of what stage 5 reads of a sample. rows_of: reads annotations of other
    clips. same_game: rows of the index of other clips of a draw's game, in its order.

    Raises SampleError, and what the reader raises.
    """
    chunks = latents // preset.chunk
    longest = FRAMES_PER_LATENT * latents // (GRID_RATE * CAPTION_INTERVAL_S) + 1  # caption intervals
    intervals, prompts = by_chunk(chunks, preset.chunk, longest)
    conditions, rows, texts, negatives = [], [], [], []
    for draw in draws:
        members = reader(draw.row, FAMILIES)
        note = Annotation.model_validate_json(bytes(members["annotations"]["json"]))
        rows.append(_rows(members["annotations"]["actions.npy"], latents, law, rows_of, same_game, draw))
        conditions.append([_head(members["latents"][name]) for name in ("hr_y.npy", "lr_y.npy")])
        made, negative = _texts(note, members["text"], intervals)
        texts.append(made)
        negatives.append(negative)
    full, low = (_stacked([c[k] for c in conditions]) for k in range(2))
    return Scene(
        Condition(full, low),
        torch.from_numpy(np.stack(rows)),
        tuple(_padded([t[p] for t in texts]) for p in range(len(intervals))),
        prompts,
        negatives[0],
        tuple(d.position for d in draws),
    )


def _rows(
    data: Buffer,
    latents: int,
    law: Law,
    rows_of: Callable[[int, tuple[str, ...]], Members],
    same_game: Callable[[Draw], Iterator[int]],
    draw: Draw,
) -> Rows:
    def others() -> Iterator[Rows]:
        for row in same_game(draw):
            yield known(action_rows(rows_of(row, ("annotations",))["annotations"]["actions.npy"]))

    return extended(known(action_rows(data)), latents, law, others)


def known(rows: Rows) -> Rows:
    """The leading rows whose six values are all known."""
    bad = np.flatnonzero(np.isnan(rows).any(axis=1))
    return rows[: bad[0]] if len(bad) else rows


def _texts(
    note: Annotation, members: Mapping[str, Buffer], intervals: tuple[int, ...]
) -> tuple[list[Tensor], Tensor]:
    """Embeddings of the prompt of each interval, events ended where the clip has; those of the negative."""
    text = TextNote.model_validate_json(bytes(members["text.json"]))
    stored = array_of(members["text.npy"])

    def rows(at: slice) -> Tensor:
        return torch.from_numpy(stored[at].copy()).float()

    perspective, last = Perspective(note.perspective), len(note.caption.events) - 1
    made = [
        rows(text.rows(render(note.caption, perspective, min(i, last), SENTENCES if i <= last else _ENDED)))
        for i in intervals
    ]
    k = text.keys.index(text.negative)
    return made, rows(slice(text.starts[k], text.starts[k] + text.tokens[k]))


def _head(data: Buffer) -> Tensor:
    """float32 [16, n, h, w] of a stored [n, 16, h, w]."""
    return torch.from_numpy(array_of(data).copy()).float().transpose(0, 1)


def _stacked(heads: list[Tensor]) -> Tensor:
    """[B, 16, n, h, w]: shorter heads go on with their last latent, which is what it stands for."""
    longest = max(h.shape[1] for h in heads)
    return torch.stack([torch.cat([h, h[:, -1:].expand(-1, longest - h.shape[1], -1, -1)], 1) for h in heads])


def _padded(texts: list[Tensor]) -> Tensor:
    """[B, n, text_dim], zeros behind the shorter ones."""
    longest = max(len(t) for t in texts)
    return torch.stack([torch.nn.functional.pad(t, (0, 0, 0, longest - len(t))) for t in texts])

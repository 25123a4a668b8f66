"""The linear codec of a corpus: fitted on some of its clips, then frozen (statistics/codec-v*.json).

Source: DESIGN rule 10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.frames import frame_pass
from pipeline.geometry import Cover
from pipeline.latents.stage import LatentsConfig
from pipeline.media import media, read_frames
from pipeline.picture import Picture
from pipeline.stage import Unit
from schemas import timeline
from schemas.latents import FittedCodec
from schemas.quality import Status
from trainer.codec.weights import CodecError

if TYPE_CHECKING:
    from trainer.codec.linear import Fit

CLIPS, GROUPS = 16, 12
"""Clips, and groups of four frames of each, spread over it. Five clips of the footage pack give 0.6 dB more
than the bars on four others (docs/codec.md); at 448x832 a group takes 0.1 s, all of them 20 s."""


def choose(units: Iterable[Unit]) -> list[Unit]:
    """At most 16 clips that observe passed: of each game in turn, the first by id."""
    games: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        receipt = unit.receipts.get("observe")
        if receipt is not None and receipt.status is Status.OK:
            games[unit.clip.game].append(unit)
    ranked = [
        (rank, game, unit)
        for game, of_game in games.items()
        for rank, unit in enumerate(sorted(of_game, key=lambda u: u.clip.clip_id))
    ]
    return [unit for _, _, unit in sorted(ranked, key=lambda r: r[:2])[:CLIPS]]


def fit_codec(units: Iterable[Unit], config: LatentsConfig) -> FittedCodec | None:
    """The linear codec of the clips that `choose` takes of these, at the size of the config; None when none
    can be used. Raises CodecError on pictures that are all alike, StoreError on a clip without media."""
    import torch

    from trainer.codec.linear import Fit

    torch.set_num_threads(1)  # the same sums whatever the machine's count of cores
    fit, used = Fit(), []
    for unit in choose(units):
        table = read_frames(unit)
        grid = timeline.grid(table.pts, table.time_base)
        if not grid.latents:
            continue
        facts = unit.receipts["ingest"].facts
        cover = Cover.of(int(facts["height"]), int(facts["width"]), config.height, config.width)
        with media(unit) as path:
            frame_pass(path, [Groups(fit, grid.frames, cover)])
        used.append(unit.clip.clip_id)
    return fit.record(tuple(used)) if used else None


def given_codec(config: LatentsConfig) -> FittedCodec:
    """The linear codec of another corpus, so that one model reads both. Raises CodecError."""
    path = config.codec.path
    assert path is not None
    try:
        record = FittedCodec.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        why = "cannot be read" if isinstance(error, OSError) else "is no fitted codec"
        raise CodecError(f"{path} {why}: give statistics/codec-v*.json of a corpus") from None
    if (record.height, record.width) != (config.height, config.width):
        raise CodecError(
            f"{path} was fitted at {record.height}x{record.width}, and latents are of "
            f"{config.height}x{config.width}: give one of that size"
        )
    return record


class Groups:
    """Observer that gives a fit some latents' pictures of a clip, evenly spread."""

    def __init__(self, fit: Fit, frames: npt.NDArray[np.int64], cover: Cover) -> None:
        latents = timeline.latents_of(len(frames))
        chosen = np.unique(np.linspace(1, latents - 1, GROUPS).round().astype(int))
        self._groups = [frames[timeline.latent_entries(int(k)).slice()] for k in chosen]
        self._fit, self._cover = fit, cover
        self._held: list[npt.NDArray[np.uint8]] = []

    def see(self, index: int, picture: Picture) -> None:
        import torch

        from trainer.codec.base import to_pixels

        while self._groups and self._groups[0][len(self._held)] == index:
            self._held.append(self._cover.apply(picture.rgb))
            if len(self._held) == len(self._groups[0]):
                self._fit.see(to_pixels(torch.from_numpy(np.stack(self._held))))
                self._held = []
                self._groups.pop(0)

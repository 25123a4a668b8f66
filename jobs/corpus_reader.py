"""A corpus as the trainer reads it: the table that a plan is made of, and the reader of its samples.

Source: DESIGN 2, rules 2, 9; spec/faults.md S2.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.shards.read import read_index, split_sample
from pipeline.shards.tar import Member, Place
from pipeline.store import Store, StoreError
from schemas.latents import LatentsNote, TextNote
from schemas.sample import FAMILIES as EVERY
from trainer.curriculum import Stage
from trainer.data.buffers import Buffers
from trainer.data.plan import SampleTable
from trainer.data.sample import FAMILIES, Buffer, Members, Reader, members_read

_FACTS = ("sample_id", "kind", "split", "game", "tier", "latent_frames", "actions_known")
_WAITS_S = (0.5, 2.0)
"""Pauses between the tries of a read; an object store's client tries again by itself inside each."""


class CorpusError(StoreError):
    """A corpus that cannot be trained on; one line."""


@dataclass(frozen=True)
class Places:
    """Where N samples lie in the tars of a family, as numbers: rows of the index itself take 10 times as long
    to look up. suffixes: of the M members, in their order. tar: which of `tars`, [N]. offset, size, xxh64:
    of each member's data, [N, M]."""

    suffixes: tuple[str, ...]
    tars: tuple[str, ...]
    tar: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    xxh64: npt.NDArray[np.uint64]

    @staticmethod
    def of(column: pa.ChunkedArray, suffixes: tuple[str, ...]) -> Places:
        """Of a column of the index, which has a place in every row."""
        tars = pc.struct_field(column, "tar").combine_chunks().dictionary_encode()
        members = pc.list_flatten(pc.struct_field(column, "members"))

        def numbers(name: str) -> npt.NDArray[np.generic]:
            values: npt.NDArray[np.generic] = pc.struct_field(members, name).to_numpy()
            return values.reshape(len(column), len(suffixes))

        return Places(
            suffixes,
            tuple(tars.dictionary.to_pylist()),
            tars.indices.to_numpy(),
            numbers("offset").astype(np.int64),
            numbers("size").astype(np.int64),
            numbers("xxh64").astype(np.uint64),
        )

    def narrowed(self, row: int, sample: str, suffixes: tuple[str, ...]) -> Place:
        """The range from the first of these members to the last."""
        first = self.suffixes.index(suffixes[0])
        some = slice(first, self.suffixes.index(suffixes[-1], first) + 1)
        facts = (column[row, some].tolist() for column in (self.offset, self.size, self.xxh64))
        members: list[Member] = [
            {"name": f"{sample}.{suffix}", "offset": offset, "size": size, "xxh64": checksum}
            for suffix, offset, size, checksum in zip(self.suffixes[some], *facts, strict=True)
        ]
        start, last = members[0]["offset"], members[-1]
        size = last["offset"] + last["size"] - start
        return {"tar": self.tars[self.tar[row]], "offset": start, "size": size, "members": members}


@dataclass(frozen=True)
class Corpus:
    """A published corpus, open for training in this process, in any number of threads.

    table: of every sample, whatever its split and tier. places: where each lies, by family. files: the file
    system, root: of the corpus on it; looked up once, as that costs as much as a read.
    """

    store: Store
    table: SampleTable
    places: Mapping[str, Places]
    files: Any
    root: str
    buffers: Buffers = field(default_factory=Buffers)

    @staticmethod
    def open(store: Store) -> Corpus:
        """Read the index. Raises StoreError, CorpusError when it has no samples, latents or text."""
        columns = [*_FACTS, *FAMILIES]
        index = read_index(store, columns)
        remedy = "run `wp2 curate` again"
        if missing := [name for name in columns if name not in index.column_names]:
            names = ", ".join(missing)
            raise CorpusError(f"the index of {store.url} has no {names} (of an earlier wp2): {remedy}")
        if not len(index):
            raise CorpusError(f"{store.url} holds no sample: {remedy}")
        for family in FAMILIES:
            if without := index[family].null_count:
                raise CorpusError(
                    f"{without} of {len(index)} samples of {store.url} have no {family}: {remedy} "
                    "with a codec and a text encoder in its config, as demo.yaml has them"
                )
        places = {family: Places.of(index[family], EVERY[family]) for family in FAMILIES}
        return Corpus(store, _table(index), places, store.fs, store.root)

    def read(self, row: int, families: tuple[str, ...] = FAMILIES) -> dict[str, dict[str, Buffer]]:
        """Members of a sample by family and suffix, their checksums compared: the trainer's `Reader`.

        One range read a family. What fails is tried three times, since a network may fail. Raises StoreError;
        CorruptMember for a member that is cut short or damaged.
        """
        return {f: self._patiently(self._place(row, f, EVERY[f])) for f in families}

    def reader(self, stage: Stage) -> Reader:
        """The same for the members that a stage reads: a range from the first of them to the last."""
        wanted = members_read(stage)

        def read(row: int, families: tuple[str, ...]) -> Members:
            return {f: self._patiently(self._place(row, f, wanted[f])) for f in families}

        return read

    def _place(self, row: int, family: str, suffixes: tuple[str, ...]) -> Place:
        """The range from the first of these members to the last."""
        return self.places[family].narrowed(row, str(self.table.sample_id[row]), suffixes)

    def identities(self, row: int = 0) -> tuple[str, str]:
        """(codec, text encoder) of a sample. A corpus has one of each: with another, it is encoded anew."""
        members = self.read(row, ("latents", "text"))
        coded = LatentsNote.model_validate_json(bytes(members["latents"]["latents.json"]))
        return coded.codec, TextNote.model_validate_json(bytes(members["text"]["text.json"])).encoder

    def _patiently(self, place: Place) -> dict[str, Buffer]:
        for wait in _WAITS_S:
            try:
                return self._read(place)
            except OSError:  # CorruptMember is one: bytes may be lost on their way, too
                time.sleep(wait)
        try:
            return self._read(place)
        except StoreError:
            raise
        except OSError as error:
            tries = len(_WAITS_S) + 1
            raise StoreError(f"{place['tar']} of {self.store.url}: {tries} reads failed: {error}") from None

    def _read(self, place: Place) -> dict[str, Buffer]:
        path, start, size = f"{self.root}/{place['tar']}", place["offset"], place["size"]
        try:
            if self.store.is_local:  # fsspec would copy it, and take longer to find it than to read it
                whole = memoryview(self.buffers.bytes(size).data)
                file = os.open(path, os.O_RDONLY)
                try:
                    data = whole[: os.preadv(file, [whole], start)]
                finally:
                    os.close(file)
            else:
                data = memoryview(self.files.cat_file(path, start=start, end=start + size))
        except FileNotFoundError:
            raise StoreError(f"{place['tar']} is missing from {self.store.url}; run `wp2 verify`") from None
        members = split_sample(place, data)
        return {name: bytes(m) if name.endswith("json") else m for name, m in members.items()}


def _table(index: pa.Table) -> SampleTable:
    def texts(name: str) -> np.ndarray:
        return np.array(index[name].to_pylist(), np.str_)

    return SampleTable(
        row=np.arange(len(index), dtype=np.int64),
        sample_id=texts("sample_id"),
        kind=texts("kind"),
        latents=index["latent_frames"].to_numpy().astype(np.int64),
        actions_known=index["actions_known"].to_numpy().astype(np.int64),
        split=texts("split"),
        game=texts("game"),
        tier=texts("tier"),
    )

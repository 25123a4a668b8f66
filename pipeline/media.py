"""A clip's media file and frame table, as the stages behind ingest use them.

The media file is the working copy where ingest made one, else the source. `Reader` gives random access to it.
Source: DESIGN rule 1; spec/faults.md D1, D2.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline.frames import Decoded
from pipeline.picture import Picture
from pipeline.stage import Unit
from pipeline.store import StoreError, sha256_file
from schemas import SCHEMA_VERSION
from schemas.clip import FrameTable
from schemas.quality import Reason

FRAMES = "frames.parquet"
MEDIA = "media.mp4"
# One RGB probe every 16 frames: converting all costs a third of the decode, a sixteenth 2 %, and any read is
# at most 8 frames away from one.
PROBE_STEP = 16


class FramesDiffer(ValueError):
    """A random access reader that does not show the frames of the table."""


@dataclass(frozen=True, slots=True)
class MediaTable:
    """What frames.parquet holds. frames: F rows; change: float32 [F], mean absolute difference of gray@320 to
    the frame before, in luma levels (0 at frame 0); rgb: frame -> xxh3_64 of its rgb24 picture, for every
    16th frame and the last."""

    frames: FrameTable
    change: npt.NDArray[np.float32]
    rgb: Mapping[int, int]


class Probe:
    """Observer of an ingest pass: the columns `change` and `rgb` of a frame table."""

    def __init__(self) -> None:
        self._change: list[float] = []
        self._rgb: dict[int, int] = {}
        self._before: npt.NDArray[np.int16] | None = None
        self._last: tuple[int, Picture] | None = None

    def see(self, index: int, picture: Picture) -> None:
        gray = picture.gray.astype(np.int16)
        self._change.append(0.0 if self._before is None else float(np.abs(gray - self._before).mean()))
        self._before = gray
        if index % PROBE_STEP == 0:
            self._rgb[index] = rgb_hash(picture.rgb)
            self._last = None
        else:
            self._last = (index, picture)  # one frame is held back: only the end shows which was the last

    def table(self, decoded: Decoded, frames: FrameTable) -> MediaTable:
        """The table of the decode that this observer saw."""
        if len(self._change) != len(decoded) or len(decoded) != len(frames):
            raise ValueError(
                f"{len(self._change)} frames were seen, {len(decoded)} decoded, {len(frames)} kept"
            )
        rgb = dict(self._rgb)
        if self._last is not None:
            rgb[self._last[0]] = rgb_hash(self._last[1].rgb)
        return MediaTable(frames, np.asarray(self._change, np.float32), rgb)


def rgb_hash(rgb: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of an rgb24 picture, uint8 [H, W, 3]."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rgb).data)


# --- frames.parquet ---------------------------------------------------------------------------------------


def pack(table: MediaTable) -> bytes:
    """frames.parquet: one row a frame; the same table gives the same bytes."""
    frames = table.frames
    rgb = pa.array([table.rgb.get(k) for k in range(len(frames))], pa.uint64())
    columns = {
        "frame": pa.array(np.arange(len(frames), dtype=np.int64)),
        "pts": pa.array(frames.pts),
        "source_index": pa.array(frames.source_index),
        "pixels": pa.array(frames.pixels),
        "ok": pa.array(frames.ok),
        "repeat": pa.array(frames.repeat),
        "change": pa.array(table.change),
        "rgb": rgb,
    }
    base = f"{frames.time_base.numerator}/{frames.time_base.denominator}"
    metadata = {"schema_version": str(SCHEMA_VERSION), "time_base": base, "origin": str(frames.origin)}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, metadata=metadata), sink, compression="zstd")
    return sink.getvalue()


def unpack(data: bytes) -> MediaTable:
    """The table of the bytes of a frames.parquet."""
    table = pq.read_table(io.BytesIO(data))
    meta = table.schema.metadata or {}
    version = meta.get(b"schema_version", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"frames.parquet has schema {version}, this is {SCHEMA_VERSION}; run ingest again")
    column = {n: table[n].to_numpy() for n in ("pts", "source_index", "pixels", "ok", "repeat", "change")}
    frames = FrameTable(
        time_base=Fraction(meta[b"time_base"].decode()),
        pts=column["pts"],
        source_index=column["source_index"],
        pixels=column["pixels"],
        ok=column["ok"],
        repeat=column["repeat"],
        origin=Fraction(meta[b"origin"].decode()),
    )
    rgb = {k: int(v) for k, v in enumerate(table["rgb"].to_pylist()) if v is not None}
    return MediaTable(frames, column["change"], rgb)


def read_table(source: Unit | bytes) -> MediaTable:
    """The whole table of a unit that ingest has done, or of the bytes of its frames.parquet."""
    if isinstance(source, bytes):
        return unpack(source)
    path = source.receipts["ingest"].output(FRAMES).path
    try:
        return unpack(source.corpus.read(path))
    except pa.ArrowInvalid:
        raise StoreError(f"{path} is damaged: run `wp2 curate` again with --from ingest") from None


def read_frames(source: Unit | bytes) -> FrameTable:
    """The frame table of a unit that ingest has done, or of the bytes of its frames.parquet."""
    return read_table(source).frames


@contextlib.contextmanager
def media(unit: Unit) -> Iterator[Path]:
    """A local path of the unit's media file: its working copy where ingest made one, else its source.

    Raises StoreError when the file is missing, cannot be read, or has another size or sha256 than ingest's
    receipt (a working copy) or the catalogue (a source) says: a file recorded again under the same name is
    another clip, and its pictures must never stand under the labels of this one.
    """
    receipt = unit.receipts["ingest"]
    if receipt.has(MEDIA):
        copy = receipt.output(MEDIA)
        store, name, size = unit.corpus, copy.path, copy.bytes
        missing = f"working copy {name} is missing; run again with `--from ingest`"
        differs = f"working copy {name} is damaged; run again with `--from ingest`"
    else:
        store, name, size = unit.source, unit.clip.source_path, unit.clip.bytes
        missing = f"source {name} is missing from {store.url}; put it back and run again"
        differs = (
            f"{Reason.SOURCE_CHANGED}: {name} in {store.url} is not the file that was catalogued as clip "
            f"{unit.clip.clip_id}; put that one back (the new one is a clip of its own), and run again"
        )
    found = store.size(name)
    if found is None:
        raise StoreError(missing)
    if found != size:
        raise StoreError(differs)
    with store.local(name) as path:
        try:
            same = sha256_file(path) == media_sha256(unit)
        except OSError as error:
            raise StoreError(f"{name} cannot be read ({error.strerror}); check it, and run again") from None
        if not same:
            raise StoreError(differs)
        yield path


def media_sha256(unit: Unit) -> str:
    """sha256 of the unit's media file, as ingest or the catalogue recorded it."""
    receipt = unit.receipts["ingest"]
    return receipt.output(MEDIA).sha256 if receipt.has(MEDIA) else unit.clip.sha256


def has_media(unit: Unit) -> bool:
    """Is the unit's media file there, with its size? Its content is not read: `media` does that."""
    receipt = unit.receipts["ingest"]
    if receipt.has(MEDIA):
        copy = receipt.output(MEDIA)
        return unit.corpus.size(copy.path) == copy.bytes
    return unit.source.size(unit.clip.source_path) == unit.clip.bytes


# --- random access ----------------------------------------------------------------------------------------


class Reader:
    """Random access to a media file by frame number, over decord. Never for sources: decord gives wrong
    pictures on odd containers, silently (spec/formats.md 3).

    Opening compares the frame count; every read decodes at least one frame of the table with a probe, at
    most 8 frames from one that was asked for, and compares all of them. Raises FramesDiffer.
    """

    def __init__(self, path: Path, table: MediaTable) -> None:
        # Never at the top of a module: decord puts the symbols of its own FFmpeg in front of everyone's.
        # Loaded before av, it breaks av (VP8 and VP9 encoders fail to open); behind av, both work.
        import decord

        self._table = table
        self._probed = np.asarray(sorted(table.rgb), np.int64)
        try:
            self._reader: Any = decord.VideoReader(str(path), num_threads=1)
        except (decord.DECORDError, RuntimeError) as error:
            text = " ".join(str(error).split())[:160]
            raise FramesDiffer(f"decord cannot open the media file ({text}); run ingest again") from None
        if len(self._reader) != len(table.frames):
            raise FramesDiffer(
                f"decord counts {len(self._reader)} frames, the table {len(table.frames)}; run ingest again"
            )

    def __len__(self) -> int:
        return len(self._table.frames)

    def read(self, frames: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Pictures of these frames in this order, uint8 [N, H, W, 3], the same bytes as `Picture.rgb`."""
        wanted = [int(k) for k in frames]
        if not wanted:
            raise ValueError("no frames were asked for")
        if min(wanted) < 0 or max(wanted) >= len(self):
            raise IndexError(f"frames {min(wanted)}..{max(wanted)} are not all inside [0, {len(self)})")
        asked = list(wanted)
        if not any(k in self._table.rgb for k in wanted):
            asked.append(int(self._probed[np.argmin(np.abs(self._probed - wanted[0]))]))
        pictures = self._reader.get_batch(asked).asnumpy()
        for k, picture in zip(asked, pictures, strict=True):
            if k in self._table.rgb and rgb_hash(picture) != self._table.rgb[k]:
                raise FramesDiffer(
                    f"decord shows another picture as frame {k} than the table; run ingest again"
                )
        return np.asarray(pictures[: len(wanted)], np.uint8)

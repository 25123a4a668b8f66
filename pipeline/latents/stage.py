"""The latents stage: a clip's pictures on the 16 fps grid, as the latents that training reads.

One continuous causal encode at full and one at low resolution, independent segments for stage 1, and the
image condition of each. Memory does not grow with the clip.
Source: DESIGN 2; spec/worldplay2.md a.3, c.2, n.1, n.2.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.frames import frame_pass
from pipeline.geometry import Cover, check_size
from pipeline.latents.rows import RowWriter, half, write_array
from pipeline.media import media, read_frames
from pipeline.picture import Picture
from pipeline.stage import Result, Unit
from pipeline.statistics import newest
from pipeline.store import Store
from schemas import timeline
from schemas.clip import Clip
from schemas.latents import (
    CHANNELS,
    SEGMENT,
    SPACE_STRIDE,
    FittedCodec,
    LatentsNote,
    segment_entries,
    segment_starts,
)
from schemas.quality import Reason, Verdict, because
from schemas.sample import FAMILIES
from trainer.codec.weights import CodecError, Precision, vae_identity

if TYPE_CHECKING:  # torch takes seconds to load, and only the worker that encodes needs it
    from torch import Tensor

    from trainer.codec.base import Cache, Codec

CODEC = "codec"
"""Kind of the frozen record of the linear codec."""


class CodecConfig(BaseModel):
    """Which codec, and its weights: files on every machine that runs the stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["none", "linear", "wan"] = Field(
        default="none",
        description="none: shards hold no latents; linear: fitted on the corpus and frozen; wan: the VAE of "
        "Wan 2.1",
    )
    path: str | None = Field(
        default=None,
        description="wan: a diffusers folder with the VAE, or a Wan2.1_VAE.pth file; linear: a codec-v*.json "
        "of another corpus, frozen here instead of one that is fitted here",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where it runs")
    precision: Precision = Field(default="float32", description="of weights and activations of wan")

    @model_validator(mode="after")
    def _path(self) -> CodecConfig:
        if (self.kind == "wan" and self.path is None) or (self.kind == "none" and self.path is not None):
            raise ValueError(
                f"kind wan needs a path, linear may have one, none has none (kind is {self.kind})"
            )
        return self


class LatentsConfig(BaseModel):
    """Settings of the latents stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    codec: CodecConfig = Field(default=CodecConfig(), description="what encodes")
    height: int = Field(default=448, description="of the pictures that are encoded; a multiple of 64")
    width: int = Field(default=832, description="of the pictures that are encoded; a multiple of 64")
    segments: int = Field(
        default=4, ge=0, description="most independent segments of 125 frames (7.8 s) a clip, for stage 1"
    )

    @model_validator(mode="after")
    def _multiples(self) -> LatentsConfig:
        check_size(self.height, self.width)
        return self


class Encoding(BaseModel):
    """What decides the bytes of the latents: LatentsConfig with the weights by value. Where they lie, and on
    which device they run, makes no unit anew.

    codec: identity of the codec; empty while the linear one has not been fitted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    codec: str
    height: int
    width: int
    segments: int


class Latents:
    """Stage: the members of the latents family.

    hr.npy float16 [T, 16, H/8, W/8]   one continuous encode      hr_y.npy  [n, 16, H/8, W/8]
    lr.npy [T/2, 16, H/32, W/32]       chunk-local low resolution lr_y.npy  [n, 16, H/32, W/32]
    segments.npy [S, 32, 16, H/8, W/8] independent encodes        segments_y.npy [S, n, 16, H/8, W/8]
    segments_at.npy int32 [S]          latent of the clip where each begins (`segment_starts`)
    latents.json                       LatentsNote

    y: the last of its n latents is that of every later one (`trainer.codec.condition`).
    fitted: the frozen linear codec; None where it has not been fitted yet. A worker that is sent this stage
    reads the record of that identity from the corpus: it is larger than what a stage may weigh.
    Raises CodecError when the path of a VAE holds none.
    """

    name: ClassVar[str] = "latents"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("ingest",)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: LatentsConfig, fitted: FittedCodec | None) -> None:
        self._codec = config.codec
        self._fitted = fitted
        if config.codec.kind == "wan":
            assert config.codec.path is not None
            identity = f"{vae_identity(Path(config.codec.path))}-{config.codec.precision}"
        else:
            identity = f"linear-{fitted.identity()}" if fitted else ""
        self.config: Encoding = Encoding(
            codec=identity, height=config.height, width=config.width, segments=config.segments
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fitted": None}

    def frozen(self, clip: Clip) -> object:
        return None  # the one codec of the corpus is part of `config`

    def run(self, unit: Unit, scratch: Path) -> Result:
        table = read_frames(unit)
        grid = timeline.grid(table.pts, table.time_base)
        if not grid.latents:
            return Result(Verdict.rejected(because(Reason.TOO_SHORT, "no whole chunk on the 16 fps grid")))
        facts = unit.receipts["ingest"].facts
        config = self.config
        cover = Cover.of(int(facts["height"]), int(facts["width"]), config.height, config.width)
        codec = self._open(unit.corpus)
        starts = segment_starts(grid.latents, config.segments)
        high = CHANNELS, config.height // SPACE_STRIDE, config.width // SPACE_STRIDE
        low = CHANNELS, high[1] // 4, high[2] // 4
        with ExitStack() as stack:
            hr = stack.enter_context(RowWriter(scratch / "hr.npy", (grid.latents,), high))
            lr = stack.enter_context(RowWriter(scratch / "lr.npy", (grid.latents // 2,), low))
            parts = stack.enter_context(RowWriter(scratch / "segments.npy", (len(starts), SEGMENT), high))
            encoder = Encoder(codec, grid.frames, cover, starts, hr, lr, parts)
            with media(unit) as path:
                frame_pass(path, [encoder])
            encoder.finish()
        write_array(scratch / "hr_y.npy", _settled(encoder.hr_y))
        write_array(scratch / "lr_y.npy", _settled(encoder.lr_y))
        write_array(scratch / "segments_y.npy", _stack([_settled(y) for y in encoder.segments_y], high))
        np.save(scratch / "segments_at.npy", np.asarray(starts, "<i4"))
        note = LatentsNote(
            codec=codec.identity,
            latents=grid.latents,
            segments=len(starts),
            **{name: getattr(cover, name) for name in _COVER},
        )
        (scratch / "latents.json").write_text(note.model_dump_json())
        return Result(
            Verdict.ok(),
            {name: scratch / name for name in FAMILIES[self.name]},
            {
                "latents": grid.latents,
                "segments": note.segments,
                "height": note.height,
                "width": note.width,
                "codec": codec.identity,
            },
        )

    def _open(self, corpus: Store) -> Codec:
        """The codec, which is that of `config` on this machine too. Raises CodecError."""
        fitted = self._fitted
        if fitted is None and self.config.codec and self._codec.kind == "linear":
            fitted = newest(corpus, CODEC, FittedCodec)
        size = self.config.height, self.config.width
        if fitted is not None and (fitted.height, fitted.width) != size:
            raise CodecError(
                f"the linear codec was fitted at {fitted.height}x{fitted.width}, not at {size[0]}x{size[1]}: "
                "run `wp2 curate` to fit one"
            )
        codec = open_codec(self._codec, fitted)
        if codec.identity != self.config.codec:
            raise CodecError(
                f"the codec on this machine is {codec.identity}, that of the run {self.config.codec}: give "
                "every machine the same files"
            )
        return codec


_COVER = (
    "height",
    "width",
    "source_height",
    "source_width",
    "scaled_height",
    "scaled_width",
    "top",
    "left",
)


def open_codec(config: CodecConfig, fitted: FittedCodec | None) -> Codec:
    """The codec of a config. Raises CodecError without weights, or without a fitted record."""
    import torch

    if config.device == "cpu":
        torch.set_num_threads(1)  # one worker a core; sums also come out the same on every machine's count
    elif not torch.cuda.is_available():
        raise CodecError("device is cuda and this machine has none: set device to cpu")
    if config.kind == "wan":
        assert config.path is not None
        weights = vae_identity(Path(config.path))
        return _open_wan(config.path, weights, config.device, config.precision)
    if fitted is None:
        raise CodecError("the linear codec of this corpus has not been fitted: run `wp2 curate` to its end")
    from trainer.codec.linear import Linear

    return Linear(fitted, config.device)


@functools.lru_cache(maxsize=1)
def _open_wan(path: str, weights: str, device: str, precision: Precision) -> Codec:
    """weights: their name, so that other files at the same path are not taken for what is held."""
    from trainer.codec import wan

    return wan.load(Path(path), device, precision)


# --- one pass over the pictures ---------------------------------------------------------------------------


class Encoder:
    """Observer that encodes the pictures of a grid as they pass, and holds at most one chunk of them.

    frames: int64 [G], the media file's frame at each grid entry (`timeline.Grid.frames`). starts: latents
    where segments begin, none overlapping. hr, lr, parts: where latents go, T first.
    """

    def __init__(
        self,
        codec: Codec,
        frames: npt.NDArray[np.int64],
        cover: Cover,
        starts: tuple[int, ...],
        hr: RowWriter,
        lr: RowWriter,
        parts: RowWriter,
    ) -> None:
        cv2.setNumThreads(1)
        self._codec, self._frames, self._cover = codec, frames, cover
        self._hr, self._lr, self._parts = hr, lr, parts
        self._segments = [segment_entries(start) for start in starts]
        self._chunk: list[npt.NDArray[np.uint8]] = []
        self._begin = 0  # grid entry of the chunk's first picture
        self._high: Cache | None = None
        self._low: Cache | None = None
        self._segment: Cache | None = None
        self.hr_y = self.lr_y = np.zeros(0, np.float32)
        self.segments_y: list[npt.NDArray[np.float32]] = []

    def see(self, index: int, picture: Picture) -> None:
        at = self._begin + len(self._chunk)
        while at < len(self._frames) and self._frames[at] == index:
            self._chunk.append(self._cover.apply(picture.rgb))
            at += 1
            if (at + timeline.FRAMES_PER_LATENT - 1) % timeline.GRID_PER_CHUNK == 0:
                self._encode()

    def finish(self) -> None:
        """Raises ValueError when the grid's last picture has not passed."""
        if self._begin != len(self._frames):
            raise ValueError(
                f"{self._begin + len(self._chunk)} of {len(self._frames)} pictures of the grid were decoded: "
                "run ingest again"
            )

    def _encode(self) -> None:
        """The chunk that is held, into every stream that it is part of."""
        import torch

        from trainer.codec import lowres
        from trainer.codec.base import to_pixels
        from trainer.codec.condition import image_condition

        pixels = to_pixels(torch.from_numpy(np.stack(self._chunk))).to(self._codec.device)
        if self._begin == 0:
            image = pixels[:, :, :1]
            self.hr_y = _rows(image_condition(self._codec, image))
            self.lr_y = _rows(image_condition(self._codec, lowres.shrink(image)))
        latents, self._high = self._codec.encode(pixels, self._high)
        self._hr.append(_rows(latents))
        latents, self._low = lowres.encode_chunk(self._codec, pixels, self._low)
        self._lr.append(_rows(latents))
        for entries in self._segments:
            part = pixels[:, :, max(0, entries.start - self._begin) : max(0, entries.stop - self._begin)]
            if not part.shape[2]:
                continue
            if entries.start >= self._begin:
                self._segment = None
                y = self.hr_y if not entries.start else _rows(image_condition(self._codec, part[:, :, :1]))
                self.segments_y.append(y[:SEGMENT])
            latents, self._segment = self._codec.encode(part, self._segment)
            self._parts.append(_rows(latents))
        self._begin += len(self._chunk)
        self._chunk = []


def _rows(latents: Tensor) -> npt.NDArray[np.float32]:
    """[1, 16, T, h, w] -> float32 [T, 16, h, w]: T first, so a clip's beginning is a file's beginning."""
    return np.asarray(latents[0].transpose(0, 1).float().cpu().numpy(), np.float32)


def _settled(y: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A head of y without the latents at its end that float16 does not tell from the last."""
    stored = half(y, "y")
    differs = np.flatnonzero((stored != stored[-1]).any(axis=(1, 2, 3)))
    return y[: int(differs[-1]) + 2] if len(differs) else y[:1]


def _stack(heads: list[npt.NDArray[np.float32]], row: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Heads of y as one array [S, n, *row], each as long as the longest: its last latent repeated."""
    n = max((len(h) for h in heads), default=1)
    padded = [np.concatenate([h, np.repeat(h[-1:], n - len(h), 0)]) for h in heads]
    return np.stack(padded) if padded else np.zeros((0, n, *row), np.float32)

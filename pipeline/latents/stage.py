"""The latents stage: a clip's pictures on the 16 fps grid, as the latents that training reads.

One continuous causal encode at full and one at low resolution, independent segments for stage 1, and the image
condition of each. Memory does not grow with the clip. Source: DESIGN 2; spec/worldplay2.md a.3, c.2, n.1, n.2.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.frames import frame_pass
from pipeline.geometry import Cover, check_size
from pipeline.latents.rows import RowWriter, write_array
from pipeline.media import media, read_frames
from pipeline.picture import Picture
from pipeline.stage import Result, Unit
from schemas import timeline
from schemas.clip import Clip
from schemas.latents import SEGMENT, FittedCodec, LatentsNote, segment_entries, segment_starts
from schemas.quality import Reason, Verdict, because
from trainer.codec.weights import CodecError, Precision, vae_identity

if TYPE_CHECKING:  # torch takes seconds to load, and only the worker that encodes needs it
    from torch import Tensor

    from trainer.codec.base import Cache, Codec

MEMBERS = (
    "latents.json",
    "hr.npy",
    "lr.npy",
    "hr_y.npy",
    "lr_y.npy",
    "segments.npy",
    "segments_y.npy",
    "segments_at.npy",
)
CHANNELS = 16
SPACE_STRIDE = 8


class CodecConfig(BaseModel):
    """Which codec, and its weights: files on every machine that runs the stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["linear", "wan"] = Field(
        default="linear", description="linear: fitted on the corpus and frozen; wan: the Wan 2.1 VAE"
    )
    path: str | None = Field(
        default=None, description="wan: a diffusers folder with the VAE, or a Wan2.1_VAE.pth file"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where it runs")
    precision: Precision = Field(default="float32", description="of weights and activations of wan")

    @model_validator(mode="after")
    def _path(self) -> CodecConfig:
        if (self.kind == "wan") != (self.path is not None):
            raise ValueError("kind wan needs a path, and kind linear has none")
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


class Latents:
    """Stage: the members of the latents family.

    hr.npy float16 [T, 16, H/8, W/8]   one continuous encode      hr_y.npy  [n, 16, H/8, W/8]
    lr.npy [T/2, 16, H/32, W/32]       chunk-local low resolution lr_y.npy  [n, 16, H/32, W/32]
    segments.npy [S, 32, 16, H/8, W/8] independent encodes        segments_y.npy [S, n, 16, H/8, W/8]
    segments_at.npy int32 [S]          latent of the clip where each begins (`segment_starts`)
    latents.json                       LatentsNote

    y: the last of its n latents is that of every later one (`trainer.codec.condition`).
    fitted: the frozen linear codec, by value; None where it has not been fitted yet.
    Raises CodecError when the path of a VAE holds none.
    """

    name: ClassVar[str] = "latents"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("ingest",)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: LatentsConfig, fitted: FittedCodec | None) -> None:
        self.config: LatentsConfig = config
        self._fitted = fitted
        if config.codec.path is not None:
            self._weights = vae_identity(Path(config.codec.path))
        else:
            self._weights = f"linear-{fitted.identity()}" if fitted else "linear"

    def frozen(self, clip: Clip) -> object:
        return self._weights

    def run(self, unit: Unit, scratch: Path) -> Result:
        table = read_frames(unit)
        grid = timeline.grid(table.pts, table.time_base)
        if not grid.latents:
            return Result(Verdict.rejected(because(Reason.TOO_SHORT, "no whole chunk on the 16 fps grid")))
        facts = unit.receipts["ingest"].facts
        config = self.config
        cover = Cover.of(int(facts["height"]), int(facts["width"]), config.height, config.width)
        codec = open_codec(config.codec, self._fitted)
        with Encoder(codec, grid.frames, cover, config.segments, scratch) as encoder, media(unit) as path:
            frame_pass(path, [encoder])
        note = LatentsNote(
            codec=codec.identity,
            latents=grid.latents,
            segments=len(encoder.starts),
            **{name: getattr(cover, name) for name in _COVER},
        )
        (scratch / "latents.json").write_text(note.model_dump_json())
        return Result(
            Verdict.ok(),
            {name: scratch / name for name in MEMBERS},
            {"latents": grid.latents, "segments": note.segments, "codec": codec.identity},
        )


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
    if config.path is not None:
        return _open_wan(config.path, config.device, config.precision)
    if fitted is None:
        raise CodecError("the linear codec of this corpus has not been fitted: run `wp2 curate` to its end")
    from trainer.codec.linear import Linear

    return Linear(fitted, config.device)


@functools.lru_cache(maxsize=1)
def _open_wan(path: str, device: str, precision: Precision) -> Codec:
    from trainer.codec import wan

    return wan.load(Path(path), device, precision)


# --- one pass over the pictures ---------------------------------------------------------------------------


class Encoder:
    """Observer that encodes the pictures of a grid as they pass, and holds at most one chunk of them.

    frames: int64 [G], the media file's frame at each grid entry (`timeline.Grid.frames`).
    Used as a context: leaving it checks that every entry was seen.
    """

    def __init__(
        self, codec: Codec, frames: npt.NDArray[np.int64], cover: Cover, segments: int, folder: Path
    ) -> None:
        cv2.setNumThreads(1)
        latents = timeline.latents_of(len(frames))
        self._codec, self._frames, self._cover, self._folder = codec, frames, cover, folder
        self.starts = segment_starts(latents, segments)
        self._chunk: list[npt.NDArray[np.uint8]] = []
        self._seen = 0
        self._high: Cache | None = None
        self._low: Cache | None = None
        self._segment: Cache | None = None
        self._conditions: list[Tensor] = []
        h, w = cover.height // SPACE_STRIDE, cover.width // SPACE_STRIDE
        with ExitStack() as stack:
            row = (CHANNELS, h, w)
            small = (CHANNELS, h // 4, w // 4)
            self._hr = stack.enter_context(RowWriter(folder / "hr.npy", latents, row))
            self._lr = stack.enter_context(RowWriter(folder / "lr.npy", latents // 2, small))
            self._of_segments = stack.enter_context(
                RowWriter(folder / "segments.npy", len(self.starts), (SEGMENT, *row))
            )
            self._open = stack.pop_all()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            with self._open:
                return
        self._open.close()

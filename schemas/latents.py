"""Records of the latents and text members of a sample, and of the codec that is fitted on a corpus.

Source: DESIGN 2 (Latents, Text), rule 10; spec/worldplay2.md a.3, c.2.
"""

from __future__ import annotations

import base64
import hashlib

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas import SCHEMA_VERSION
from schemas.timeline import FRAMES_PER_LATENT, TimelineError

CHANNELS = 16
"""Channels of a latent, and pixels of one in height and width; in time it has 4 frames. Source:
spec/worldplay2.md a.1."""
SPACE_STRIDE = 8
SEGMENT = 32
"""Latents of an independent segment of stage 1: 125 grid entries."""
MOST_TOKENS = 512
"""Rows of a prompt's embeddings, at most. Source: spec/worldplay2.md a.2."""


# --- the fitted codec -------------------------------------------------------------------------------------


class Matrix(BaseModel):
    """float32 array as base64 of its little-endian bytes, row by row: 16,000 numbers as text would be four
    times as long and no more readable."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[int, ...]
    data: str

    @staticmethod
    def of(array: npt.NDArray[np.floating]) -> Matrix:
        raw = np.ascontiguousarray(array, "<f4").tobytes()
        return Matrix(shape=array.shape, data=base64.b64encode(raw).decode())

    def array(self) -> npt.NDArray[np.float32]:
        raw = np.frombuffer(base64.b64decode(self.data), "<f4")
        return raw.reshape(self.shape).astype(np.float32)

    @model_validator(mode="after")
    def _whole(self) -> Matrix:
        if len(base64.b64decode(self.data, validate=True)) != 4 * int(np.prod(self.shape)):
            raise ValueError(f"the data are not {list(self.shape)} float32 numbers")
        return self


class Basis(BaseModel):
    """Principal components of patches of D values: latent = (patch - mean) @ components / std.

    mean: [D]; components: [D, 16], orthonormal, largest variance first; std: [16], of the patches that it was
    fitted on. A patch's values lie channel by channel, then by frame, row and column; pixels in [-1, 1].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    mean: Matrix
    components: Matrix
    std: Matrix

    @model_validator(mode="after")
    def _fits(self) -> Basis:
        values, channels = self.components.shape
        if self.mean.shape != (values,) or self.std.shape != (channels,):
            raise ValueError(f"components {[values, channels]} with {self.mean.shape} and {self.std.shape}")
        if not (self.std.array() > 0).all():
            raise ValueError("a component without variance carries nothing: fit on more varied pictures")
        return self


class FittedCodec(BaseModel):
    """The linear codec of a corpus: a frozen, versioned record (statistics/codec-v*.json).

    frame: patches of 3*1*8*8 = 192 values, of the frame that begins a stream; group: of 3*4*8*8 = 768, of the
    four frames of every later latent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    height: int
    width: int
    clips: tuple[str, ...] = Field(description="clips that it was fitted on, sorted")
    groups: int = Field(description="groups of four frames that it was fitted on")
    frame: Basis
    group: Basis

    def identity(self) -> str:
        """Names the codec: 16 hex digits of its values."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


# --- segments ---------------------------------------------------------------------------------------------


def segment_starts(latents: int, most: int) -> tuple[int, ...]:
    """First latents a of the independent segments of a clip of T latents: at most `most`, spread over the
    clip, none overlapping another; none where the clip is shorter than one.

    Segment a encodes grid entries 4a .. 4a+124 by itself. Its latent k >= 1 ends at the same entry as latent
    a+k of the clip, so its action rows are an idle row and rows a+1 .. a+31 of the clip's.
    Source: DESIGN 2; spec/worldplay2.md n.2.
    """
    if latents < 1 or most < 0:
        raise TimelineError(f"{most} segments of a clip of {latents} latents")
    count = min(most, latents // SEGMENT)
    if count == 0:
        return ()
    last = latents - SEGMENT
    return tuple(last * i // (count - 1) for i in range(count)) if count > 1 else (0,)


def segment_entries(start: int) -> range:
    """Grid entries of the segment that begins at latent `start`: 125 of them."""
    first = FRAMES_PER_LATENT * start
    return range(first, first + FRAMES_PER_LATENT * (SEGMENT - 1) + 1)


# --- what lies in the members -----------------------------------------------------------------------------


ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hr.npy": ("float16", ("T", "16", "H/8", "W/8")),
    "lr.npy": ("float16", ("T/2", "16", "H/32", "W/32")),
    "hr_y.npy": ("float16", ("n", "16", "H/8", "W/8")),  # the last is that of every later latent
    "lr_y.npy": ("float16", ("n", "16", "H/32", "W/32")),
    "segments.npy": ("float16", ("S", "32", "16", "H/8", "W/8")),
    "segments_y.npy": ("float16", ("S", "n", "16", "H/8", "W/8")),
    "segments_at.npy": ("int32", ("S",)),  # latent of the clip where each segment begins
    "text.npy": ("float16", ("N", "D")),  # tokens of every prompt, one behind the other: TextNote.rows
}
"""dtype and shape of each array member: T latents and S segments of the clip, n as each head of y needs."""


class LatentsNote(BaseModel):
    """The JSON member of the latents family. Pictures of the clip were scaled to [scaled_height,
    scaled_width], and the [height, width] at (top, left) of that were encoded; intrinsics follow."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    codec: str = Field(description="identity of the codec: kind, weights or frozen record, precision")
    height: int
    width: int
    source_height: int
    source_width: int
    scaled_height: int
    scaled_width: int
    top: int
    left: int
    latents: int = Field(description="T, of the continuous stream; T/2 at low resolution")
    segments: int = Field(description="S, independent segments of 32 latents")


class TextNote(BaseModel):
    """The JSON member of the text family: where each prompt's embeddings lie in text.npy. Columns of one
    length, in order of key; the empty prompt and the negative one are always among them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    encoder: str = Field(description="identity of the text encoder: kind, weights, precision")
    width: int
    negative: str = Field(description="key of the negative prompt")
    keys: tuple[str, ...]
    prompts: tuple[str, ...]
    starts: tuple[int, ...] = Field(description="first row in text.npy")
    tokens: tuple[int, ...] = Field(description="rows, unpadded")
    cut: tuple[bool, ...] = Field(description="the prompt had more than 512 tokens; its end is left out")

    @model_validator(mode="after")
    def _columns(self) -> TextNote:
        if len({len(c) for c in (self.keys, self.prompts, self.starts, self.tokens, self.cut)}) != 1:
            raise ValueError("the columns of a text note have one length")
        if list(self.keys) != sorted(set(self.keys)) or self.negative not in self.keys:
            raise ValueError("keys are sorted, each once, and the negative prompt's is one of them")
        return self

    def rows(self, prompt: str) -> slice:
        """Rows of a prompt's embeddings in text.npy. Raises KeyError when they are not there."""
        key = prompt_key(prompt)
        if key not in self.keys:
            raise KeyError(f"no embeddings of the prompt {prompt[:60]!r} (key {key})")
        k = self.keys.index(key)
        return slice(self.starts[k], self.starts[k] + self.tokens[k])


def prompt_key(prompt: str) -> str:
    """Key of a prompt's embeddings: 16 hex digits of its sha256."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""The negative prompt of the Wan models' default guidance. Source: spec/worldplay2.md a.2."""

"""The text stage: embeddings of every prompt that training can draw of a clip.

Each interval's prompt under every subset of fields that caption dropout leaves, the empty prompt, and the
negative one; each once, found by its key. Source: DESIGN 2 (Text); spec/worldplay2.md a.2, k, l.7.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.caption.stage import read_unit_caption
from pipeline.latents.rows import write_array
from pipeline.stage import Result, Unit
from schemas.caption import prompts
from schemas.clip import Clip
from schemas.latents import NEGATIVE, TextNote, prompt_key
from schemas.quality import Verdict
from schemas.sample import FAMILIES
from trainer.codec.weights import CodecError, Precision, TextKind, text_identity

if TYPE_CHECKING:
    from trainer.codec.text import TextEncoder


class TextConfig(BaseModel):
    """Which text encoder, and its weights: a folder on every machine that runs the stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["none"] | TextKind = Field(
        default="none",
        description="none: shards hold no text; umt5: what the released model reads; minilm: a small one, "
        "where there are no weights",
    )
    path: str | None = Field(
        default=None,
        description="a transformers folder, or a diffusers pipeline's with text_encoder/ and tokenizer/; "
        "minilm needs none",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where it runs")
    precision: Precision = Field(default="float32", description="of weights and activations")
    negative: str = Field(default=NEGATIVE, description="prompt that guidance leads away from")

    @model_validator(mode="after")
    def _path(self) -> TextConfig:
        if self.kind == "umt5" and self.path is None:
            raise ValueError("kind umt5 needs a path")
        if self.kind == "none" and self.path is not None:
            raise ValueError("kind none has no path: name the encoder that is there")
        return self


class Encoding(BaseModel):
    """What decides the bytes of the embeddings: TextConfig with the weights by value. Where they lie, and on
    which device they run, makes no unit anew."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    encoder: str
    negative: str


class Text:
    """Stage: text.npy, float16 [N, D], the tokens of every prompt one behind the other, and text.json, a
    TextNote that says where each prompt's are. Raises CodecError when the path holds no encoder."""

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("caption",)
    reads: ClassVar[tuple[str, ...]] = ("perspective",)

    def __init__(self, config: TextConfig) -> None:
        if config.kind == "none":
            raise ValueError("a text stage needs an encoder: text.kind is none")
        weights = text_identity(config.kind, Path(config.path) if config.path else None)
        self.config: Encoding = Encoding(encoder=f"{weights}-{config.precision}", negative=config.negative)
        self._kind: TextKind = config.kind
        self._path, self._device, self._precision = config.path, config.device, config.precision

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        encoder = open_encoder(self._kind, self._path, self._device, self._precision)
        if encoder.identity != self.config.encoder:
            raise CodecError(
                f"the text encoder on this machine is {encoder.identity}, that of the run "
                f"{self.config.encoder}: give every machine the same files"
            )
        wanted = {*prompts(read_unit_caption(unit), unit.clip.perspective), "", self.config.negative}
        texts = sorted(wanted, key=prompt_key)
        encoded = [encoder.encode(text) for text in texts]
        tokens = [len(e.tokens) for e in encoded]
        note = TextNote(
            encoder=encoder.identity,
            width=encoder.width,
            negative=prompt_key(self.config.negative),
            keys=tuple(map(prompt_key, texts)),
            prompts=tuple(texts),
            starts=tuple(int(n) for n in np.cumsum([0, *tokens[:-1]])),
            tokens=tuple(tokens),
            cut=tuple(e.cut for e in encoded),
        )
        (scratch / "text.json").write_text(note.model_dump_json(), encoding="utf-8")
        rows = np.concatenate([e.tokens.cpu().numpy() for e in encoded])
        write_array(scratch / "text.npy", rows)
        return Result(
            Verdict.ok(),
            {name: scratch / name for name in FAMILIES[self.name]},
            {
                "prompts": len(texts),
                "tokens": len(rows),
                "cut_prompts": sum(note.cut),
                "encoder": encoder.identity,
            },
        )


def open_encoder(kind: TextKind, path: str | None, device: str, precision: Precision) -> TextEncoder:
    """A text encoder, held for the next call. Raises CodecError without weights, or without the device."""
    import torch

    if device == "cpu":
        torch.set_num_threads(1)  # one worker a core
    elif not torch.cuda.is_available():
        raise CodecError("device is cuda and this machine has none: set device to cpu")
    weights = text_identity(kind, Path(path) if path else None)
    return _open(kind, path, weights, device, precision)


@functools.lru_cache(maxsize=1)
def _open(kind: TextKind, path: str | None, weights: str, device: str, precision: Precision) -> TextEncoder:
    """weights: their name, so that other files at the same path are not taken for what is held."""
    from trainer.codec import text

    return text.load(kind, Path(path) if path else None, device, precision)

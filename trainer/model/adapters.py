"""Every foreign name: between this network and the weights of others. Nowhere else is one written.

Two ways of naming exist. `native` is that of Wan and of WorldPlay2: their files hold queries, keys and values
apart, and two experts in folders. `diffusers` is that of WanTransformer3DModel. What a file holds beside the
base tells what it is: the base alone, or actions and memory with one of three heads. A table from our names
to theirs is made from a network on the meta device, so a parameter that is added here without a name there is
an error, and any difference between a file and the table is one too.
Source: spec/worldplay2.md b, c.1, f.2, i.1, i.2.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from schemas.errors import UserError
from trainer.config import PRESETS, ModelConfig, Preset
from trainer.model.pdd_head import CompactHead, Head, IntervalHead
from trainer.model.wan import WanModel

RELEASE_LATENTS = 1024
"""Rows of the release's table of rotary positions, so 256 chunks. Source: spec/worldplay2.md a.4."""

Shape = tuple[int, ...]


class AdapterError(UserError):
    """Weights that are not those of this network; one line."""


class Naming(StrEnum):
    NATIVE = "native"
    DIFFUSERS = "diffusers"


class Contents(StrEnum):
    """What one expert holds."""

    BASE = "base"  # Wan2.2 image-to-video: neither actions nor memory
    VELOCITY = "velocity"  # WorldPlay2-BI and -AR, which have the same tensors
    COMPACT = "compact"  # WorldPlay2-Fast: two fused heads a block
    BANK = "bank"  # few-step training: one head an interval

    @property
    def words(self) -> str:
        return _TITLES[self]


_TITLES = {
    Contents.BASE: "Wan2.2 image-to-video, the base without actions and memory",
    Contents.VELOCITY: "WorldPlay2 BI or AR",
    Contents.COMPACT: "WorldPlay2 Fast (4 steps)",
    Contents.BANK: "few-step training, one head an interval",
}
EXPERTS = {
    Naming.NATIVE: ("high_noise_model", "low_noise_model"),
    Naming.DIFFUSERS: ("transformer", "transformer_2"),
}
"""Folders of the experts "high" and "low"."""
FILE = "diffusion_pytorch_model.safetensors"
INDEX = f"{FILE}.index.json"
CONFIG = "config.json"

# The start of our name -> of the native one.
_NATIVE = {
    "action.cont.": "action_in_cont.",
    "action.disc.": "action_in_disc.",
    "memory.": "memory_compress.",
}
_NATIVE_IN_BLOCK = {"action_mlp.": "img_action_mlp."}
# A bank has three spellings; the first is written.
_BANKS = ("head.pdd_weight", "head.weight", "head.head.weight")

_DIFFUSERS = {
    "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
    "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
    "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
    "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
    "time_projection.1.": "condition_embedder.time_proj.",
    "head.modulation": "scale_shift_table",
    "head.head.": "proj_out.",
}
_DIFFUSERS_IN_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
    **{
        f"{ours}.{part}.": f"{theirs}.{name}."
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for part, name in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
}
_ADDED = ("action.", "memory.")


@dataclass(frozen=True)
class Found:
    """What the names and shapes of one expert say. heads: of a bank, or blocks of a compact head, else 1."""

    naming: Naming
    contents: Contents
    preset: Preset
    heads: int = 1

    @property
    def model(self) -> ModelConfig:
        """Sizes of the network, with the horizon that weights of the release can place."""
        limit = None if self.contents is Contents.BASE else RELEASE_LATENTS
        return replace(self.preset.model, max_latents=limit)


def is_added(name: str) -> bool:
    """Is a parameter, in our names, one that Wan2.2 does not have?"""
    return name.startswith(_ADDED) or ".action_mlp." in name


def make_head(found: Found) -> Head | None:
    """An empty head of the kind that the weights have; None for that of one velocity."""
    config = found.preset.model
    if found.contents is Contents.COMPACT:
        return CompactHead(config.dim, config.patch_out, config.eps, found.heads)
    if found.contents is Contents.BANK:
        return IntervalHead(config.dim, config.patch_out, config.eps, found.heads)
    return None


@functools.lru_cache(maxsize=16)
def manifest(found: Found) -> Mapping[str, Shape]:
    """Our names and shapes of one expert with these contents."""
    with torch.device("meta"):
        model = WanModel(found.preset.model, make_head(found))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if found.contents is Contents.BASE:
        shapes = {name: shape for name, shape in shapes.items() if not is_added(name)}
    return shapes


def foreign_name(name: str, naming: Naming) -> str:
    """The name that others have for one of our parameters. AdapterError where they have none."""
    start, inside = (
        (_NATIVE, _NATIVE_IN_BLOCK) if naming is Naming.NATIVE else (_DIFFUSERS, _DIFFUSERS_IN_BLOCK)
    )
    if naming is Naming.DIFFUSERS and (is_added(name) or name.startswith(("head.block_", "head.bank_"))):
        raise AdapterError(f"diffusers has no place for {name}: write the native layout instead")
    if name in ("head.bank_weight", "head.bank_bias"):
        return _BANKS[0].replace("weight", name.rpartition("_")[2])
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return f"blocks.{index}.{_renamed(rest, inside)}"
    return _renamed(name, start)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for ours, theirs in table.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


@functools.lru_cache(maxsize=16)
def names(found: Found, bank: str = _BANKS[0]) -> Mapping[str, str]:
    """Our name -> theirs, for every parameter. bank: how the weight of a bank is spelt."""
    table = {name: foreign_name(name, found.naming) for name in manifest(found)}
    if found.contents is Contents.BANK:
        table |= {"head.bank_weight": bank, "head.bank_bias": bank.replace("weight", "bias")}
    return table


def recognise(shapes: Mapping[str, Shape], where: str) -> tuple[Found, dict[str, str]]:
    """What one expert is, and our name -> theirs for each of its tensors.

    shapes: their names and shapes. Strict: AdapterError names what is missing, extra or misshapen, and says
    so of weights that are of no such network.
    """
    found, bank = _kind(shapes, where)
    table = names(found, bank)
    check(
        shapes,
        {theirs: manifest(found)[ours] for ours, theirs in table.items()},
        f"{where}, as {found.contents.words}",
    )
    return found, dict(table)


def check(given: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str) -> None:
    """Raises AdapterError, one line, unless names and shapes are equal."""
    missing = sorted(wanted.keys() - given.keys())
    extra = sorted(given.keys() - wanted.keys())
    wrong = sorted(
        f"{name} is {_size(given[name])}, not {_size(wanted[name])}"
        for name in given.keys() & wanted.keys()
        if given[name] != wanted[name]
    )
    faults = [
        f"{len(some)} {what} ({', '.join(some[:3])}{', ..' if len(some) > 3 else ''})"
        for what, some in (("missing", missing), ("extra", extra), ("misshapen", wrong))
        if some
    ]
    if faults:
        raise AdapterError(f"{where}: {'; '.join(faults)}")


def _kind(shapes: Mapping[str, Shape], where: str) -> tuple[Found, str]:
    if "condition_embedder.time_proj.weight" in shapes:
        naming = Naming.DIFFUSERS
    elif "time_projection.1.weight" in shapes:
        naming = Naming.NATIVE
    else:
        some = ", ".join(sorted(shapes)[:3])
        raise AdapterError(f"{where} holds no Wan transformer, whose names these are not: {some}, ..")
    patches = shapes.get("patch_embedding.weight", ())
    preset = next((p for p in PRESETS.values() if patches[:1] == (p.model.dim,)), None)
    if preset is None:
        widths = ", ".join(f"{p.model.dim} ({name})" for name, p in PRESETS.items())
        raise AdapterError(
            f"{where}: patch_embedding.weight is {_size(patches) if patches else 'missing'}; "
            f"networks of this project have a width of {widths}"
        )
    bank = next((b for b in _BANKS if len(shapes.get(b, ())) == 3), None)
    if bank is not None:
        return Found(naming, Contents.BANK, preset, shapes[bank][0]), bank
    if "head.block_weight" in shapes:
        return Found(naming, Contents.COMPACT, preset, shapes["head.block_weight"][0]), _BANKS[0]
    theirs = tuple(_NATIVE.values())
    added = any(name.startswith(theirs) for name in shapes)
    return Found(naming, Contents.VELOCITY if added else Contents.BASE, preset), _BANKS[0]


def _size(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a number"


def config_json(found: Found) -> dict[str, object]:
    """What others write beside the weights of an expert, so that their loaders know the sizes."""
    c = found.preset.model
    if found.naming is Naming.NATIVE:
        return {
            "_class_name": "WanModel",
            "model_type": "i2v",
            "dim": c.dim,
            "eps": c.eps,
            "ffn_dim": c.ffn,
            "freq_dim": c.freq_dim,
            "in_dim": c.in_dim,
            "num_heads": c.heads,
            "num_layers": c.layers,
            "out_dim": c.out_dim,
            "text_len": c.text_len,
        }
    return {
        "_class_name": "WanTransformer3DModel",
        "added_kv_proj_dim": None,
        "attention_head_dim": c.head_dim,
        "cross_attn_norm": True,
        "eps": c.eps,
        "ffn_dim": c.ffn,
        "freq_dim": c.freq_dim,
        "image_dim": None,
        "in_channels": c.in_dim,
        "num_attention_heads": c.heads,
        "num_layers": c.layers,
        "out_channels": c.out_dim,
        "patch_size": list(c.patch),
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": RELEASE_LATENTS,
        "text_dim": c.text_dim,
    }

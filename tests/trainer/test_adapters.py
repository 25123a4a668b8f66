"""Names of others: the table of the specification, diffusers' own network, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from trainer.config import A14B, TINY
from trainer.model.adapters import (
    AdapterError,
    Contents,
    Found,
    Naming,
    foreign_name,
    manifest,
    names,
    recognise,
)
from trainer.model.kvcache import HorizonError
from trainer.model.layout import target
from trainer.model.wan import make_plan

Shapes = dict[str, tuple[int, ...]]
NATIVE = Naming.NATIVE


def shapes_of(found: Found) -> Shapes:
    shapes = manifest(found)
    return {theirs: shapes[ours] for ours, theirs in names(found).items()}


def released(compact: bool) -> Shapes:
    """i.2 and c.1 of the specification, written out."""
    d, f = 5120, 13824
    table: Shapes = {}

    def linear(name: str, out: int, *into: int) -> None:
        table[f"{name}.weight"], table[f"{name}.bias"] = (out, *into), (out,)

    linear("patch_embedding", d, 36, 1, 2, 2)
    linear("text_embedding.0", d, 4096)
    linear("text_embedding.2", d, d)
    linear("time_embedding.0", d, 256)
    linear("time_embedding.2", d, d)
    linear("time_projection.1", 30720, d)
    for n in range(40):
        block = f"blocks.{n}"
        table[f"{block}.modulation"] = (1, 6, d)
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"{block}.{attention}.{part}", d, d)
            table[f"{block}.{attention}.norm_q.weight"] = (d,)
            table[f"{block}.{attention}.norm_k.weight"] = (d,)
        linear(f"{block}.norm3", d)
        linear(f"{block}.ffn.0", f, d)
        linear(f"{block}.ffn.2", d, f)
        linear(f"{block}.img_action_mlp.0", d, 10240)
        linear(f"{block}.img_action_mlp.2", d, d)
    linear("action_in_cont.0", 256, 2)
    linear("action_in_cont.2", 1024, 256)
    linear("action_in_cont.4", d, 1024)
    for k, size in enumerate((3, 3, 2, 2)):
        table[f"action_in_disc.{k}.weight"] = (size, d)
    memory = "memory_compress"
    linear(f"{memory}.input_layer", 64, 36)
    for k, (width, out) in enumerate(((64, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512))):
        linear(f"{memory}.blocks.{k}.conv", out, width, 3, 3, 3)
        if k < 3:
            linear(f"{memory}.blocks.{k}.resample.1", out, out, 3, 3)
        else:
            linear(f"{memory}.blocks.{k}.avg_shortcut", out, width, 1, 1, 1)
    linear(f"{memory}.blocks.0.time_conv", 64, 64, 3, 1, 1)
    for k in range(2):
        table[f"{memory}.attn_blocks.{k}.norm.gamma"] = (512, 1, 1)
        linear(f"{memory}.attn_blocks.{k}.to_qkv", 1536, 512, 1, 1)
        linear(f"{memory}.attn_blocks.{k}.proj", 512, 512, 1, 1)
    linear(f"{memory}.output_layer", d, 512)
    table["head.modulation"] = (1, 2, d)
    if compact:
        table["head.block_weight"], table["head.block_bias"] = (2, 128, d), (2, 128)
    else:
        linear("head.head", 64, d)
    return table


@pytest.mark.parametrize("compact", [False, True])
def test_a14b_has_the_names_and_shapes_of_the_release(compact: bool) -> None:
    contents = Contents.COMPACT if compact else Contents.VELOCITY
    wanted = released(compact)
    given = shapes_of(Found(NATIVE, contents, A14B, 2 if compact else 1))
    assert given == wanted
    parameters = sum(math.prod(shape) for shape in given.values())
    assert (len(given), round(parameters / 1e9, 2), round(2 * parameters / 1e9, 2)) == (1305, 17.46, 34.92)
    found, table = recognise(wanted, "here")
    assert (found.contents, found.preset, found.heads) == (contents, A14B, 2 if compact else 1)
    assert sorted(table.values()) == sorted(wanted)


def test_the_base_has_the_names_and_shapes_of_diffusers_own_network() -> None:
    from diffusers import WanTransformer3DModel

    c = TINY.model
    with torch.device("meta"):
        theirs = WanTransformer3DModel(
            num_attention_heads=c.heads,
            attention_head_dim=c.head_dim,
            in_channels=c.in_dim,
            out_channels=c.out_dim,
            text_dim=c.text_dim,
            freq_dim=c.freq_dim,
            ffn_dim=c.ffn,
            num_layers=c.layers,
        )
    wanted = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    found = Found(Naming.DIFFUSERS, Contents.BASE, TINY)
    assert shapes_of(found) == wanted
    assert recognise(wanted, "here")[0] == found


@pytest.mark.parametrize("bank", ["head.pdd_weight", "head.weight", "head.head.weight"])
def test_a_bank_of_heads_is_known_by_each_of_its_names(bank: str) -> None:
    found = Found(NATIVE, Contents.BANK, TINY, 56)
    shapes = shapes_of(found)
    spelt = {
        bank: shapes.pop("head.pdd_weight"),
        bank.replace("weight", "bias"): shapes.pop("head.pdd_bias"),
    }
    given, table = recognise(shapes | spelt, "here")
    assert given == found
    assert table["head.bank_weight"] == bank


def broken(change: str) -> Shapes:
    shapes = shapes_of(Found(NATIVE, Contents.VELOCITY, TINY))
    match change:
        case "missing":
            del shapes["blocks.1.img_action_mlp.2.bias"]
        case "extra":
            shapes["blocks.2.norm3.weight"] = (64,)
        case "misshapen":
            shapes["head.head.weight"] = (63, 64)
        case "fused":
            for part in "qkv":
                del shapes[f"blocks.0.self_attn.{part}.weight"]
            shapes["blocks.0.self_attn.qkv.weight"] = (192, 64)
        case "width":
            shapes["patch_embedding.weight"] = (3072, 36, 1, 2, 2)
        case "other":
            return {"encoder.block.0.weight": (4, 4)}
    return shapes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", r"1 missing \(blocks.1.img_action_mlp.2.bias\)$"),
        ("extra", r"1 extra \(blocks.2.norm3.weight\)$"),
        ("misshapen", r"1 misshapen \(head.head.weight is 63x64, not 64x64\)$"),
        ("fused", r"3 missing .*; 1 extra \(blocks.0.self_attn.qkv.weight\)$"),
        ("width", r"patch_embedding.weight is 3072x36x1x2x2; .* 5120 \(a14b\)$"),
        ("other", r"no Wan transformer"),
    ],
)
def test_every_difference_is_named_in_one_line(change: str, says: str) -> None:
    with pytest.raises(AdapterError, match=says) as caught:
        recognise(broken(change), "high")
    assert "\n" not in str(caught.value)


def test_diffusers_has_no_place_for_actions_and_memory() -> None:
    for name in ("action.cont.0.weight", "memory.input_layer.bias", "blocks.3.action_mlp.0.weight"):
        with pytest.raises(AdapterError, match="diffusers has no place"):
            foreign_name(name, Naming.DIFFUSERS)


def test_weights_of_the_release_place_1024_latents_and_no_more() -> None:
    model = Found(NATIVE, Contents.VELOCITY, TINY).model
    assert model == replace(TINY.model, max_latents=1024)
    make_plan(model, target(TINY, 255, 256))
    with pytest.raises(HorizonError, match="at most 1024"):
        make_plan(model, target(TINY, 256, 257))

"""The block stack against diffusers, on random weights."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.trainer.model_support import PRESET, SEEDS, Video, draw
from trainer.model.kvcache import RawText
from trainer.model.layout import Rule, target
from trainer.model.wan import Inputs, WanModel, build, make_plan

NAMES = {
    "attn1.": "self_attn.",
    "attn2.": "cross_attn.",
    "to_q.": "q.",
    "to_k.": "k.",
    "to_v.": "v.",
    "to_out.0.": "o.",
    "norm2.": "norm3.",
    "ffn.net.0.proj.": "ffn.0.",
    "ffn.net.2.": "ffn.2.",
    "condition_embedder.time_embedder.linear_1.": "time_embedding.0.",
    "condition_embedder.time_embedder.linear_2.": "time_embedding.2.",
    "condition_embedder.time_proj.": "time_projection.1.",
    "condition_embedder.text_embedder.linear_1.": "text_embedding.0.",
    "condition_embedder.text_embedder.linear_2.": "text_embedding.2.",
    "proj_out.": "head.head.",
}


def ours(name: str) -> str:
    for theirs, here in NAMES.items():
        name = name.replace(theirs, here)
    if name == "scale_shift_table":
        return "head.modulation"
    return name.replace("scale_shift_table", "modulation")


def reference(seed: int) -> WanTransformer3DModel:
    """A random diffusers network of the tiny size; no parameter of it is zero."""
    config = PRESET.model
    model = WanTransformer3DModel(
        patch_size=config.patch,
        num_attention_heads=config.heads,
        attention_head_dim=config.head_dim,
        in_channels=config.in_dim,
        out_channels=config.out_dim,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn,
        num_layers=config.layers,
        eps=config.eps,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=generator)
    return model.eval()


def of_reference(theirs: WanTransformer3DModel) -> WanModel:
    """Ours with the same weights; what diffusers does not have is as at initialisation, and adds nothing."""
    model = build(PRESET.model, 0)
    weights = {ours(name): tensor for name, tensor in theirs.state_dict().items()}
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert all(
        name.split(".")[0] in ("action", "memory") or ".action_mlp." in name for name in result.missing_keys
    )
    return model.eval()


def relative_error(given: Tensor, wanted: Tensor) -> float:
    return ((given - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("expert", SEEDS)
def test_the_stack_equals_diffusers_with_a_timestep_a_token(expert: str) -> None:
    theirs = reference(SEEDS[expert])
    model = of_reference(theirs)
    video = Video(chunks=1)
    layout = target(PRESET, 0, 1)
    timesteps = torch.tensor([[999.0, 875.5, 301.0, 0.0]])
    latents = video.latents(layout)
    text = draw(3, 1, PRESET.model.text_len, PRESET.model.text_dim)
    text[:, 9:] = 0.0  # the prompt has 9 tokens; diffusers is given the padding, ours adds it
    with torch.no_grad():
        wanted = theirs(
            latents, timesteps.repeat_interleave(PRESET.grid.tokens, dim=1), text, return_dict=False
        )[0]
        inputs = Inputs(
            make_plan(PRESET.model, layout, rule=Rule.FULL),
            latents,
            timesteps.double() / 1000,
            video.actions,
            RawText(text[:, None, :9]),
        )
        given = model(inputs).velocity
    assert given.shape == wanted.shape
    assert relative_error(given, wanted) <= 1e-5

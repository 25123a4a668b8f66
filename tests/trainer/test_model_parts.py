"""What initialisation leaves alone, what has an influence, sizes, and what is never stored a token."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schemas.caption import EventCategory, IntervalEvent, StructuredCaption, render
from schemas.clip import Perspective
from tests.trainer.model_support import PRESET, SEEDS, Video, action_rows, draw, noisy_expert
from trainer.config import A14B, PRESETS, ConfigError, Geometry, preset
from trainer.model.action import ActionEncoder, ActionError, ActionMlp, check_rows
from trainer.model.kvcache import RawText
from trainer.model.layout import Rule, clip, teacher_forced
from trainer.model.rope import axis_widths, rotate, rotations
from trainer.model.wan import Inputs, Shared, WanModel, build

CAPTION = StructuredCaption(
    scene="a grey hall",
    character="a soldier in green",
    events=(IntervalEvent(category=EventCategory.OBJECT_CHANGE, text="a door opens"),),
    provenance="log",
)


def fresh_expert(expert: str) -> WanModel:
    """An expert at initialisation, but for its head: a zero head would hide everything."""
    model = build(PRESET.model, SEEDS[expert])
    with torch.no_grad():
        model.head.modulation.normal_(generator=torch.Generator().manual_seed(1))
        for part in model.head.bank():
            part.normal_(generator=torch.Generator().manual_seed(2))
    return model.eval()


def encoded(prompt: str) -> RawText:
    """A stand-in for the text encoder: a vector for each word, from the word's hash."""
    seeds = [int(hashlib.sha256(word.encode()).hexdigest()[:8], 16) for word in prompt.split()]
    return RawText(torch.cat([draw(seed, 1, 1, 1, PRESET.model.text_dim) for seed in seeds], dim=2))


@torch.no_grad()
def predict(model: WanModel, video: Video, **more: object) -> Tensor:
    return model(video.inputs(teacher_forced(PRESET, 1, 2), **more)).velocity


@pytest.mark.parametrize("expert", SEEDS)
def test_the_action_module_adds_nothing_at_initialisation(
    expert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, video = fresh_expert(expert), Video(chunks=3)
    with_action = predict(model, video)
    assert with_action.any()
    monkeypatch.setattr(ActionMlp, "inject", lambda _, x, action, runs: x)
    assert torch.equal(predict(model, video), with_action)


@pytest.mark.parametrize("expert", SEEDS)
def test_the_fine_branch_adds_nothing_at_initialisation(expert: str) -> None:
    model, video = fresh_expert(expert), Video(chunks=3)
    history = video.inputs(teacher_forced(PRESET, 1, 2)).history
    assert history is not None
    fine, _ = model.memory(history.full)
    assert not fine.any()
    other = replace(history, full=history.full + 1.0)
    assert torch.equal(predict(model, video, history=other), predict(model, video))


@pytest.mark.parametrize("expert", SEEDS)
def test_every_condition_changes_the_output(expert: str) -> None:
    model, video = noisy_expert(expert), Video(chunks=3)
    prompt = render(CAPTION, Perspective.THIRD, 0)
    before = predict(model, video, text=encoded(prompt))
    changed = {
        "scene": CAPTION.model_copy(update={"scene": "a red hall"}),
        "character": CAPTION.model_copy(update={"character": "a soldier in blue"}),
        "event": CAPTION.model_copy(
            update={"events": (IntervalEvent(category=EventCategory.OBJECT_CHANGE, text="a door shuts"),)}
        ),
    }
    others: dict[str, dict[str, object]] = {
        field: {"text": encoded(render(caption, Perspective.THIRD, 0))} for field, caption in changed.items()
    }
    history = video.inputs(teacher_forced(PRESET, 1, 2)).history
    assert history is not None
    others["fine branch"] = {"history": replace(history, full=history.full + 1.0)}
    others["low-resolution stream"] = {"history": replace(history, low=history.low + 1.0)}
    others["noise level"] = {"sigma": video.sigma[:, 4:] * 0.5}
    latents = video.latents(teacher_forced(PRESET, 1, 2))
    latents[:, 16:] += 1.0
    others["image condition"] = {"latents": latents}
    for column in range(6):
        rows = video.actions.clone()
        rows[..., column] = (1 - rows[..., column]).clamp(-1, 1) if column > 1 else rows[..., column] + 1.0
        others[f"action column {column}"] = {"actions": rows}
    for what, more in others.items():
        after = predict(model, video, **{"text": encoded(prompt), **more})
        assert (after - before).abs().max() > 1e-4 * before.abs().max(), what


def test_the_embedding_of_an_action_is_the_sum_of_its_parts() -> None:
    encoder = noisy_expert().action
    row = torch.tensor([[[1.5, -2.0, -1.0, 1.0, 1.0, 0.0]]])
    parts = [encoder.disc[i].weight[index] for i, index in enumerate((0, 2, 1, 0))]
    wanted = encoder.cont(row[0, 0, :2]) + sum(parts)
    assert torch.allclose(encoder(row)[0, 0], wanted, atol=1e-6)


def passed_to_the_first_block(model: WanModel, inputs: Inputs) -> tuple[Tensor, Shared]:
    seen: list[tuple[Tensor, Shared]] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with torch.no_grad():
        model(inputs)
    handle.remove()
    return seen[0]


def test_memory_is_clean_and_every_latent_has_its_own_noise_level_and_action() -> None:
    model, video = noisy_expert(), Video(chunks=3)
    layout = teacher_forced(PRESET, 1, 2)
    _, shared = passed_to_the_first_block(model, video.inputs(layout))
    clean = passed_to_the_first_block(model, video.inputs(layout, sigma=torch.zeros(1, 8)))[1].modulation
    known = len(layout) - 8
    assert torch.equal(shared.modulation[:, :known], clean[:, -1:].expand(1, known, 6, -1))
    assert len({tuple(m.tolist()) for m in shared.modulation[0, known:, 0]}) == 8
    with torch.no_grad():
        wanted = [model.action(video.actions[:, [frame.time]]) for frame in layout.frames]
    assert torch.allclose(shared.action, torch.cat(wanted, dim=1), atol=1e-6)


@torch.no_grad()
def test_a_block_is_its_formula_token_by_token() -> None:
    """Section a.1 and b, with modulation and action spread over tokens and the concatenation [h ; e]."""
    model, video = noisy_expert(), Video(chunks=3)
    layout = teacher_forced(PRESET, 1, 2)
    x, shared = passed_to_the_first_block(model, video.inputs(layout))
    block, of_token = model.blocks[0], layout.frame_of_token()
    given = block(x, shared, ([], []), None)[0]

    def normed(h: Tensor) -> Tensor:
        return nn.functional.layer_norm(h, h.shape[-1:], eps=PRESET.model.eps)

    e = (block.modulation + shared.modulation)[:, of_token]
    h = x + e[:, :, 2] * block.self_attn(normed(x) * (1 + e[:, :, 1]) + e[:, :, 0], shared.plan, ([], []))[0]
    h = h + block.cross_attn(block.norm3(h), shared.plan, *block.cross_attn.key_value(shared.text))
    h = h + nn.Sequential.forward(block.action_mlp, torch.cat([h, shared.action[:, of_token]], dim=-1))
    h = h + e[:, :, 5] * block.ffn(normed(h) * (1 + e[:, :, 4]) + e[:, :, 3])
    assert (given - h).abs().max() <= 1e-5 * h.abs().max()


def test_action_weights_start_by_their_law() -> None:
    encoder = ActionEncoder(5120, (256, 1024))
    encoder.init_weights(torch.Generator().manual_seed(1))
    assert encoder.embedding_std == pytest.approx(0.01276, abs=1e-5)
    for embedding in encoder.disc:
        assert embedding.weight.std().item() == pytest.approx(0.01276, rel=0.03)
    for layer in (encoder.cont[0], encoder.cont[2], encoder.cont[4]):
        assert isinstance(layer, nn.Linear)
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.02)
        assert not layer.bias.any()


def test_action_rows_outside_their_domain_are_named() -> None:
    rows = action_rows(1, 8)
    check_rows(rows)
    for column, value in ((2, 2.0), (3, 0.5), (4, -1.0), (5, 2.0)):
        bad = rows.clone()
        bad[0, 3, column] = value
        with pytest.raises(ActionError, match=f"column {column}"):
            check_rows(bad)
    rows[0, 0, 0] = math.nan
    with pytest.raises(ActionError, match="not finite"):
        check_rows(rows)


def test_weights_come_from_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = build(PRESET.model, 1), build(PRESET.model, 1), build(PRESET.model, 2)
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters())]
    assert all(same)
    assert all(torch.isfinite(p).all() for p in first.parameters())
    assert not torch.equal(first.blocks[0].self_attn.q.weight, other.blocks[0].self_attn.q.weight)


def test_rotation_depends_on_the_distance_alone_at_any_horizon() -> None:
    query, key = draw(1, 1, 1, 1, 128).double(), draw(2, 1, 1, 1, 128).double()

    def score(at: int, distance: int) -> float:
        turned = [
            rotate(x, *rotations(torch.tensor([[k, 3, 5]]), 128, 1e4))
            for x, k in ((query, at), (key, at + distance))
        ]
        return (turned[0] * turned[1]).sum().item()

    for at in (0, 1277, 100_000):
        assert score(at, 7) == pytest.approx(score(0, 7), abs=1e-4)
    assert abs(score(0, 7) - score(0, 9)) > 1e-2


def test_the_axes_share_a_head_as_in_wan() -> None:
    assert axis_widths(128) == (44, 42, 42)
    cos, sin = rotations(torch.tensor([[1277, 0, 0]]), 128, 1e4)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[0, 1].item() == pytest.approx(math.cos(1277 * 1e4 ** (-2 / 44)), abs=1e-6)
    assert torch.equal(cos[0, 22:], torch.ones(42))


class Largest(TorchDispatchMode):
    """Records the shape of every floating tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.shapes.append(tensor.shape)
        return out


def test_modulation_is_never_stored_for_each_token() -> None:
    model, video = noisy_expert(), Video(chunks=9)
    layout = clip(PRESET, 1, 8)
    inputs = video.inputs(layout, Rule.FULL)
    with torch.no_grad(), Largest() as seen:
        model(inputs)
    dim, per_token = PRESET.model.dim, 6 * PRESET.model.dim * layout.tokens
    modulation = [s for s in seen.shapes if s[-2:] == (6, dim) and s[0] == 1 and len(s) == 4]
    assert {s.numel() for s in modulation} == {6 * dim * len(layout)}
    assert max(s.numel() for s in seen.shapes) < per_token
    # At 46,592 tokens of width 5120: 4 MB a block instead of 5.7 GB.
    a14b = clip(A14B, 0, 8)
    assert 6 * A14B.model.dim * len(a14b) * 4 < 4e6 < 5.7e9 < 6 * A14B.model.dim * a14b.tokens * 4


def test_bf16_weights_keep_modulation_positions_and_output_in_fp32() -> None:
    model, video = noisy_expert(), Video(chunks=3)
    full = predict(model, video)
    seen: list[Shared] = []
    model.bfloat16().blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    half = predict(model, video)
    assert half.dtype == seen[0].modulation.dtype == seen[0].plan.cos.dtype == torch.float32
    assert seen[0].action.dtype == torch.bfloat16
    # measured 0.006
    assert (half - full).abs().max() <= 0.03 * full.abs().max()


# Section i.2 of the spec, for one block and everything outside the blocks.
BLOCK = {
    "modulation": (1, 6, 5120),
    **{f"{a}.{n}.weight": (5120, 5120) for a in ("self_attn", "cross_attn") for n in "qkvo"},
    **{f"{a}.{n}.bias": (5120,) for a in ("self_attn", "cross_attn") for n in "qkvo"},
    **{f"{a}.norm_{n}.weight": (5120,) for a in ("self_attn", "cross_attn") for n in "qk"},
    "norm3.weight": (5120,),
    "norm3.bias": (5120,),
    "ffn.0.weight": (13824, 5120),
    "ffn.0.bias": (13824,),
    "ffn.2.weight": (5120, 13824),
    "ffn.2.bias": (5120,),
    "img_action_mlp.0.weight": (5120, 10240),
    "img_action_mlp.0.bias": (5120,),
    "img_action_mlp.2.weight": (5120, 5120),
    "img_action_mlp.2.bias": (5120,),
}
OUTSIDE = {
    "patch_embedding.weight": (5120, 36, 1, 2, 2),
    "text_embedding.0.weight": (5120, 4096),
    "text_embedding.2.weight": (5120, 5120),
    "time_embedding.0.weight": (5120, 256),
    "time_embedding.2.weight": (5120, 5120),
    "time_projection.1.weight": (30720, 5120),
    "action_in_cont.0.weight": (256, 2),
    "action_in_cont.2.weight": (1024, 256),
    "action_in_cont.4.weight": (5120, 1024),
    "memory_compress.input_layer.weight": (64, 36),
    "memory_compress.blocks.0.conv.weight": (64, 64, 3, 3, 3),
    "memory_compress.blocks.0.resample.1.weight": (64, 64, 3, 3),
    "memory_compress.blocks.0.time_conv.weight": (64, 64, 3, 1, 1),
    "memory_compress.blocks.1.conv.weight": (128, 64, 3, 3, 3),
    "memory_compress.blocks.1.resample.1.weight": (128, 128, 3, 3),
    "memory_compress.blocks.2.conv.weight": (256, 128, 3, 3, 3),
    "memory_compress.blocks.2.resample.1.weight": (256, 256, 3, 3),
    "memory_compress.blocks.3.conv.weight": (256, 256, 3, 3, 3),
    "memory_compress.blocks.3.avg_shortcut.weight": (256, 256, 1, 1, 1),
    "memory_compress.blocks.4.conv.weight": (512, 256, 3, 3, 3),
    "memory_compress.blocks.4.avg_shortcut.weight": (512, 256, 1, 1, 1),
    "memory_compress.blocks.5.conv.weight": (512, 512, 3, 3, 3),
    "memory_compress.blocks.5.avg_shortcut.weight": (512, 512, 1, 1, 1),
    **{f"memory_compress.attn_blocks.{i}.to_qkv.weight": (1536, 512, 1, 1) for i in (0, 1)},
    **{f"memory_compress.attn_blocks.{i}.proj.weight": (512, 512, 1, 1) for i in (0, 1)},
    "memory_compress.output_layer.weight": (5120, 512),
    "head.head.weight": (64, 5120),
}
NO_BIAS = {
    **{f"action_in_disc.{i}.weight": (n, 5120) for i, n in enumerate((3, 3, 2, 2))},
    **{f"memory_compress.attn_blocks.{i}.norm.gamma": (512, 1, 1) for i in (0, 1)},
    "head.modulation": (1, 2, 5120),
}


def released(name: str) -> str:
    name = re.sub(r"^action\.(cont|disc)\.", r"action_in_\1.", name)
    return re.sub(r"^memory\.", "memory_compress.", name).replace(".action_mlp.", ".img_action_mlp.")


def test_a14b_has_the_tensors_of_the_release() -> None:
    with torch.device("meta"):
        model = WanModel(A14B.model)
    given = {released(name): tuple(p.shape) for name, p in model.state_dict().items()}
    wanted = {f"blocks.{i}.{name}": shape for i in range(40) for name, shape in BLOCK.items()}
    wanted |= OUTSIDE | NO_BIAS
    wanted |= {name[: -len("weight")] + "bias": (shape[0],) for name, shape in OUTSIDE.items()}
    assert given == wanted
    assert len(given) == 1305
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters / 1e9 == pytest.approx(17.46, abs=0.005)
    assert 2 * parameters / 1e9 == pytest.approx(34.92, abs=0.005)
    assert sum(p.numel() for p in model.memory.parameters()) / 1e6 == pytest.approx(19.58, abs=0.005)
    assert sum(p.numel() for p in model.action.parameters()) / 1e6 == pytest.approx(5.56, abs=0.005)
    assert not list(model.buffers())  # nothing that a sharding policy could leave in another dtype


def test_every_preset_has_whole_grids_and_names_its_experts() -> None:
    for name, made in PRESETS.items():
        assert preset(name) is made
        assert made.grid.tokens * 2 == made.low_grid.tokens * 32
    assert A14B.grid.tokens == 1456 and A14B.low_grid.tokens == 91
    assert (A14B.expert(0.9), A14B.expert(0.8999)) == ("high", "low")
    assert preset("wan1_3b").expert(0.95) == "single"
    with pytest.raises(ConfigError, match="one of tiny"):
        preset("huge")
    with pytest.raises(ConfigError, match="multiples of 64"):
        Geometry(480, 832)
    with pytest.raises(ConfigError, match="1000 sigma"):
        A14B.expert(900.0)

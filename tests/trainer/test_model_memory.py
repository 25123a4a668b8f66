"""The compressor: how much it folds, how far it sees, and that streaming changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.trainer.model_support import PRESET, SEEDS, Video, draw, noisy_expert
from trainer.model.layout import Rule, clip
from trainer.model.memory import CompressorBlock, CompressorError, MemoryCompressor, MemoryState, Tails

LATENT = PRESET.geometry.latent


def streamed(compressor: MemoryCompressor, history: Tensor, lengths: list[int]) -> tuple[Tensor, MemoryState]:
    tokens, state = [], None
    for part in history.split(lengths, dim=2):
        made, state = compressor(part, state)
        tokens.append(made)
    assert state is not None
    return torch.cat(tokens, dim=1), state


def test_a_history_becomes_32_times_fewer_tokens() -> None:
    compressor = noisy_expert().memory
    tokens, _ = compressor(draw(1, 1, 36, 8, *LATENT))
    assert tokens.shape[1] * tokens.shape[2] * 32 == 8 * PRESET.grid.tokens
    assert tokens.shape == (1, 4, PRESET.low_grid.tokens, PRESET.model.dim)


@torch.no_grad()
def test_compressed_latent_j_sees_latents_2j_minus_24_to_2j_plus_1() -> None:
    latents = 40
    compressor = noisy_expert().memory.double()  # the far taps are below the resolution of fp32
    history = draw(2, 1, 36, latents, *LATENT).double()
    before, _ = compressor(history)
    for k in range(latents):
        other = history.clone()
        other[:, :, k] += 10.0 * draw(3, 1, 36, *LATENT).double()
        after, _ = compressor(other)
        changed = [j for j in range(latents // 2) if not torch.equal(before[:, j], after[:, j])]
        assert changed == [j for j in range(latents // 2) if 2 * j - 24 <= k <= 2 * j + 1], k


@pytest.mark.parametrize("expert", SEEDS)
@pytest.mark.parametrize("lengths", [[4] * 10, [2, 6, 4, 28]])
@torch.no_grad()
def test_streamed_equals_the_whole_history(expert: str, lengths: list[int]) -> None:
    compressor = noisy_expert(expert).memory
    history = draw(4, 1, 36, 40, *LATENT)
    whole, _ = compressor(history)
    parts, _ = streamed(compressor, history, lengths)
    assert (parts - whole).abs().max() <= 1e-6 * whole.abs().max()


@torch.no_grad()
def test_the_state_does_not_grow_with_the_history() -> None:
    compressor = noisy_expert().memory
    _, short = streamed(compressor, draw(5, 1, 36, 4, *LATENT), [4])
    _, long = streamed(compressor, draw(5, 1, 36, 40, *LATENT), [4] * 10)
    assert [t.shape for t in short.tails] == [t.shape for t in long.tails]
    assert (short.latents, long.latents) == (4, 40)


@torch.no_grad()
def test_a_chunk_leaves_the_state_that_it_was_given_alone() -> None:
    compressor = noisy_expert().memory
    _, state = compressor(draw(6, 1, 36, 4, *LATENT))
    kept = [tail.clone() for tail in state.tails]
    first, _ = compressor(draw(7, 1, 36, 4, *LATENT), state)
    again, _ = compressor(draw(7, 1, 36, 4, *LATENT), state)
    assert torch.equal(first, again)
    assert all(torch.equal(tail, was) for tail, was in zip(state.tails, kept))


@torch.no_grad()
def test_memory_tokens_are_the_sum_of_both_branches() -> None:
    model, video = noisy_expert(), Video(chunks=3)
    layout = clip(PRESET, 2, 1)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    inputs = video.inputs(layout, Rule.FULL)
    model(inputs)
    assert inputs.history is not None
    fine, _ = model.memory(inputs.history.full)
    coarse = model.patch_embedding(inputs.history.low).flatten(3).permute(0, 2, 3, 1)
    start, n = PRESET.grid.tokens, 4 * PRESET.low_grid.tokens
    assert torch.equal(seen[0][:, start : start + n], (coarse + fine).flatten(1, 2))


@torch.no_grad()
def test_the_shortcut_averages_groups_of_channels_time_rows_and_columns() -> None:
    block = CompressorBlock(4, 8, halve_space=True, halve_time=False)
    for parameter in block.parameters():
        parameter.zero_()
    x = draw(9, 1, 4, 2, 4, 4)
    given = block(x, Tails(None))
    for t, h, w in itertools.product(range(2), range(2), range(2)):
        folded = [
            x[0, c, t, 2 * h + i, 2 * w + j] for c, i, j in itertools.product(range(4), range(2), range(2))
        ]
        wanted = torch.stack(folded).reshape(8, 2).mean(1)
        assert torch.allclose(given[0, :, t, h, w], wanted, atol=1e-6)
    block = CompressorBlock(4, 2, halve_space=True, halve_time=True)
    for parameter in block.parameters():
        parameter.zero_()
    given = block(x, Tails(None))
    folded = [x[0, c, t, i, j] for c, t, i, j in itertools.product(range(4), range(2), range(2), range(2))]
    assert torch.allclose(given[0, :, 0, 0, 0], torch.stack(folded).reshape(2, 16).mean(1), atol=1e-6)


@torch.no_grad()
def test_a_block_pads_the_left_of_time_and_the_right_and_bottom_of_space() -> None:
    block = noisy_expert().memory.blocks[0]
    x = draw(10, 1, 8, 4, 8, 16)
    y = functional.silu(
        functional.conv3d(functional.pad(x, (1, 1, 1, 1, 2, 0)), block.conv.weight, block.conv.bias)
    )
    conv = block.resample[1]
    frames = [
        functional.conv2d(functional.pad(y[:, :, t], (0, 1, 0, 1)), conv.weight, conv.bias, stride=2)
        for t in range(4)
    ]
    zero = torch.zeros_like(frames[0])
    padded = torch.stack([zero, zero, *frames], dim=2)
    taps = block.time_conv.weight[..., 0, 0]
    steps = [
        sum(torch.einsum("oc,bchw->bohw", taps[..., k], padded[:, :, 2 * j + k]) for k in range(3))
        + block.time_conv.bias[:, None, None]
        for j in range(2)
    ]
    pooled = x.reshape(1, 8, 2, 2, 4, 2, 8, 2).mean((3, 5, 7))  # a group is one channel here
    wanted = torch.stack(steps, dim=2) + pooled
    assert torch.allclose(block(x, Tails(None)), wanted, atol=1e-5)


def test_an_odd_history_is_refused() -> None:
    with pytest.raises(CompressorError, match="3 latents"):
        noisy_expert().memory(draw(8, 1, 36, 3, *LATENT))

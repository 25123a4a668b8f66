"""The compressor: how much it folds, how far it sees, and that streaming changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.trainer.model_support import PRESET, SEEDS, Video, draw, noisy_expert
from trainer.model.layout import Rule, clip
from trainer.model.memory import CompressorError, MemoryCompressor, MemoryState

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


def test_an_odd_history_is_refused() -> None:
    with pytest.raises(CompressorError, match="3 latents"):
        noisy_expert().memory(draw(8, 1, 36, 3, *LATENT))

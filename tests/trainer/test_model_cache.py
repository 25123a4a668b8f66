"""A masked pass and a cached rollout are the same computation; what the cache holds, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.model_support import PRESET, SEEDS, Video, noisy_expert
from trainer.config import A14B
from trainer.model.kvcache import (
    EMPTY,
    CacheError,
    HorizonError,
    KvCache,
    ProjectedText,
    RawText,
    check_horizon,
)
from trainer.model.layout import Kind, chunk_prompts, clip, memory, prefill, target, teacher_forced
from trainer.model.memory import MemoryState
from trainer.model.wan import InputError, Inputs, Outputs, WanModel, make_plan

CHUNK = PRESET.chunk


def run(
    model: WanModel, video: Video, layout, cache: KvCache, state: MemoryState | None = None, **more
) -> Outputs:  # type: ignore[no-untyped-def]
    plan = make_plan(PRESET.model, layout, context=cache.layout)
    history = video.history(layout, state)
    with torch.no_grad():
        return model(video.inputs(layout, plan=plan, cache=cache, history=history, **more))


def remember(
    model: WanModel, video: Video, cache: KvCache, state: MemoryState | None, done: int
) -> tuple[KvCache, MemoryState | None]:
    """The prefill after chunk `done - 1`, with that chunk's prompt."""
    base = cache.without_tail()
    layout = prefill(PRESET, done, base.chunks)
    out = run(model, video, layout, base, state, text=video.prompt(done - 1), keep=True)
    assert out.segment is not None
    return base.extend(out.segment), out.memory


def rollout(model: WanModel, video: Video, chunks: int) -> tuple[list[Tensor], list[KvCache]]:
    """Velocities of every chunk, one by one over the cache, on the given history; and the caches."""
    cache, state = EMPTY, None
    velocities, caches = [], [cache]
    for chunk in range(chunks):
        layout = target(PRESET, chunk, chunk + 1)
        velocities.append(run(model, video, layout, cache, text=video.prompt(chunk)).velocity)
        cache, state = remember(model, video, cache, state, chunk + 1)
        caches.append(cache)
    return velocities, caches


def masked(model: WanModel, video: Video, history: int, chunks: int) -> Tensor:
    layout = teacher_forced(PRESET, history, chunks)
    plan = make_plan(PRESET.model, layout, prompts=chunk_prompts(layout))
    with torch.no_grad():
        return model(video.inputs(layout, plan=plan, text=RawText(video.prompts))).velocity


@pytest.mark.parametrize("expert", SEEDS)
def test_one_masked_pass_equals_prefill_and_denoise(expert: str) -> None:
    model, video = noisy_expert(expert), Video(chunks=22)
    one_by_one, _ = rollout(model, video, 22)
    for history in (0, 1, 2, 5, 20):
        chunks = min(4, 22 - history)
        velocity = masked(model, video, history, chunks)
        wanted = torch.cat(one_by_one[history : history + chunks], dim=2)
        assert (velocity - wanted).abs().max() <= 1e-5 * wanted.abs().max(), history


def test_the_memory_of_a_masked_pass_can_be_cached_once_for_many_passes() -> None:
    model, video = noisy_expert(), Video(chunks=5)
    layout = teacher_forced(PRESET, 1, 4)
    known = layout.only(Kind.SINK, Kind.CMP, Kind.TMP)
    out = run(model, video, known, EMPTY, keep=True)
    assert out.segment is not None
    cached = run(model, video, target(PRESET, 1, 5), EMPTY.extend(out.segment)).velocity
    with torch.no_grad():
        whole = model(video.inputs(layout)).velocity
    assert (cached - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_changed_future_leaves_the_past_bit_equal() -> None:
    model, video = noisy_expert(), Video(chunks=5)
    before = masked(model, video, 1, 4)
    changed = Video(chunks=5)
    future = slice(3 * CHUNK, 5 * CHUNK)
    changed.clean[:, :, future] += 1.0
    changed.noisy[:, :, future] += 1.0
    changed.low[:, :, 3 * CHUNK // 2 :] += 1.0
    after = masked(model, changed, 1, 4)
    assert torch.equal(before[:, :, : 2 * CHUNK], after[:, :, : 2 * CHUNK])
    for chunk in (2, 3):
        own = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert not torch.equal(before[:, :, own], after[:, :, own])


def test_chunks_of_one_pass_do_not_see_each_other() -> None:
    model, video = noisy_expert(), Video(chunks=4)
    before = masked(model, video, 0, 4)
    video.noisy[:, :, CHUNK : 2 * CHUNK] += 1.0
    after = masked(model, video, 0, 4)
    same = [torch.equal(a, b) for a, b in zip(before.split(CHUNK, 2), after.split(CHUNK, 2))]
    assert same == [True, False, True, True]


def test_an_earlier_cache_is_an_exact_prefix_of_every_later_one() -> None:
    _, caches = rollout(noisy_expert(), Video(chunks=5), 5)
    for i in range(1, 5):
        early, late = caches[i].without_tail(), caches[5]
        n = early.layout.tokens
        for layer in range(PRESET.model.layers):
            for mine, theirs in zip(early.layer(layer), late.layer(layer)):
                assert torch.equal(torch.cat(mine, 1), torch.cat(theirs, 1)[:, :n])
        assert caches[5].at(i).layout == early.layout


def test_step_by_step_prefill_equals_one_prefill_of_all() -> None:
    model, video = noisy_expert(), Video(chunks=5)
    video.prompts[:] = video.prompts[:, :1].clone()
    _, caches = rollout(model, video, 5)
    once, _ = remember(model, video, EMPTY, None, 5)
    assert once.layout == caches[5].layout == memory(PRESET, 5)
    for layer in range(PRESET.model.layers):
        for mine, theirs in zip(once.layer(layer), caches[5].layer(layer)):
            joined = torch.cat(theirs, 1)
            assert (torch.cat(mine, 1) - joined).abs().max() <= 1e-5 * joined.abs().max()


def test_the_anchor_is_replaced_and_the_prefix_grows() -> None:
    _, caches = rollout(noisy_expert(), Video(chunks=3), 3)
    for done, cache in enumerate(caches[1:], start=1):
        assert cache.tail is not None
        assert cache.tail.layout.times == (done * CHUNK - 1,)
        assert cache.layout.count(Kind.CMP) == done * CHUNK // 2
    assert caches[1].bytes < caches[3].bytes


def test_positions_are_those_of_the_specification() -> None:
    layout = memory(PRESET, 3) + target(PRESET, 3, 4)
    times = {kind: layout.only(kind).times for kind in Kind}
    assert times[Kind.SINK] == (0,)
    assert times[Kind.CMP] == (0, 2, 4, 6, 8, 10)
    assert times[Kind.TMP] == (11,)
    assert times[Kind.PRED] == (12, 13, 14, 15)
    low = layout.only(Kind.CMP).positions()
    assert (low[:, 1].max() + 1, low[:, 2].max() + 1) == (PRESET.low_grid.rows, PRESET.low_grid.cols)
    full = layout.only(Kind.PRED).positions()
    assert (full[:, 1].max() + 1, full[:, 2].max() + 1) == (PRESET.grid.rows, PRESET.grid.cols)


def test_token_counts_at_448x832_are_those_of_the_specification() -> None:
    assert [memory(A14B, latents // 4).tokens for latents in (32, 96, 320, 1020)] == [
        4368,
        7280,
        17472,
        49322,
    ]
    assert teacher_forced(A14B, 16, 4).tokens == 34034
    assert clip(A14B, 0, 8).tokens == 46592


def test_overflow_of_a_release_layout_is_an_early_named_error() -> None:
    limited = replace(A14B.model, max_latents=1024)
    check_horizon(1024, limited.max_latents)
    with pytest.raises(HorizonError, match="at most 1024"):
        check_horizon(1025, limited.max_latents)
    with pytest.raises(HorizonError):
        make_plan(replace(PRESET.model, max_latents=1024), target(PRESET, 256, 257))
    make_plan(PRESET.model, target(PRESET, 256, 257))  # without a limit any horizon has a place


def test_a_cache_that_is_not_the_plans_is_refused() -> None:
    model, video = noisy_expert(), Video(chunks=3)
    _, caches = rollout(model, video, 2)
    layout = target(PRESET, 2, 3)
    plan = make_plan(PRESET.model, layout, context=caches[1].layout)
    with pytest.raises(CacheError, match="or other frames"):
        model(video.inputs(layout, plan=plan, cache=caches[2], history=None))


def test_a_skipped_chunk_is_refused() -> None:
    model, video = noisy_expert(), Video(chunks=4)
    cache, _ = remember(model, video, EMPTY, None, 1)
    later = run(model, video, prefill(PRESET, 1), EMPTY, keep=True)
    assert later.segment is not None
    with pytest.raises(CacheError, match="next chunk of this cache is 1"):
        cache.extend(later.segment)
    layout = prefill(PRESET, 3, 2)
    plan = make_plan(PRESET.model, layout, context=cache.without_tail().layout)
    state = model.memory(video.inputs(clip(PRESET, 1, 1)).history.full)[1]  # type: ignore[union-attr]
    with pytest.raises(InputError, match="latents before the history"):
        model(
            video.inputs(
                layout, plan=plan, cache=cache.without_tail(), history=video.history(layout, state), keep=True
            )
        )


def test_cached_text_gives_the_same_prediction() -> None:
    model, video = noisy_expert(), Video(chunks=1)
    layout = target(PRESET, 0, 1)
    raw = run(model, video, layout, EMPTY, keep=True)
    missing = PRESET.model.text_len - video.text.embeddings.shape[2]
    padded = torch.nn.functional.pad(video.text.embeddings, (0, 0, 0, missing))
    projected = run(model, video, layout, EMPTY, text=ProjectedText(model.text_embedding(padded)))
    assert raw.text is not None
    cached = run(model, video, layout, EMPTY, text=raw.text)
    assert torch.equal(raw.velocity, projected.velocity)
    assert torch.equal(raw.velocity, cached.velocity)


def test_inputs_that_do_not_fit_the_layout_are_named() -> None:
    model, video = noisy_expert(), Video(chunks=2)
    good = video.inputs(teacher_forced(PRESET, 0, 2))
    broken: dict[str, Inputs] = {
        "predicted frames": replace(good, sigma=good.sigma[:, :-1]),
        "compressed frames": replace(good, history=None),
        "full-resolution frames": replace(good, latents=good.latents[:, :, 1:]),
        "channels of latents": replace(good, latents=good.latents[:, :16]),
        "action rows": replace(good, actions=good.actions[:, :6]),
    }
    for what, inputs in broken.items():
        with pytest.raises(InputError, match=what):
            model(inputs)

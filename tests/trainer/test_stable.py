"""Stable Forcing: what is replayed is what was played, scores are those of the spec, nothing is cleaned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.flow_support import ByHand, batch_of, predicted
from tests.trainer.model_support import PRESET, draw, noisy_expert
from tests.trainer.stable_support import SCHEDULE, played, students
from trainer.config import ConfigError
from trainer.curriculum import CLIP, STAGES, StableConfig
from trainer.model import wan
from trainer.model.attention import Mask
from trainer.model.layout import Kind, Layout, Rule, clip
from trainer.model.wan import Inputs, WanModel, make_plan
from trainer.rollout import Chunk, Rollout
from trainer.schedule import Sigma, renoise
from trainer.stable import played as played_module
from trainer.stable.played import Played, Snapshot, replayed_block
from trainer.stable.replay import Replay
from trainer.stable.scores import clip_batch, clip_velocity, critic_loss, draw_level, score_clip
from trainer.stable.step import replay_all, replay_loss, score

CHUNKS = 16
EQUAL = StableConfig(guidance=1.0)


@pytest.fixture(scope="module")
def experts() -> dict[str, WanModel]:
    torch.set_num_threads(1)
    return students()


@pytest.fixture(scope="module")
def video(experts: dict[str, WanModel]) -> Played:
    """Two clips of 32 latents, of two videos."""
    return played(experts, CHUNKS)


@pytest.fixture(scope="module")
def scores() -> dict[str, WanModel]:
    return {name: noisy_expert(name) for name in PRESET.experts}


# --- rollout and replay -----------------------------------------------------------------------------------


def test_one_step_a_chunk_is_recorded_uniform_and_keyed() -> None:
    drawn = [replayed_block(SCHEDULE, 3, step, chunk).index for step in range(40) for chunk in range(10)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    assert counts.min() > 70  # of 100 each
    assert drawn == [replayed_block(SCHEDULE, 3, s, c).index for s in range(40) for c in range(10)]
    assert drawn[:10] != [replayed_block(SCHEDULE, 4, 0, c).index for c in range(10)]


def test_every_step_replayed_is_the_step_that_was_played_bit_for_bit(
    experts: dict[str, WanModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the noise that followed it, it is the state that the next step began with, or the chunk."""
    rollouts: list[Rollout] = []
    states: list[tuple[Tensor, ...]] = []

    class Kept(Rollout):
        def chunks(self) -> Iterator[Chunk]:
            rollouts.append(self)
            for chunk in super().chunks():
                states.append(chunk.states)
                yield chunk

    monkeypatch.setattr(played_module, "Rollout", Kept)
    video = played(experts, 4)
    replay = Replay(PRESET, video)
    for chunk, began in enumerate(states):
        own = video.clean[:, :, chunk * PRESET.chunk : (chunk + 1) * PRESET.chunk]
        for block, after in zip(SCHEDULE.blocks, (*began[1:], own), strict=True):
            again = replay.estimate(experts[block.expert], Snapshot(chunk, block, began[block.index]))
            again = renoise(again, rollouts[0]._noise(chunk, f"renoise-{block.index}"), block)
            assert torch.equal(again, after), (chunk, block.index)
    assert {block.expert for block in SCHEDULE.blocks} == set(PRESET.experts)


def test_replay_uses_the_memory_that_the_chunk_had(experts: dict[str, WanModel], video: Played) -> None:
    """A later chunk changes nothing of an earlier replay; an earlier one does."""
    snapshot = video.snapshots[5]
    before = Replay(PRESET, video).estimate(experts[snapshot.block.expert], snapshot)
    for chunk, changes in ((6, False), (4, True)):
        full = video.full.clone()
        full[:, :16, chunk * PRESET.chunk : (chunk + 1) * PRESET.chunk] += 1.0
        other = replace(video, full=full)
        after = Replay(PRESET, other).estimate(experts[snapshot.block.expert], snapshot)
        assert torch.equal(before, after) is not changes


@pytest.mark.parametrize("expert", PRESET.experts)
def test_gradients_chunk_by_chunk_are_those_of_one_retained_graph(
    experts: dict[str, WanModel], video: Played, scores: dict[str, WanModel], expert: str
) -> None:
    scored = score(PRESET, scores, {n: noisy_expert(n) for n in scores} | {"low": scores["high"]}, video,
                   StableConfig(), seed=0, step=0)  # fmt: skip
    model = experts[expert].requires_grad_(True)

    def gradients(retained: bool) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        kept: list[Tensor] = []

        def backward(loss: Tensor, snapshot: object) -> None:
            if retained:
                kept.append(loss)
            else:
                loss.backward()

        done = replay_all(PRESET, {expert: model}, video, scored, backward)
        assert done == sum(s.block.expert == expert for s in video.snapshots) > 2
        if retained:
            torch.stack(kept).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    one, whole = gradients(False), gradients(True)
    model.requires_grad_(False)
    assert one.keys() == whole.keys() and any("action_mlp" in name for name in one)
    assert not any(name.startswith("memory.") for name in one)  # memory is without gradient
    largest = max(float(g.abs().max()) for g in whole.values())
    assert largest > 0
    assert max(float((one[n] - whole[n]).abs().max()) for n in one) <= 1e-6 * max(1.0, largest)


def test_replay_of_the_newest_clip_alone_is_that_of_its_chunks(
    experts: dict[str, WanModel], video: Played, scores: dict[str, WanModel]
) -> None:
    scored = score(PRESET, scores, scores, video, StableConfig(), seed=0, step=0)

    def losses(newest: int) -> dict[int, float]:
        found: dict[int, float] = {}

        def backward(loss: Tensor, snapshot: Snapshot) -> None:
            found[snapshot.chunk] = float(loss)

        replay_all(PRESET, experts, video, scored, backward, newest)
        return found

    seen = {newest: losses(newest) for newest in (0, 1, 2)}
    assert list(seen[0]) == list(range(CHUNKS)) and seen[2] == seen[0]
    assert list(seen[1]) == list(range(CHUNKS // 2, CHUNKS))
    for chunk, loss in seen[1].items():  # a mean over half as many chunks
        assert loss == pytest.approx(2 * seen[0][chunk], rel=1e-6)


def test_a_full_context_score_sees_the_whole_rollout_and_no_memory(
    video: Played, scores: dict[str, WanModel]
) -> None:
    config = StableConfig(latents=2 * CLIP, clip=2 * CLIP)
    (whole,) = score(PRESET, scores, scores, video, config, seed=0, step=0)
    assert whole.gradient.shape[2] == 2 * CLIP and whole.gradient.any()
    batch = clip_batch(video, PRESET, 0, 2 * CLIP)
    assert batch.history == 0 and batch.low.shape[2] == 0 and torch.equal(batch.latents, video.clean)
    late = replace(batch, latents=batch.latents + 0.0)
    late.latents[:, :, -1] += 1.0
    noisy = [0.5 * b.latents + 0.5 * draw(3, *b.latents.shape) for b in (batch, late)]
    first, second = (
        clip_velocity(scores["low"], PRESET, b, n, Sigma(0.5)) for b, n in zip((batch, late), noisy)
    )
    assert not torch.equal(first[:, :, 0], second[:, :, 0])  # latent 0 sees latent 63
    with pytest.raises(ConfigError, match="does not split into clips"):
        replace(STAGES[-1], stable=StableConfig(latents=80, clip=32))
    with pytest.raises(ConfigError, match="3 clips replayed, of 2"):
        replace(STAGES[-1], stable=StableConfig(latents=64, replayed=3))


def test_the_gradient_of_a_replay_is_g_and_reaches_its_own_chunk_alone() -> None:
    estimate, g = draw(1, 2, 16, 4, 8, 16).requires_grad_(True), draw(2, 2, 16, 4, 8, 16)
    replay_loss(estimate, g).backward()
    assert estimate.grad is not None
    torch.testing.assert_close(estimate.grad, g / g.numel(), rtol=1e-4, atol=1e-9)


def test_replay_keeps_the_activations_of_one_chunk_whatever_the_length(
    experts: dict[str, WanModel], video: Played, scores: dict[str, WanModel]
) -> None:
    scored = score(PRESET, scores, scores, video, StableConfig(), seed=0, step=0)
    students = {name: model.requires_grad_(True) for name, model in experts.items()}

    def peak(chunks: int) -> int:
        alive = most = 0

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, most
                self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
                alive += self.size
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.size

        part = replace(video, snapshots=video.snapshots[2 : 2 + chunks])
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            replay_all(PRESET, students, part, scored, lambda loss, snapshot: loss.backward())
        return most

    assert peak(12) < 1.2 * peak(4)
    for model in experts.values():
        model.requires_grad_(False).zero_grad(set_to_none=True)


# --- scores -----------------------------------------------------------------------------------------------


def test_equal_scores_give_no_gradient_at_guidance_1_alone(
    video: Played, scores: dict[str, WanModel]
) -> None:
    for result in score(PRESET, scores, scores, video, EQUAL, seed=0, step=0):
        assert not result.gradient.any() and result.counts.all()
    guided = score(PRESET, scores, scores, video, StableConfig(guidance=3.5), seed=0, step=0)
    assert all(result.gradient.any() for result in guided)


def test_a_clip_scored_with_memory_is_the_clip_in_one_masked_pass_over_all_clips(
    video: Played, scores: dict[str, WanModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clips side by side in one sequence, each beside a copy of the memory before it, and masked from
    the other: compressed tokens are made once, of the whole history."""
    model, sigma = scores["low"], Sigma(0.4)
    batches = [clip_batch(video, PRESET, index) for index in range(2)]
    noisy = [0.6 * b.latents[:, :, -CLIP:] + 0.4 * draw(k, *b.latents[:, :, -CLIP:].shape)
             for k, b in enumerate(batches)]  # fmt: skip
    with torch.no_grad():
        apart = [clip_velocity(model, PRESET, b, n, sigma) for b, n in zip(batches, noisy)]
    layouts = [clip(PRESET, b.history, CLIP // PRESET.chunk) for b in batches]
    memory, first = layouts[1].only(Kind.SINK, Kind.CMP, Kind.TMP), layouts[0]
    layout = memory + first + layouts[1].only(Kind.PRED)
    owner = torch.tensor([1] * memory.tokens + [0] * first.tokens + [1] * first.tokens)

    def tokens(full: Tensor) -> Tensor:
        return wan._frames(model.patch_embedding(full)).flatten(1, 2)

    whole = batches[1]
    with torch.no_grad():
        fine, _ = model.memory(video.full[:, :, :CLIP])
        coarse = wan._frames(model.patch_embedding(whole.low))
        times = [f.time for f in memory.frames if f.kind is not Kind.CMP]
        clean = torch.cat([whole.latents, whole.condition], 1)[:, :, times]
        parts = [tokens(clean[:, :, :1]), (coarse + fine).flatten(1, 2), tokens(clean[:, :, 1:])]
        for b, n in zip(batches, noisy):
            parts.append(tokens(torch.cat([n, b.condition[:, :, -CLIP:]], 1)))
        monkeypatch.setattr(model, "_tokens", lambda inputs: (torch.cat(parts, 1), None))
        monkeypatch.setattr(wan, "_check", lambda inputs, channels: None)
        prompts = (1,) * len(memory) + (0,) * len(first) + (1,) * len(first)
        plan = make_plan(model.config, layout, rule=Rule.FULL, prompts=prompts)
        size = layout.tokens
        plan = replace(plan, mask=Mask(size, size, dense=owner[:, None] == owner[None]))
        level = torch.full((2, 2 * CLIP), sigma, dtype=torch.float64)
        text = wan.RawText(_padded([b.text for b in batches]))
        out = model(Inputs(plan, noisy[0], level, whole.actions, text)).velocity
    for k in range(2):
        part = out[:, :, k * CLIP : (k + 1) * CLIP]
        assert (part - apart[k]).abs().max() <= 1e-5 * part.abs().max()


def _padded(texts: list[Tensor]) -> Tensor:
    longest = max(t.shape[2] for t in texts)
    return torch.cat([torch.nn.functional.pad(t, (0, 0, 0, longest - t.shape[2])) for t in texts], 1)


def gaussian(mean: float, std: float) -> ByHand:
    """The velocity of data N(mean, std^2), E[eps - x | x_sigma]."""

    def velocity(inputs: Inputs) -> Tensor:
        noisy, sigma = predicted(inputs), inputs.sigma.float()[:, None, :, None, None]
        spread = ((1 - sigma) * std) ** 2 + sigma**2
        clean = mean + std**2 * (1 - sigma) / spread * (noisy - (1 - sigma) * mean)
        return (noisy - (1 - sigma) * clean) / sigma - clean

    return ByHand(velocity)


def test_a_gaussian_student_reaches_the_gaussian_of_the_real_score() -> None:
    """x = a + b z against N(1.5, 0.5^2), the fake score always that of the student: a -> 1.5, b -> 0.5."""
    batch = batch_of((1,), 0, CLIP // PRESET.chunk)
    a, b = torch.tensor(-1.0, requires_grad=True), torch.tensor(1.2, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=0.05)
    real = dict.fromkeys(PRESET.experts, gaussian(1.5, 0.5))
    for step in range(150):
        z = draw(step, *batch.latents.shape)
        x = a + b * z
        fake = dict.fromkeys(PRESET.experts, gaussian(float(a.detach()), float(b.detach().abs())))
        given = replace(batch, latents=x.detach())
        sigma = draw_level(PRESET, StableConfig(), None, 0, step)
        scored = score_clip(PRESET, real, fake, given, EQUAL, sigma, draw(1000 + step, *x.shape))
        optimizer.zero_grad()
        replay_loss(x, scored.gradient).backward()
        optimizer.step()
    assert abs(float(a.detach()) - 1.5) < 0.1 and abs(float(b.detach()) - 0.5) < 0.1


def test_a_clip_that_the_teacher_would_not_move_gives_a_bounded_gradient() -> None:
    """0 / 0 and x / 0: the scale has a floor tied to the clip's size."""
    batch = batch_of((1, 2), 0, CLIP // PRESET.chunk)
    clean, noise, sigma = batch.latents, draw(9, *batch.latents.shape), Sigma(0.5)
    perfect = dict.fromkeys(PRESET.experts, ByHand(lambda inputs: noise - clean))
    off = dict.fromkeys(PRESET.experts, ByHand(lambda inputs: noise - clean + 1e-3))
    same = score_clip(PRESET, perfect, perfect, batch, EQUAL, sigma, noise)
    assert not same.gradient.any() and same.counts.all()
    moved = score_clip(PRESET, perfect, off, batch, EQUAL, sigma, noise)
    rms = float(clean[0].square().mean().sqrt())
    assert moved.gradient.abs().max() <= 1.1 * 0.5 * 1e-3 / (EQUAL.floor * rms)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_a_video_whose_gradient_is_not_sound_weighs_nothing_and_is_counted(bad: float) -> None:
    batch = batch_of((1, 2), 0, CLIP // PRESET.chunk)
    noise = draw(9, *batch.latents.shape)

    def broken(inputs: Inputs) -> Tensor:
        out = predicted(inputs).clone()
        out[0, 3, 5, 2, 2] = bad
        return out

    real = dict.fromkeys(PRESET.experts, ByHand(lambda inputs: predicted(inputs) * 0.5))
    fake = dict.fromkeys(PRESET.experts, ByHand(broken))
    scored = score_clip(PRESET, real, fake, batch, EQUAL, Sigma(0.5), noise)
    assert scored.counts.tolist() == [False, True]
    assert not scored.gradient[0].any() and scored.gradient[1].any()
    estimate = draw(3, *batch.latents.shape).requires_grad_(True)
    replay_loss(estimate, scored.gradient).backward()
    assert estimate.grad is not None and torch.isfinite(estimate.grad).all()


def test_levels_of_scores_are_shifted_clamped_and_inside_an_experts_range() -> None:
    config = StableConfig()
    all_levels = torch.tensor([draw_level(PRESET, config, None, 0, k) for k in range(800)])
    assert all_levels.min() >= 0.02 and all_levels.max() <= 0.98
    high = float((all_levels >= 0.9).double().mean())
    assert abs(high - 0.357) < 0.06  # spec l.5: 35.7 % of draws at shift 5
    for expert in PRESET.experts:
        levels = [draw_level(PRESET, config, expert, 0, k) for k in range(50)]
        assert {PRESET.expert(s) for s in levels} == {expert}


def test_the_critic_learns_from_rollouts_and_the_student_does_not(
    video: Played, experts: dict[str, WanModel]
) -> None:
    critic = noisy_expert("low").requires_grad_(True)
    loss = critic_loss(critic, PRESET, clip_batch(video, PRESET, 1), Sigma(0.3), 0, "critic", 0)
    assert loss.shape == (2,)
    loss.mean().backward()
    with_grad = {n.split(".")[0] for n, p in critic.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"memory", "action", "blocks", "head", "patch_embedding"} <= with_grad
    assert all(p.grad is None for model in experts.values() for p in model.parameters())


def test_memory_of_a_clip_ends_where_the_clip_begins(video: Played) -> None:
    for index in range(2):
        batch = clip_batch(video, PRESET, index)
        assert batch.history == index * CLIP // PRESET.chunk
        assert batch.latents.shape[2] == (index + 1) * CLIP
        assert batch.low.shape[2] == index * CLIP // 2
        layout: Layout = clip(PRESET, batch.history, CLIP // PRESET.chunk)
        assert layout.count(Kind.CMP) == batch.low.shape[2]

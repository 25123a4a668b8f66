"""Rollout: one masked pass over its own latents says the same, and nothing later reaches what is earlier."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.trainer.model_support import PRESET, action_rows, draw, noisy_expert
from tests.trainer.tiny_codecs import blobs, fitted
from trainer.codec import lowres
from trainer.codec.base import Codec, to_pixels
from trainer.codec.linear import Linear
from trainer.model.kvcache import HorizonError, RawText
from trainer.model.layout import chunk_prompts, teacher_forced
from trainer.model.pdd_head import VelocityHead, bank_from_velocity, compact_from_bank
from trainer.model.wan import History, Inputs, Outputs, WanModel, make_plan
from trainer.rollout import Chunk, Condition, NotFinite, Rollout, Scene, SceneError, Settings
from trainer.sampler import ManySteps
from trainer.schedule import PddSchedule

CHUNK = PRESET.chunk
QUICK = Settings(seed=5, many=ManySteps(steps=4))
PLAIN = replace(QUICK, many=ManySteps(steps=4, guidance=1.0))


@pytest.fixture(scope="module")
def experts() -> dict[str, WanModel]:
    torch.set_num_threads(1)
    return {name: noisy_expert(name) for name in ("high", "low")}


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Linear(fitted())


@pytest.fixture(scope="module")
def few() -> dict[str, WanModel]:
    made = {}
    for name in ("high", "low"):
        model = noisy_expert(name)
        assert isinstance(model.head, VelocityHead)
        bank = bank_from_velocity(model.head, PddSchedule().heads(name))
        with torch.no_grad():
            bank.bank_weight.add_(0.05 * draw(1, *bank.bank_weight.shape))
        model.head = compact_from_bank(bank, PddSchedule().blocks_of(name))
        made[name] = model
    return made


def scene(chunks: int) -> Scene:
    image = to_pixels(torch.from_numpy(blobs(1, 64, 128, 3)))
    width = PRESET.model.text_dim
    actions = action_rows(1, 8 * CHUNK)[:, : chunks * CHUNK]
    prompts = (0, 0, 1, 1, 0, 0, 0, 0)[:chunks]
    return Scene(image, actions, (draw(2, 7, width), draw(3, 9, width)), prompts, draw(4, 5, width))


def play(experts: dict[str, WanModel], codec: Codec, given: Scene, settings: Settings = QUICK) -> list[Chunk]:
    return list(Rollout(PRESET, experts, codec, given, settings).chunks())


def latents(chunks: list[Chunk]) -> Tensor:
    return torch.cat([c.latents for c in chunks], 2)


# --- the whole is put together right ----------------------------------------------------------------------


@dataclass
class Spy:
    """Stands before an expert and keeps what it was asked and what it said."""

    model: WanModel
    calls: list[tuple[Inputs, Outputs]]

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, inputs: Inputs) -> Outputs:
        out: Outputs = self.model(inputs)
        self.calls.append((inputs, out))
        return out


def test_everything_lies_where_the_experts_compute_though_their_weights_lie_elsewhere(
    experts: dict[str, WanModel], codec: Codec
) -> None:
    """Offloaded shards lie on the host while the device computes: here the device is the CPU, and the weights
    say that they lie elsewhere."""

    class Elsewhere(Spy):
        patch_embedding = SimpleNamespace(weight=torch.empty(0, device="meta"))

    spies = {name: Elsewhere(model, []) for name, model in experts.items()}
    device = torch.device("cpu")
    rollout = Rollout(PRESET, spies, codec, scene(2), PLAIN, device=device)  # type: ignore[arg-type]
    assert torch.equal(latents(list(rollout.chunks())), latents(play(experts, codec, scene(2), PLAIN)))
    seen = [given for spy in spies.values() for given, _ in spy.calls]
    assert seen and {given.latents.device for given in seen} == {given.actions.device for given in seen} == {
        device
    }
    assert {given.plan.times.device for given in seen} == {device}


@pytest.mark.parametrize("expert", ["high", "low"])
def test_every_chunk_equals_one_masked_pass_over_what_was_generated(
    experts: dict[str, WanModel], codec: Codec, expert: str
) -> None:
    """The condition, the low-resolution stream, anchors, positions, prompts and actions, built here anew."""
    given, chunks = scene(4), 4
    spies = {name: Spy(model, []) for name, model in experts.items()}
    video = play(spies, codec, given, PLAIN)  # type: ignore[arg-type]
    denoised = [c for c in spies[expert].calls if c[1].prediction is not None]
    per_chunk = len(denoised) // chunks
    model = experts[expert]

    clean = latents(video)
    image, count = given.image, chunks * CHUNK
    y, _ = codec.encode(functional.pad(image, (0, 0, 0, 0, 0, 4 * (count - 1))))
    low_y, _ = codec.encode(functional.pad(lowres.shrink(image), (0, 0, 0, 0, 0, 4 * (count // 2 - 1))))
    pixels, _ = codec.decode(clean)
    # Frames of the stream by the phase table: 0 | 2, 4, 6, 8, then every second from 13, 29, ...
    taken = [0, 2, 4, 6, 8] + [16 * i - 3 + k for i in range(1, chunks) for k in range(0, 16, 2)]
    low, _ = codec.encode(lowres.shrink(pixels[:, :, taken]))

    def masked(y: Tensor) -> Tensor:
        mask = torch.zeros_like(y[:, :4])
        mask[:, :, 0] = 1.0
        return torch.cat([mask, y], 1)

    full, low = torch.cat([clean, masked(y)], 1), torch.cat([low, masked(low_y)], 1)
    for chunk in range(chunks):
        inputs, out = denoised[chunk * per_chunk]
        layout = teacher_forced(PRESET, chunk, 1)
        plan = make_plan(PRESET.model, layout, prompts=chunk_prompts(layout))
        own = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        state = torch.cat([inputs.latents[:, :16], full[:, 16:, :, :, :][:, :, own]], 1)
        anchors = [full[:, :, :1]] + ([full[:, :, chunk * CHUNK - 1 : chunk * CHUNK]] if chunk else [])
        texts = [given.texts[p] for p in given.prompts[: chunk + 1]]
        padded = torch.stack([functional.pad(t, (0, 0, 0, 9 - len(t))) for t in texts])[None]
        history = History(full[:, :, : chunk * CHUNK], low[:, :, : chunk * CHUNK // 2]) if chunk else None
        with torch.no_grad():
            whole = model(
                Inputs(
                    plan,
                    torch.cat([*anchors, state], 2),
                    inputs.sigma,
                    given.actions,
                    RawText(padded),
                    history,
                )
            )
        assert out.prediction is not None and whole.prediction is not None
        apart = (out.prediction - whole.prediction).abs().max()
        # 3e-7 is what rounding makes; the prompt of another chunk in memory alone makes 3e-5.
        assert apart <= 3e-6 * whole.prediction.abs().max(), chunk


def test_pixels_are_the_latents_decoded_in_one_stream(experts: dict[str, WanModel], codec: Codec) -> None:
    video = play(experts, codec, scene(3))
    pixels = torch.cat([c.pixels for c in video], 2)
    assert pixels.shape == (1, 3, 4 * 3 * CHUNK - 3, 64, 128)
    torch.testing.assert_close(pixels, codec.decode(latents(video))[0], rtol=1e-5, atol=1e-5)


# --- what depends on what ---------------------------------------------------------------------------------


def changed_from(a: list[Chunk], b: list[Chunk]) -> list[bool]:
    return [not torch.equal(x.latents, y.latents) for x, y in zip(a, b)]


def test_same_seed_same_video_and_a_longer_one_begins_with_it(
    experts: dict[str, WanModel], codec: Codec
) -> None:
    short, long = play(experts, codec, scene(2)), play(experts, codec, scene(4))
    assert changed_from(short, long) == [False, False]
    other = play(experts, codec, scene(2), replace(QUICK, seed=6))
    assert changed_from(short, other) == [True, True]


def test_inputs_change_a_video_from_where_they_change_and_not_before(
    experts: dict[str, WanModel], codec: Codec
) -> None:
    given = scene(3)
    before = play(experts, codec, given)
    turned = given.actions.clone()
    turned[:, CHUNK + 1, 1] += 3.0
    changes = {
        "image": replace(given, image=-given.image),
        "prompt of the last chunk": replace(given, prompts=(0, 0, 0)),
        "action of chunk 1": replace(given, actions=turned),
        "negative": replace(given, negative=draw(9, 5, PRESET.model.text_dim)),
    }
    found = {name: changed_from(before, play(experts, codec, other)) for name, other in changes.items()}
    assert found == {
        "image": [True, True, True],
        "prompt of the last chunk": [False, False, True],
        "action of chunk 1": [False, True, True],
        "negative": [True, True, True],
    }


def test_without_guidance_the_negative_prompt_is_never_read(
    experts: dict[str, WanModel], codec: Codec
) -> None:
    given = scene(2)
    other = replace(given, negative=draw(9, 5, PRESET.model.text_dim))
    assert changed_from(play(experts, codec, given, PLAIN), play(experts, codec, other, PLAIN)) == [False] * 2
    assert play(experts, codec, given)[0].cache_bytes == 2 * play(experts, codec, given, PLAIN)[0].cache_bytes


# --- few steps --------------------------------------------------------------------------------------------


def test_few_step_weights_take_four_passes_a_chunk(few: dict[str, WanModel], codec: Codec) -> None:
    spies = {name: Spy(model, []) for name, model in few.items()}
    settings = Settings(few=PddSchedule())
    video = play(spies, codec, scene(3), settings)  # type: ignore[arg-type]
    for name, spy in spies.items():
        sigmas = [float(i.sigma[0, 0]) for i, o in spy.calls if o.prediction is not None]
        own = [b.sigma_start for b in PddSchedule().blocks_of(name)]
        assert sigmas == pytest.approx(own * 3)
        assert len(spy.calls) == 2 * 3 + 2 * 2  # and two of memory after every chunk but the last
    assert changed_from(video, play(few, codec, scene(3), settings)) == [False] * 3
    other = replace(settings, few=PddSchedule(intervals=256))
    assert changed_from(video, play(few, codec, scene(3), other)) == [True] * 3


def test_few_step_heads_without_their_schedule_are_refused(few: dict[str, WanModel], codec: Codec) -> None:
    with pytest.raises(SceneError, match="four-step schedule"):
        play(few, codec, scene(1))


# --- several videos at once, and what replay needs --------------------------------------------------------


def test_videos_side_by_side_are_those_played_alone(few: dict[str, WanModel], codec: Codec) -> None:
    settings, width = Settings(few=PddSchedule()), PRESET.model.text_dim
    other = to_pixels(torch.from_numpy(blobs(1, 64, 128, 4)))
    image = torch.cat([scene(2).image, other])
    actions = torch.cat([action_rows(k, 2 * CHUNK) for k in (1, 2)])
    texts = (draw(5, 2, 7, width), draw(6, 2, 7, width))
    both = Scene(image, actions, texts, (0, 1), draw(4, 5, width), positions=(3, 8))
    together = latents(play(few, codec, both, settings))
    for k, position in enumerate(both.positions):
        own = slice(k, k + 1)
        one = Scene(
            image[own], actions[own], tuple(t[own] for t in texts), (0, 1), both.negative, (position,)
        )
        apart = latents(play(few, codec, one, settings)) - together[own]
        assert apart.abs().max() < 1e-4
    with pytest.raises(SceneError, match="positions of"):
        Rollout(PRESET, few, codec, replace(both, positions=(3,)), settings)


def test_a_stored_condition_is_as_good_as_the_image(few: dict[str, WanModel], codec: Codec) -> None:
    settings, given = Settings(few=PddSchedule()), scene(2)
    assert isinstance(given.image, Tensor)
    stored = replace(given, image=Condition.of(codec, given.image))
    assert changed_from(play(few, codec, given, settings), play(few, codec, stored, settings)) == [False] * 2


def test_a_chunk_keeps_the_state_that_each_of_its_steps_started_from(
    few: dict[str, WanModel], codec: Codec
) -> None:
    rollout = Rollout(PRESET, few, codec, scene(3), Settings(few=PddSchedule()))
    video = list(rollout.chunks())
    assert all(len(c.states) == 4 for c in video)
    assert [c.low is None for c in video] == [False, False, True]
    assert all(torch.equal(c.full[:, :16], c.latents) for c in video)
    assert {name: cache.chunks for name, cache in rollout.caches.items()} == {"high": 2, "low": 2}


# --- cost and refusals ------------------------------------------------------------------------------------


def test_the_cache_grows_by_the_compressed_tokens_of_a_chunk(few: dict[str, WanModel], codec: Codec) -> None:
    video = play(few, codec, scene(4), Settings(few=PddSchedule()))
    sizes = [c.cache_bytes for c in video]
    token = 2 * PRESET.model.layers * PRESET.model.dim * 4 * len(few)
    assert sizes[0] == token * (2 * PRESET.grid.tokens + 2 * PRESET.low_grid.tokens)
    assert [b - a for a, b in itertools.pairwise(sizes[:3])] == [token * 2 * PRESET.low_grid.tokens] * 2


def test_scenes_that_do_not_fit_are_refused_before_anything_runs(
    experts: dict[str, WanModel], codec: Codec
) -> None:
    given = scene(2)
    broken = {
        "whole chunks of 4": replace(given, prompts=(0,)),
        "image of": replace(given, image=given.image[..., :64]),
        "must be one of": replace(given, actions=given.actions + 0.5),
    }
    for says, other in broken.items():
        with pytest.raises(ValueError, match=says):
            Rollout(PRESET, experts, codec, other, QUICK)
    with pytest.raises(SceneError, match="experts high for a model of high, low"):
        Rollout(PRESET, {"high": experts["high"]}, codec, given, QUICK)


def test_a_video_beyond_the_horizon_of_released_weights_is_refused_at_once(codec: Codec) -> None:
    limited = {name: noisy_expert(name) for name in ("high", "low")}
    for model in limited.values():
        model.config = replace(model.config, max_latents=2 * CHUNK)
    with pytest.raises(HorizonError, match="12 latents, but these weights place at most 8"):
        Rollout(PRESET, limited, codec, scene(3), QUICK)
    assert len(play(limited, codec, scene(2))) == 2


@pytest.mark.parametrize(("name", "chunk"), [("head.head.weight", 0), ("memory", 1)])
def test_the_first_chunk_that_is_not_finite_ends_the_video_and_names_its_expert(
    codec: Codec, name: str, chunk: int
) -> None:
    experts = {expert: noisy_expert(expert) for expert in ("high", "low")}
    spoilt = next(p for n, p in experts["low"].named_parameters() if n.startswith(name))
    with torch.no_grad():
        spoilt.view(-1)[0] = torch.nan
    made, given = [], replace(scene(3), name="door-007")
    with pytest.raises(
        NotFinite, match=f"^chunk {chunk} of video door-007: predictions of expert low are not"
    ):
        for one in Rollout(PRESET, experts, codec, given, PLAIN).chunks():
            made.append(one)
    assert len(made) == chunk

"""A video, chunk by chunk: denoise over the cached memory, decode, remember.

After a chunk is clean it is decoded, its low-resolution latents are made of the decoded pixels by the same
function as those of the training data, and its memory tokens join the cache of each expert at noise level 0,
with the prompt that it was generated with. Each expert has a compressor of its own; guidance needs a second
cache, because memory tokens read the prompt too. What stays between chunks: caches (182 tokens a chunk at
448x832), the streams of the codec, and two latents; nothing else grows with the video.
Source: spec/worldplay2.md a.2, a.3, a.5, c.2, c.3, f.2, n.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from schemas.errors import UserError
from trainer.codec import lowres
from trainer.codec.base import Cache, Codec
from trainer.codec.condition import extend, image_condition
from trainer.config import LATENTS_PER_PAIR, PIXELS_PER_LATENT, Preset
from trainer.model.action import check_rows
from trainer.model.attention import Backend
from trainer.model.kvcache import EMPTY, CrossCache, KvCache, RawText, Text, check_horizon
from trainer.model.layout import Kind, Layout, anchor, compressed, sink, target
from trainer.model.memory import MemoryState
from trainer.model.wan import History, Inputs, Outputs, Plan, WanModel, make_plan
from trainer.noise import noise_of
from trainer.sampler import ManySteps, few_steps, guided, many_steps
from trainer.schedule import Block, PddSchedule, Sigma

MASK_CHANNELS = 4
NEGATIVE = -1
"""Number of the negative prompt, among those of a scene."""


class SceneError(ValueError):
    """A scene that does not fit the model."""


class NotFinite(SceneError, UserError):
    """Weights that say what is no number: nothing of such a video may be measured or shown."""


@dataclass(frozen=True)
class Condition:
    """The image condition y: its first latents, the last of which stands for all later ones.

    full: [B, 16, n, H/8, W/8]. low: [B, 16, n', H/32, W/32]."""

    full: Tensor
    low: Tensor

    @staticmethod
    def of(codec: Codec, image: Tensor) -> Condition:
        return Condition(image_condition(codec, image), image_condition(codec, lowres.shrink(image)))

    @staticmethod
    def rows(head: Tensor, first: int, stop: int) -> Tensor:
        """[B, 20, stop - first, h, w]: mask (ones at latent 0 only), then latents of the zero clip."""
        y = extend(head, stop)[:, :, first:stop]
        mask = torch.zeros_like(y[:, :MASK_CHANNELS])
        if first == 0:
            mask[:, :, 0] = 1.0
        return torch.cat([mask, y], dim=1)


@dataclass(frozen=True)
class Scene:
    """What B videos are made from, chunk by chunk side by side.

    image: [B, 3, 1, H, W] in [-1, 1], or the condition that is stored of it. actions: [B, T, 6]. texts:
    encoded prompts, each [n, text_dim] without padding, or [B, n, text_dim] padded with zeros where every
    video has its own. prompts: which of them each chunk reads. negative: [n, text_dim], what guidance leads
    away from. positions: of the videos in a stream; their noise is keyed by these. name: for errors.
    """

    image: Tensor | Condition
    actions: Tensor
    texts: tuple[Tensor, ...]
    prompts: tuple[int, ...]
    negative: Tensor
    positions: tuple[int, ...] = (0,)
    name: str = ""

    @property
    def latents(self) -> int:
        return self.actions.shape[1]

    def text(self, prompt: int, device: torch.device) -> RawText:
        """A prompt for all videos, [B, 1, n, text_dim]. prompt: a place in `texts`, or NEGATIVE."""
        text = self.negative if prompt == NEGATIVE else self.texts[prompt]
        each = text[None].expand(len(self.positions), -1, -1) if text.ndim == 2 else text
        return RawText(each.to(device)[:, None])


@dataclass(frozen=True)
class Chunk:
    """latents: [B, 16, 4, H/8, W/8]. pixels: [B, 3, 13 or 16, H, W] in [-1, 1]. cache_bytes: of all caches.

    full: [B, 36, 4, H/8, W/8], latents with their image condition. low: [B, 36, 2, H/32, W/32], the same at
    low resolution; None for the last chunk, which is nobody's memory. states: what each few-step block
    started from, [B, 16, 4, H/8, W/8] each; empty with many steps.
    """

    index: int
    latents: Tensor
    pixels: Tensor
    cache_bytes: int
    full: Tensor
    low: Tensor | None
    states: tuple[Tensor, ...]


@dataclass(frozen=True)
class Settings:
    """How a video is sampled. few: the four-step schedule, for weights with few-step heads; else `many`."""

    seed: int = 0
    many: ManySteps = field(default_factory=ManySteps)
    few: PddSchedule | None = None


@dataclass
class _Branch:
    """One expert under one text (the prompt, or the negative one): its cache, and keys of its texts.

    texts: of the current prompt only; those of a prompt at full size are 0.42 GB.
    """

    model: WanModel
    cache: KvCache = EMPTY
    state: MemoryState | None = None
    text_of: int | None = None
    text: CrossCache | None = None


@dataclass
class Rollout:
    """The experts at work on one scene. device: where they compute; where their weights lie if None, which
    with offloaded ones is not the same.

    Raises SceneError where the scene does not fit, HorizonError where the weights cannot place it, NotFinite
    at the first chunk that is not finite.
    """

    preset: Preset
    experts: Mapping[str, WanModel]
    codec: Codec
    scene: Scene
    settings: Settings = field(default_factory=Settings)
    backend: Backend = Backend.DENSE
    device: torch.device | None = None
    _branches: dict[tuple[str, bool], _Branch] = field(default_factory=dict)
    _finite: list[tuple[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        preset, scene, few = self.preset, self.scene, self.settings.few
        geometry = preset.geometry
        start, scale = scene.image, 1
        if isinstance(start, Condition):
            start, scale = start.full, PIXELS_PER_LATENT
        if set(self.experts) != set(preset.experts):
            raise SceneError(f"experts {', '.join(self.experts)} for a model of {', '.join(preset.experts)}")
        if scene.latents % preset.chunk or len(scene.prompts) != scene.latents // preset.chunk:
            raise SceneError(
                f"{scene.latents} action rows and {len(scene.prompts)} prompts: "
                f"give whole chunks of {preset.chunk}, and a prompt each"
            )
        if (size := tuple(scale * n for n in start.shape[-2:])) != (geometry.height, geometry.width):
            raise SceneError(f"image of {size} for a picture of {geometry}")
        videos = {len(start), len(scene.actions), len(scene.positions)}
        if len(videos) != 1:
            raise SceneError(f"images, actions and positions of {sorted(videos)} videos: give one each")
        check_rows(scene.actions)
        for name, model in self.experts.items():
            check_horizon(scene.latents, model.config.max_latents)
            if few is None and model.head.heads != 1:
                raise SceneError(f"expert {name} has few-step heads: it needs the four-step schedule")
        self._negatives = few is None and self.settings.many.guidance != 1.0
        self._branches = {
            (name, negative): _Branch(model)
            for name, model in self.experts.items()
            for negative in ((False, True) if self._negatives else (False,))
        }
        self._device = self.device or next(iter(self.experts.values())).patch_embedding.weight.device
        self._actions = scene.actions.to(self._device)
        self._negative = scene.text(NEGATIVE, self._device)

    @torch.no_grad()
    def chunks(self) -> Iterator[Chunk]:
        """The video, a chunk at a time."""
        scene, preset = self.scene, self.preset
        condition = scene.image
        if isinstance(condition, Tensor):
            condition = Condition.of(self.codec, condition.to(self.codec.device))
        condition = Condition(condition.full.to(self._device), condition.low.to(self._device))
        decoder: Cache | None = None
        low_encoder: Cache | None = None
        head = last = torch.empty(0)
        count = len(scene.prompts)
        for index in range(count):
            first, stop = index * preset.chunk, (index + 1) * preset.chunk
            y = condition.rows(condition.full, first, stop)
            clean, states = self._denoise(index, y)
            full, low = torch.cat([clean, y], dim=1), None
            self._finite.append(("latents", torch.isfinite(clean).all()))
            self._check_finite(index)
            pixels, decoder = self.codec.decode(clean.to(self.codec.device), decoder)
            self._finite.append(("pixels of the codec", torch.isfinite(pixels).all()))
            self._check_finite(index)
            if index + 1 < count:  # the last chunk is nobody's memory
                low, low_encoder = lowres.encode_chunk(self.codec, pixels, low_encoder)
                pairs = (first // LATENTS_PER_PAIR, stop // LATENTS_PER_PAIR)
                low = torch.cat([low.to(self._device), condition.rows(condition.low, *pairs)], dim=1)
                head = full[:, :, : preset.sink] if index == 0 else head
                last = full[:, :, preset.chunk - preset.temporal :]
                self._remember(index, full, low, head, last)
            yield Chunk(index, clean, pixels, self.cache_bytes, full, low, states)

    @property
    def caches(self) -> dict[str, KvCache]:
        """The memory of each expert so far, under the prompts."""
        return {name: branch.cache for (name, negative), branch in self._branches.items() if not negative}

    @property
    def cache_bytes(self) -> int:
        return sum(branch.cache.bytes for branch in self._branches.values())

    def _check_finite(self, index: int) -> None:
        """Raises NotFinite that names the first of what was noted in `_finite`; the device is asked once."""
        names, flags = zip(*self._finite)
        self._finite.clear()
        for what, finite in zip(names, torch.stack(flags).tolist()):
            if not finite:
                video = self.scene.name or f"at position {', '.join(map(str, self.scene.positions))}"
                raise NotFinite(
                    f"chunk {index} of video {video}: {what} are not finite numbers: these weights cannot be "
                    "played, so give others, or an earlier checkpoint"
                )

    # --- denoising ----------------------------------------------------------------------------------------

    def _denoise(self, index: int, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Clean latents [B, 16, 4, h, w] of a chunk, and the states that few-step blocks started from."""
        plan = self._plan(target(self.preset, index, index + 1), remembers=False)
        noise = self._noise(index, "start")

        def velocity(state: Tensor, sigma: Sigma) -> Tensor:
            given = self._given(plan, torch.cat([state, y], dim=1), sigma)
            expert = self.preset.expert(sigma)
            conditional = self._run(expert, False, index, given).velocity
            if not self._negatives:
                return conditional
            unconditional = self._run(expert, True, index, given).velocity
            return guided(conditional, unconditional, self.settings.many.guidance)

        def decode(state: Tensor, block: Block) -> tuple[Tensor, Tensor]:
            rows = self.experts[block.expert].head.rows(block).to(self._device)
            given = self._given(plan, torch.cat([state, y], dim=1), block.sigma_start)
            given = replace(given, rows=rows[None, None].expand(len(state), self.preset.chunk, -1, -1))
            out = self._run(block.expert, False, index, given).prediction
            assert out is not None
            return out[:, 0], out[:, 1]

        def fresh(block: int) -> Tensor:
            return self._noise(index, f"renoise-{block}")

        if self.settings.few is not None:
            states: list[Tensor] = []
            clean = few_steps(decode, noise, self.settings.few, fresh, states)
            return clean, tuple(states)
        return many_steps(velocity, noise, self.settings.many), ()

    def _remember(self, index: int, full: Tensor, low: Tensor, first: Tensor, last: Tensor) -> None:
        """Add chunk `index` to every cache. full: [B, 36, 4, H, W]; low: [B, 36, 2, H/4, W/4]; first, last:
        latents of the sink and of the anchor.

        The anchor has a pass of its own, so that replay, which fills in that alone, gives the same bits.
        """
        preset, start = self.preset, index == 0
        chunk = compressed(preset, index, index + 1)
        layout = sink(preset) + chunk if start else chunk
        plan = self._plan(layout, remembers=True)
        given = replace(self._given(plan, first if start else last[:, :, :0], None), keep=True)
        for (expert, negative), branch in self._branches.items():
            branch.cache = branch.cache.without_tail()
            own = replace(given, history=History(full, low, branch.state))
            out = self._run(expert, negative, index, own)
            assert out.segment is not None
            branch.cache, branch.state = branch.cache.extend(out.segment), out.memory
        plan = self._plan(anchor(preset, index + 1), remembers=True)
        given = replace(self._given(plan, last, None), keep=True)
        for (expert, negative), branch in self._branches.items():
            out = self._run(expert, negative, index, given)
            assert out.segment is not None
            branch.cache = branch.cache.extend(out.segment)

    def _noise(self, chunk: int, role: str) -> Tensor:
        """[B, 16, 4, h, w] of a role in a chunk."""
        shape = (16, self.preset.chunk, *self.preset.geometry.latent)
        return noise_of(self.scene.positions, shape, self._device, self.settings.seed, chunk, role)

    def _plan(self, layout: Layout, *, remembers: bool) -> Plan:
        """Of a pass over the caches, whose layouts are the same in all branches."""
        branch = next(iter(self._branches.values()))
        cache = branch.cache.without_tail() if remembers else branch.cache
        return make_plan(
            branch.model.config, layout, context=cache.layout, backend=self.backend, device=self._device
        )

    def _given(self, plan: Plan, latents: Tensor, sigma: Sigma | None) -> Inputs:
        """What all branches of a pass are given. latents: [B, 36, F, H, W]; sigma: of predicted frames."""
        predicted = plan.layout.count(Kind.PRED)
        level = torch.full((len(latents), predicted), sigma or 0.0, dtype=torch.float64, device=self._device)
        return Inputs(plan, latents, level, self._actions, self._negative)

    def _run(self, expert: str, negative: bool, chunk: int, given: Inputs) -> Outputs:
        """One pass of a branch with the prompt of a chunk, or with the negative one."""
        branch = self._branches[expert, negative]
        prompt = NEGATIVE if negative else self.scene.prompts[chunk]
        text: Text | None = branch.text if branch.text_of == prompt else None
        if text is None:
            text = self._negative if negative else self.scene.text(prompt, self._device)
        known = isinstance(text, CrossCache)
        out: Outputs = branch.model(
            replace(given, text=text, cache=branch.cache, keep=given.keep or not known)
        )
        if not known:
            branch.text_of, branch.text = prompt, out.text
        if out.prediction is not None:
            self._finite.append((f"predictions of expert {expert}", torch.isfinite(out.prediction).all()))
        return out

"""Flow matching: stage 1 and 2b (a clip), 2a (frames asked of the memory), 3 (teacher-forced chunks).

    x_sigma = (1 - sigma) x + sigma eps
    L = E || v(x_sigma, 1000 sigma, y, m, a, d) - (eps - x) ||^2     over the target latents alone

Each is a pure function of a network and a batch. Draws are keyed by the position of a sample in the stream,
so a sample has the same loss in whatever batch it lies, on any rank.
Source: spec/worldplay2.md c.4, d, e.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.config import ConfigError, Preset
from trainer.curriculum import Objective, SigmaLaw, Stage
from trainer.data.batch import Batch
from trainer.model.layout import Kind, Layout, Rule, clip, frame_queries, teacher_forced
from trainer.noise import keyed, noise_of
from trainer.objectives.loss import Loss
from trainer.objectives.passes import Network as Network
from trainer.objectives.passes import forward
from trainer.objectives.sigma import draw_sigma

MASK = 4
"""Channels of the condition that say whether a latent holds the image."""
BUCKET = 16
"""Compressed latents of stages 3 and 4 are padded to a multiple of this: six lengths serve histories of 0 to
32 chunks (a history of 0, whose first chunk has no anchor, has one of its own), at the price of at most
15 x 91 tokens of some 34,000 (spec/faults.md F9)."""


Minimised = Callable[[Network, Preset, Batch, str, int, int], Loss]
"""(network, preset, batch, expert, seed, step) -> Loss."""


def sequence(stage: Stage, preset: Preset, history: int, seed: int, step: int) -> tuple[Layout, Rule]:
    """What a sample of a step runs, without the padding of its bucket: for counts of tokens and FLOPs."""
    chunks = stage.target // preset.chunk
    if stage.objective is Objective.QUERIES:
        times = query_times(history * preset.chunk, stage.target, seed, step)
        return frame_queries(preset, history, times), Rule.FULL
    if stage.objective is Objective.CLIP:
        return clip(preset, history, chunks), Rule.FULL
    layout = teacher_forced(preset, history, chunks)
    return layout.without(Kind.CMP) if drops_memory(stage, seed, step) else layout, Rule.CAUSAL


def objective(stage: Stage) -> Minimised:
    """What a stage minimises. Raises ConfigError for the stages that need more than one network."""
    law, most = stage.sigma, stage.target

    def of_clip(model: Network, preset: Preset, batch: Batch, expert: str, seed: int, step: int) -> Loss:
        return clip_loss(model, preset, batch, expert, law, seed)

    def of_queries(model: Network, preset: Preset, batch: Batch, expert: str, seed: int, step: int) -> Loss:
        times = query_times(batch.latents.shape[2], most, seed, step)
        return query_loss(model, preset, batch, expert, law, seed, times)

    def of_chunks(model: Network, preset: Preset, batch: Batch, expert: str, seed: int, step: int) -> Loss:
        memory = not drops_memory(stage, seed, step)
        return chunk_loss(model, preset, batch, expert, law, seed, memory=memory)

    chosen: dict[Objective, Minimised] = {
        Objective.CLIP: of_clip,
        Objective.QUERIES: of_queries,
        Objective.CHUNKS: of_chunks,
    }
    if stage.objective not in chosen:
        raise ConfigError(f"stage {stage.name}: {stage.objective} is no flow matching of one network")
    return chosen[stage.objective]


def bucketed(preset: Preset, history: int, chunks: int, bucket: int = BUCKET) -> Layout:
    """`teacher_forced`, its compressed part padded to a whole number of buckets."""
    past = teacher_forced(preset, history, chunks).count(Kind.CMP)
    return teacher_forced(preset, history, chunks, -(-past // bucket) * bucket)


def clip_loss(model: Network, preset: Preset, batch: Batch, expert: str, law: SigmaLaw, seed: int) -> Loss:
    """The clip after the history, all its latents at once: [S | C | T | P], everything seen by everything.

    L = || v(x_sigma, 1000 sigma, y, m_<, a, d) - (eps - x) ||^2, x the latents behind the history; without
    history there is no memory (stage 1). Source: spec/worldplay2.md a.5 (BI mode), c.4.2, d (teacher), e.
    """
    layout = clip(preset, batch.history, _target(preset, batch))
    return _matched(model, preset, batch, layout, Rule.FULL, expert, law, seed)


def query_times(latents: int, most: int, seed: int, step: int) -> tuple[int, ...]:
    """Latents of a history that one step asks for, 1 to `most` of them, in order.

    The places are part of the layout, so the samples of a forward pass share them; keyed by the step, they do
    not depend on how ranks and micro-batches cut its batch.
    """
    generator = keyed(seed, "queries", step)
    count = int(torch.randint(1, min(most, latents) + 1, (1,), generator=generator))
    return tuple(sorted(torch.randperm(latents, generator=generator)[:count].tolist()))


def drops_memory(stage: Stage, seed: int, step: int) -> bool:
    """Whether a step has no compressed frames: a whole step, on every rank, since layouts are shared."""
    return float(torch.rand((), generator=keyed(seed, "memory", step))) < stage.memory_drop


def query_loss(
    model: Network,
    preset: Preset,
    batch: Batch,
    expert: str,
    law: SigmaLaw,
    seed: int,
    times: tuple[int, ...],
) -> Loss:
    """Latents `times` of the history H at their own positions, from its compressed latents alone: [C | P].

    L = || G(H_Omega noised at t, t, c, phi(H)) - (eps - H_Omega) ||^2. Neither sink nor anchor is there, and
    y of a query is that of the zero clip with mask 0, even at latent 0: only phi(H) can answer.
    Source: spec/worldplay2.md c.4.1.
    """
    layout = frame_queries(preset, batch.history, times)
    return _matched(model, preset, batch, layout, Rule.FULL, expert, law, seed, image=False)


def chunk_loss(
    model: Network,
    preset: Preset,
    batch: Batch,
    expert: str,
    law: SigmaLaw,
    seed: int,
    bucket: int = BUCKET,
    memory: bool = True,
) -> Loss:
    """Every target chunk from the true chunks before it: [S | C.. | pad | T.. | P..] in one causal pass.

    L = mean over i of || v(x_i at sigma_i, 1000 sigma_i, y_i, m_<i, a, d_i) - (eps_i - x_i) ||^2.
    Memory and targets read the prompt of their own chunk. memory: False leaves the compressed frames out;
    sink and anchors stay. Source: spec/worldplay2.md d, e, l.7.
    """
    chunks = _target(preset, batch)
    if memory:
        layout = bucketed(preset, batch.history, chunks, bucket)
    else:
        layout = teacher_forced(preset, batch.history, chunks).without(Kind.CMP)
    return _matched(model, preset, batch, layout, Rule.CAUSAL, expert, law, seed)


# --- one pass ---------------------------------------------------------------------------------------------


def _matched(
    model: Network,
    preset: Preset,
    batch: Batch,
    layout: Layout,
    rule: Rule,
    expert: str,
    law: SigmaLaw,
    seed: int,
    *,
    image: bool = True,
) -> Loss:
    """The predicted frames of a layout, at the noise levels and with the noise of the batch's positions."""
    device, frames = batch.latents.device, layout.count(Kind.PRED)
    groups = frames // preset.chunk if law.per_chunk else 1
    sigma = draw_sigma(law, preset, expert, batch.positions, groups, seed).to(device)
    shape = (batch.latents.shape[1], frames, *batch.latents.shape[3:])
    noise = noise_of(batch.positions, shape, device, seed, "noise")
    value = velocity_error(model, batch, layout, rule, sigma, noise, image=image)
    return Loss(value.mean(), sigma, value.detach(), batch.history)


def velocity_error(
    model: Network,
    batch: Batch,
    layout: Layout,
    rule: Rule,
    sigma: Tensor,
    noise: Tensor,
    *,
    memory: Batch | None = None,
    image: bool = True,
) -> Tensor:
    """[B, G]: || v - (eps - x) ||^2 over the predicted frames of a layout, a mean for each of G equal groups.

    sigma: float64 [B, G]. noise: [B, 16, P, H, W]. memory: whose latents the compressor reads instead, for
    controls. image: False gives the targets the condition of latents that hold no image.
    """
    times = list(layout.only(Kind.PRED).times)
    clean = batch.latents[:, :, times]
    y = (batch.condition if image else _without_image(batch.condition))[:, :, times]
    levels = sigma.repeat_interleave(len(times) // sigma.shape[1], dim=1)
    level = levels.float()[:, None, :, None, None]
    noisy = torch.cat([(1.0 - level) * clean + level * noise, y], dim=1)
    out = forward(model, batch, layout, rule, noisy, levels, memory=memory)
    error = (out.velocity.float() - (noise - clean)).square().mean(dim=(1, 3, 4))
    return error.reshape(len(batch), sigma.shape[1], -1).mean(dim=2)


def _target(preset: Preset, batch: Batch) -> int:
    """Chunks behind the history."""
    return batch.latents.shape[2] // preset.chunk - batch.history


def _without_image(condition: Tensor) -> Tensor:
    """The condition of latents that hold no image: mask 0, and the latents of the zero clip, which are those
    that the condition ends with. Source: spec/worldplay2.md a.3, c.4."""
    image = condition[:, MASK:, -1:].expand(-1, -1, condition.shape[2], -1, -1)
    return torch.cat([torch.zeros_like(condition[:, :MASK]), image], dim=1)

"""One update of the student from a rollout that was scored: replay chunk by chunk, gradients added up.

    L_i = 0.5 mean (z_i - sg(z_i - g_i))^2,   z_i the replayed estimate, g_i the chunk's slice of its clip's g

Source: spec/worldplay2.md g.1, g.2 steps 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.config import Preset
from trainer.curriculum import StableConfig
from trainer.model.wan import WanModel
from trainer.noise import noise_of
from trainer.stable.played import Played, Snapshot
from trainer.stable.replay import Replay
from trainer.stable.scores import Experts, Scored, clip_batch, clips_of, draw_level, score_clip


def score(
    preset: Preset, real: Experts, fake: Experts, played: Played, config: StableConfig, seed: int, step: int
) -> tuple[Scored, ...]:
    """Every clip of a rollout, each at a noise level of its own, drawn by (seed, step, clip)."""
    scored = []
    for index in range(clips_of(played, preset, config.clip)):
        batch = clip_batch(played, preset, index, config.clip)
        sigma = draw_level(preset, config, None, seed, step, "score-level", index)
        shape = (16, config.clip, *played.full.shape[3:])
        noise = noise_of(batch.positions, shape, played.full.device, seed, step, "score", index)
        scored.append(score_clip(preset, real, fake, batch, config, sigma, noise))
    return tuple(scored)


def replay_loss(estimate: Tensor, gradient: Tensor) -> Tensor:
    """L of one chunk, mean over the batch: its gradient with respect to the estimate is g over its size."""
    return 0.5 * (estimate - (estimate - gradient).detach()).square().mean()


def recorded(played: Played, newest: int) -> tuple[Snapshot, ...]:
    """The recorded steps of the newest chunks; of all for 0."""
    return played.snapshots[-newest:] if newest else played.snapshots


def replay_all(
    preset: Preset,
    students: Mapping[str, WanModel],
    played: Played,
    scored: tuple[Scored, ...],
    backward: Callable[[Tensor, Snapshot], None],
    newest: int = 0,
) -> int:
    """Replay every recorded step of the given students, a chunk at a time, and hand each loss to `backward`.

    students: those in training, by expert; chunks whose recorded step belongs to another are left out.
    newest: clips at the end of the rollout that are replayed, 0 for all. Losses are scaled so that all chunks
    of these make one mean. Returns how many chunks were replayed.
    """
    replay, chunks, done = Replay(preset, played), scored[0].gradient.shape[2] // preset.chunk, 0
    shown = recorded(played, chunks * newest)
    for snapshot in shown:
        model = students.get(snapshot.block.expert)
        if model is None:
            continue
        index, first = snapshot.chunk // chunks, snapshot.chunk % chunks * preset.chunk
        gradient = scored[index].gradient[:, :, first : first + preset.chunk]
        loss = replay_loss(replay.estimate(model, snapshot), gradient) / len(shown)
        backward(loss, snapshot)
        done += 1
    return done

"""From noise to clean latents of one chunk: many steps of a velocity, or the four of a few-step model.

A sampler knows neither networks nor memory: it is given a function that predicts, which knows the expert that
a noise level belongs to (`Preset.expert`).
Source: spec/worldplay2.md a.1, a.2, f.2, i.3; DESIGN rule 9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trainer.schedule import Block, PddSchedule, ScheduleError, Sigma, clean_estimate, renoise

Velocity = Callable[[Tensor, Sigma], Tensor]
"""State [B, C, T, H, W] at a noise level -> its velocity."""
Decoder = Callable[[Tensor, Block], tuple[Tensor, Tensor]]
"""State at the start of a block -> displacement and endpoint velocity."""


@dataclass(frozen=True)
class ManySteps:
    """Settings of the velocity sampler; defaults are the release's. guidance: w of u + w (c - u)."""

    steps: int = 40
    shift: float = 5.0
    guidance: float = 3.5


def guided(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """u + w (c - u). Source: spec/worldplay2.md a.2."""
    return unconditional + guidance * (conditional - unconditional)


def many_steps(velocity: Velocity, noise: Tensor, settings: ManySteps) -> Tensor:
    """Clean latents by UniPC of order 2 over shifted flow noise levels.

    noise: float32, the state at sigma 1. The scheduler is diffusers'; the network is given its noise levels
    themselves, not its timesteps, which are rounded down to integers.
    Raises ScheduleError without a step.
    """
    if settings.steps < 1:
        raise ScheduleError(f"{settings.steps} steps: at least 1 needed")
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.shift
    )
    scheduler.set_timesteps(settings.steps)
    scheduler.set_begin_index(0)
    state = noise
    for sigma, timestep in zip(scheduler.sigmas.tolist(), scheduler.timesteps):
        state = scheduler.step(velocity(state, Sigma(sigma)), timestep, state).prev_sample
    return state


def few_steps(
    decode: Decoder,
    noise: Tensor,
    schedule: PddSchedule,
    fresh: Callable[[int], Tensor],
    states: list[Tensor] | None = None,
) -> Tensor:
    """Clean latents by one consistency step a block, with new noise between blocks.

    noise: the state at sigma 1. fresh: the noise after the block of an index. states: takes the state that
    each block starts from, for replay. Source: spec/worldplay2.md f.2, g.2.
    """
    state = noise
    for block in schedule.blocks:
        if states is not None:
            states.append(state)
        clean = clean_estimate(state, *decode(state, block), block)
        state = clean if block.sigma_stop == 0.0 else renoise(clean, fresh(block.index), block)
    return state

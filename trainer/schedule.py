"""Noise levels: the one schedule that few-step start, rollout and replay share. Clips are scored at levels
of their own shift (`StableConfig.shift`).

Units: `sigma` in [0, 1] is a noise level, x_sigma = (1 - sigma) x + sigma eps. The network takes sigmas and
makes timesteps (1000 sigma) itself, so no other code has any. `ratio` is a sigma before the shift. An
`interval` is an index of the grid; interval k goes from sigma_k down to sigma_{k+1}.
Source: spec/worldplay2.md a (notation), e, f.2; spec/faults.md M2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NewType

from torch import Tensor

from trainer.config import Preset

Sigma = NewType("Sigma", float)


class ScheduleError(ValueError):
    """A schedule that cannot be built, or a place on it that does not exist."""


def shift_ratio(ratio: float, shift: float) -> Sigma:
    """sigma = s r / (1 + (s - 1) r)."""
    return Sigma(shift * ratio / (1.0 + (shift - 1.0) * ratio))


def unshift_sigma(sigma: float, shift: float) -> float:
    """The ratio of a sigma: r = sigma / (s - (s - 1) sigma)."""
    return sigma / (shift - (shift - 1.0) * sigma)


def flow_sigmas(steps: int, shift: float) -> tuple[Sigma, ...]:
    """steps + 1 noise levels from 1 to 0, evenly spaced before the shift."""
    if steps < 1:
        raise ScheduleError(f"{steps} steps: at least 1 needed")
    return tuple(shift_ratio(1.0 - n / steps, shift) for n in range(steps + 1))


@dataclass(frozen=True)
class Block:
    """One step of the few-step sampler: the intervals [start, stop) of the grid, all of one expert.

    index: 0..3 over the whole schedule. local: which of its expert's blocks. first: the first interval of the
    expert, so that `start - first` is a head of its bank. sigmas: stop - start + 1 noise levels.
    """

    index: int
    expert: str
    local: int
    first: int
    start: int
    stop: int
    sigmas: tuple[Sigma, ...]

    @property
    def heads(self) -> range:
        """The heads of the expert's bank that decode this block."""
        return range(self.start - self.first, self.stop - self.first)

    @property
    def steps(self) -> tuple[float, ...]:
        """sigma_{k+1} - sigma_k of every interval: negative."""
        return tuple(after - before for before, after in zip(self.sigmas, self.sigmas[1:]))

    @property
    def sigma_start(self) -> Sigma:
        return self.sigmas[0]

    @property
    def sigma_endpoint(self) -> Sigma:
        """Where the last interval starts: the level of the state that the endpoint velocity starts from."""
        return self.sigmas[-2]

    @property
    def sigma_stop(self) -> Sigma:
        return self.sigmas[-1]


@dataclass(frozen=True)
class PddSchedule:
    """The grid of parallel decoding and its blocks. Defaults are the released schedule.

    boundary: sigma where the expert "high" ends; it must be a point of the grid, so that no block needs two
    experts. None: one expert ("single") owns all blocks. Source: spec/worldplay2.md f.2.
    """

    intervals: int = 128
    shift: float = 7.0
    boundary: float | None = 0.9
    blocks_per_expert: int = 2

    def __post_init__(self) -> None:
        for _, span in self.experts:
            if len(span) < 2 * self.blocks_per_expert or len(span) % self.blocks_per_expert:
                raise ScheduleError(
                    f"{len(span)} intervals do not make {self.blocks_per_expert} equal blocks of 2 or more"
                )

    @cached_property
    def sigmas(self) -> tuple[Sigma, ...]:
        return flow_sigmas(self.intervals, self.shift)

    @property
    def experts(self) -> tuple[tuple[str, range], ...]:
        """The intervals of each expert, in the order of use."""
        if self.boundary is None:
            return (("single", range(self.intervals)),)
        place = (1.0 - unshift_sigma(self.boundary, self.shift)) * self.intervals
        split = round(place)
        if abs(place - split) > 1e-9:
            raise ScheduleError(
                f"boundary {self.boundary} at shift {self.shift} falls on interval {place:.3f} of "
                f"{self.intervals}: choose a grid that has it"
            )
        return (("high", range(split)), ("low", range(split, self.intervals)))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        made: list[Block] = []
        for expert, span in self.experts:
            length = len(span) // self.blocks_per_expert
            for local in range(self.blocks_per_expert):
                start = span.start + local * length
                sigmas = self.sigmas[start : start + length + 1]
                made.append(Block(len(made), expert, local, span.start, start, start + length, sigmas))
        return tuple(made)

    def heads(self, expert: str) -> int:
        """Heads in the bank of an expert: one an interval."""
        for name, span in self.experts:
            if name == expert:
                return len(span)
        raise ScheduleError(f"no expert {expert!r} in this schedule")

    def blocks_of(self, expert: str) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.expert == expert)


def deterministic_step(state: Tensor, displacement: Tensor, endpoint: Tensor, block: Block) -> Tensor:
    """The state at the block's end, by its mean velocities alone.

    state: at sigma_start. displacement: sum of (sigma_{k+1} - sigma_k) u_k over all intervals but the last.
    endpoint: velocity of the last interval. Source: spec/worldplay2.md f.1.
    """
    return state + displacement + block.steps[-1] * endpoint


def clean_estimate(state: Tensor, displacement: Tensor, endpoint: Tensor, block: Block) -> Tensor:
    """x0 of a consistency step: z_e = z + D, x0 = z_e - sigma_endpoint E. Source: spec/worldplay2.md f.2."""
    return state + displacement - block.sigma_endpoint * endpoint


def renoise(clean: Tensor, noise: Tensor, block: Block) -> Tensor:
    """The state that the next block starts from; the clean estimate itself after the last block."""
    if block.sigma_stop == 0.0:
        return clean
    return (1.0 - block.sigma_stop) * clean + block.sigma_stop * noise


def schedule_of(preset: Preset) -> PddSchedule:
    """Of stages 4 and 5, and of whatever samples with their weights."""
    return PddSchedule(boundary=preset.boundary)

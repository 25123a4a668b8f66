"""What a run must show, on held-out clips, paired and with bootstrap intervals.

  sides      left and right from the same starts: sign and size of the flow against the codec-decoded truth's
  yaw        the chunk under its true rows against the same noise under flipped yaw
  next       the next chunk against the last frame held
  recall     stage 2a: frames asked of the own memory against another clip's
  revisits   stage 3: flow loss of the first chunk that comes back to what neither sink nor last latent shows,
             with the own memory, none, another clip's, that of a clip that stood still, zeros, a window of
             the newest latents of the same budget; and of a chunk that was never seen, the placebo

dB are PSNR against the decoded latents of the recording, so that what the codec loses counts for nobody.
Source: issue "the trainer", table "what it must show".
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.learn.corpora import Bars
from benchmarks.learn.loops import Place, find
from benchmarks.learn.model import (
    Experts,
    LearnError,
    answers,
    db,
    decode,
    next_chunk,
    read_clips,
    usable,
    window,
    with_actions,
)
from jobs.evaluate.history import rolled, zeroed
from jobs.evaluate.stats import Interval, interval
from jobs.train_data import TrainingData
from schemas.action import PERSPECTIVE, YAW
from trainer.codec.base import Codec, to_rgb
from trainer.config import Preset
from trainer.curriculum import SigmaLaw
from trainer.data.batch import Batch
from trainer.model.layout import Kind, Layout, Rule, teacher_forced
from trainer.noise import noise_of
from trainer.objectives.passes import forward
from trainer.objectives.sigma import even_levels

STARTS = 24
HISTORIES = (2, 3, 4)
"""Chunks before what is generated."""
RETURNS = range(3, 12)
"""Chunks before a return: stage 3 trains with up to 11 (a history of 8, and 3 targets behind it)."""
LEVELS, DRAWS = 4, 4
"""Noise levels of each expert, and draws of noise at each: a loss of a chunk is a mean of 2 x 4 x 4. In each
draw "another's memory" is that of another clip."""
PASS = 24
"""Clips of one pass."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """value: with its interval, in `unit`. bar: the least that it must be, None where none is asked; passed:
    None without a bar. detail: what else was found."""

    name: str
    value: Interval
    unit: str
    bar: float | None = None
    passed: bool | None = None
    detail: str = ""

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value.row()}


@dataclass(frozen=True)
class Evidence:
    """One run at hand: experts of the stages that are measured, the corpus, its codec."""

    data: TrainingData
    preset: Preset
    codec: Codec
    recalling: Experts  # stage 2a
    playing: Experts  # stage 3
    bars: Bars

    def all(self, say: Callable[[str], None]) -> list[Measure]:
        """Every measure that the corpus allows."""
        found: list[Measure] = []
        for part in (self.sides, self.yaw, self.next, self.recall, self.revisits):
            for measure in part():
                say(line(measure))
                found.append(measure)
        return found

    # --- actions ------------------------------------------------------------------------------------------

    def sides(self) -> Iterator[Measure]:
        """Both sides from each of the starts."""
        rate, slope = self._rate(), self._slope()
        right: list[float] = []
        size: list[float] = []
        names: list[str] = []
        for batch in self._starts(STARTS):
            for side in (-1, 1):
                rows = torch.zeros(self.preset.chunk, batch.actions.shape[2])
                rows[:, YAW] = side * rate
                rows[:, PERSPECTIVE] = batch.actions[0, -1, PERSPECTIVE]
                made = next_chunk(self.playing, self.preset, with_actions(batch, rows))
                for flow, name in zip(self._flows(batch, made), batch.samples):
                    share = flow / (slope * side * rate)
                    right.append(float(share > 0))
                    size.append(share)
                    names.append(name)
        told = f"{len(right)} chunks of {rate:.2f} degrees a latent; the truth moves {slope:.3f} px a degree"
        yield _judged("sides: right sign", interval(right, names), "share", self.bars.sides, told)
        yield _judged("sides: flow against the truth's", interval(size, names), "share", self.bars.flow, told)

    def yaw(self) -> Iterator[Measure]:
        """Each episode's chunk that turns most, among those of `HISTORIES`."""
        gains: list[float] = []
        names: list[str] = []
        for batch in self._turning():
            rows = batch.actions[:, -self.preset.chunk :]
            flipped = rows.clone()
            flipped[..., YAW] *= -1
            truth = self._truth(batch)
            own, other = (
                db(
                    self._pictures(batch, next_chunk(self.playing, self.preset, with_actions(batch, r))),
                    truth,
                )
                for r in (rows, flipped)
            )
            gains += (own - other).tolist()
            names += batch.samples
        won = [float(g >= self.bars.yaw_db) for g in gains]
        told = f"mean gain {np.mean(gains):+.2f} dB"
        name = f"yaw: true beats flipped by {self.bars.yaw_db} dB"
        yield _judged(name, interval(won, names), "share of episodes", self.bars.yaw_share, told)
        yield _judged("yaw: true against flipped", interval(gains, names), "dB", None, told)

    def next(self) -> Iterator[Measure]:
        """The next chunk of every clip behind each of `HISTORIES`, moving or not."""
        gains: list[float] = []
        moving: list[bool] = []
        names: list[str] = []
        for history in HISTORIES:
            for batch in self._batches(usable(self.data, self.preset.chunk * (history + 1)), history):
                made = decode(self.codec, batch, self.preset, next_chunk(self.playing, self.preset, batch))
                truth = self._truth(batch)
                gains += (db(made.pixels, truth) - db(made.last.expand_as(truth), truth)).tolist()
                moving += (
                    batch.actions[:, -self.preset.chunk :, :PERSPECTIVE].abs().sum((1, 2)).gt(0).tolist()
                )
                names += batch.samples
        went = [k for k, moved in enumerate(moving) if moved]
        told = f"chunks in which the player moves: {np.mean([gains[k] for k in went]):+.2f} dB of {len(went)}"
        yield _judged(
            "next chunk against the last frame", interval(gains, names), "dB", self.bars.next_db, told
        )

    # --- memory -------------------------------------------------------------------------------------------

    def recall(self) -> Iterator[Measure]:
        """Four latents of a history of six chunks, asked of the own memory and of the next clip's."""
        history, gains, names, own_db = 6, [], [], []
        latents = self.preset.chunk * history
        times = tuple((2 * k + 1) * latents // 8 for k in range(4))
        for batch in self._batches(usable(self.data, latents), history, latents):
            begun = self.codec.decode(batch.latents[:, :, :1])[1]
            truth = self.codec.decode(batch.latents[:, :, list(times)], begun)[0]
            own, other = (
                db(
                    self.codec.decode(answers(self.recalling, self.preset, batch, times, memory=m), begun)[0],
                    truth,
                )
                for m in (None, rolled(batch))
            )
            gains += (own - other).tolist()
            own_db += own.tolist()
            names += batch.samples
        told = f"own memory {np.mean(own_db):.2f} dB; latents {', '.join(map(str, times))} of {latents}"
        found = interval(gains, names)
        yield _judged("recall: own memory against another's", found, "dB", self.bars.recall_db, told)

    def revisits(self) -> Iterator[Measure]:
        """Return and placebo chunks under every memory. Nothing where no clip turns on the spot and back."""
        back, new = self.places()
        for kind, places in (("return", back), ("placebo", new)):
            if len(places) < 3:
                continue
            whole, hidden, names = self._losses(places)
            for other in ("none", "other", "still", "zeroed", "window"):
                gain = whole[other] - whole["own"]
                t = float(gain.mean() / (gain.std(ddof=1) / math.sqrt(len(gain))))
                better = float((gain > 0).mean())
                part = 100 * gain.mean() / whole["own"].mean()
                told = (
                    f"t {t:.1f}; own better in {better:.0%} of {len(gain)}; {part:+.1f} % of the loss; "
                    f"hidden columns alone {np.mean(hidden[other] - hidden['own']):+.4f}"
                )
                found, passed = interval(gain, names), None
                if (
                    self.bars.loops_t is not None
                    and self.bars.loops_share is not None
                    and other in ("none", "other")
                ):
                    if kind == "return":
                        passed = t >= self.bars.loops_t and better >= self.bars.loops_share
                    else:
                        passed = found.low <= 0.0 <= found.high  # flat
                bar = None if passed is None or kind == "placebo" else self.bars.loops_t
                yield Measure(f"{kind}: {other} - own memory", found, "loss", bar, passed, told)

    def places(self) -> tuple[list[Place], list[Place]]:
        """On the spot: clips that never walk."""
        rows: dict[int, npt.NDArray[np.float32]] = {}
        least = self.preset.chunk * (RETURNS[0] + 1)
        for clip in usable(self.data, least):
            table = self.data.held_out
            known = int(
                min(table.latents[clip], table.actions_known[clip], self.preset.chunk * (RETURNS[-1] + 1))
            )
            actions = read_clips(
                self.data, self.preset, [clip], known - known % self.preset.chunk, 0
            ).actions[0]
            if not bool(actions[:, [2, 3]].any()):
                rows[clip] = actions.numpy()
        return find(rows, RETURNS, self.preset.chunk)

    def _losses(self, places: Sequence[Place]) -> tuple[dict[str, Floats], dict[str, Floats], list[str]]:
        """(loss of the chunk, loss of its hidden columns) of every place by memory; names of the clips."""
        whole: dict[str, list[float]] = defaultdict(list)
        hidden: dict[str, list[float]] = defaultdict(list)
        names: list[str] = []
        by = defaultdict(list)
        for place in places:
            by[place.history].append(place)
        for history, own in sorted(by.items()):
            # Another's memory is that of the next place: two at least.
            groups = [own[k : k + PASS] for k in range(0, len(own), PASS)]
            for group in [g for g in groups if len(g) > 1]:
                latents = self.preset.chunk * (history + 1)
                batch = read_clips(self.data, self.preset, [p.clip for p in group], latents, history)
                at = torch.from_numpy(np.stack([p.hidden for p in group]))[:, :, None, :].float()
                for name, layout, memories in self._memories(batch):
                    value = self._error(batch, layout, memories)
                    whole[name] += value.mean((1, 2, 3)).tolist()
                    shown = at.expand_as(value)
                    hidden[name] += ((value * shown).sum((1, 2, 3)) / shown.sum((1, 2, 3))).tolist()
                names += batch.samples
        return {k: np.array(v) for k, v in whole.items()}, {k: np.array(v) for k, v in hidden.items()}, names

    def _memories(self, batch: Batch) -> Iterator[tuple[str, Layout, Sequence[Batch | None]]]:
        """Of every control its layout, and what the compressor reads at each draw."""
        usual = teacher_forced(self.preset, batch.history, 1)
        others = [rolled(batch)]
        while len(others) < min(DRAWS, len(batch) - 1):
            others.append(rolled(others[-1]))
        yield "own", usual, [None]
        yield "none", usual.without(Kind.CMP), [None]
        yield "other", usual, others
        yield "still", usual, [standing(batch, self.preset)]
        yield "zeroed", usual, [zeroed(batch)]
        yield "window", window(self.preset, batch.history), [None]

    @torch.no_grad()
    def _error(self, batch: Batch, layout: Layout, memories: Sequence[Batch | None]) -> Tensor:
        """[B, 4, h, w]: flow loss of a chunk, the mean over noise levels of both experts alike, and draws.
        memories: taken in turn."""
        times = list(layout.only(Kind.PRED).times)
        clean, y = batch.latents[:, :, times], batch.condition[:, :, times]
        parts = []
        for expert, model in self.playing.items():
            levels_of = even_levels(SigmaLaw(), self.preset, expert, LEVELS).tolist()
            for number, (sigma, draw) in enumerate(itertools.product(levels_of, range(DRAWS))):
                noise = noise_of(batch.positions, tuple(clean.shape[1:]), clean.device, 0, expert, number)
                levels = torch.full((len(batch), len(times)), sigma, dtype=torch.float64)
                memory = memories[draw % len(memories)]
                target = torch.cat([(1 - sigma) * clean + sigma * noise, y], dim=1)
                out = forward(model, batch, layout, Rule.CAUSAL, target, levels, memory=memory).velocity
                parts.append((out.float() - (noise - clean)).square().mean(1))
        return torch.stack(parts).mean(0)

    # --- clips --------------------------------------------------------------------------------------------

    def _batches(self, rows: Sequence[int], history: int, latents: int | None = None) -> Iterator[Batch]:
        """Clips with the next chunk behind a history, or with `latents` in all; two or more a batch."""
        length = self.preset.chunk * (history + 1) if latents is None else latents
        for k in range(0, len(rows), PASS):
            part = list(rows[k : k + PASS])
            if len(part) > 1 or k == 0:
                yield read_clips(self.data, self.preset, part, length, history)

    def _starts(self, count: int) -> Iterator[Batch]:
        """`count` starts: clips and `HISTORIES` in turn; a clip comes again with another history."""
        rows = usable(self.data, self.preset.chunk * (HISTORIES[-1] + 1))
        if not rows:
            raise LearnError("no held-out clip is long enough to start from")
        cases = [
            (rows[k % len(rows)], HISTORIES[(k + k // len(rows)) % len(HISTORIES)]) for k in range(count)
        ]
        for history in HISTORIES:
            yield from self._batches([clip for clip, h in cases if h == history], history)

    def _turning(self) -> Iterator[Batch]:
        """Of every episode the chunk that turns most; none where it turns by less than half of a held key."""
        chunk, least = self.preset.chunk, 0.5 * self._rate() * self.preset.chunk
        chosen = defaultdict(list)
        for clip, actions in self._actions():
            turn = {h: abs(float(actions[chunk * h : chunk * (h + 1), YAW].sum())) for h in HISTORIES}
            history = max(HISTORIES, key=lambda h: turn[h])
            if turn[history] >= least:
                chosen[history].append(clip)
        for history, rows in sorted(chosen.items()):
            yield from self._batches(rows, history)

    def _actions(self) -> Iterator[tuple[int, Tensor]]:
        length = self.preset.chunk * (HISTORIES[-1] + 1)
        for clip in usable(self.data, length):
            yield clip, read_clips(self.data, self.preset, [clip], length, 0).actions[0]

    def _rate(self) -> float:
        """Degrees of a latent of a held turn: the median of those that turn at all."""
        yaw = torch.cat([actions[:, YAW].abs() for _, actions in self._actions()])
        return float(yaw[yaw > 0.5].median())

    def _slope(self) -> float:
        """Pixels a frame that the codec-decoded truth moves for a degree a latent of yaw: the median."""
        found: list[float] = []
        for batch in self._turning():
            for flow, rows in zip(
                self._flows(batch, self._target(batch)), batch.actions[:, -self.preset.chunk :]
            ):
                found.append(flow / float(rows[:, YAW].mean()))
        if not found:
            raise LearnError("no held-out chunk turns")
        return float(np.median(found))

    def _target(self, batch: Batch) -> Tensor:
        return batch.latents[:, :, self.preset.chunk * batch.history :]

    def _truth(self, batch: Batch) -> Tensor:
        return self._pictures(batch, self._target(batch))

    def _pictures(self, batch: Batch, target: Tensor) -> Tensor:
        return decode(self.codec, batch, self.preset, target).pixels

    def _flows(self, batch: Batch, target: Tensor) -> list[float]:
        """Horizontal flow of a chunk, pixels a frame, of each clip."""
        made = decode(self.codec, batch, self.preset, target)
        return [
            horizontal_flow(torch.cat([made.last[k], made.pixels[k]], 1)[None]) for k in range(len(batch))
        ]


def standing(batch: Batch, preset: Preset) -> Batch:
    """The memory of a clip that always looked where it looks last: it knows what the last latent shows and no
    more. Without any compressed frames a network is where training never was, and loses by that alone."""
    last = preset.chunk * batch.history - 1
    latents = batch.latents[:, :, last : last + 1].expand_as(batch.latents)
    low = batch.low[:, :, last // 2 : last // 2 + 1].expand_as(batch.low)
    return replace(batch, latents=latents, low=low)


def horizontal_flow(pixels: Tensor) -> float:
    """Pixels a frame to the right, of [1, 3, F, H, W]: the mean over steps, pixels weighed by how sharply
    brightness changes across them: a plain wall has no flow, and does not speak."""
    grays = [cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY) for rgb in to_rgb(pixels).numpy()]
    found = []
    for before, after in itertools.pairwise(grays):
        flow = cv2.calcOpticalFlowFarneback(before, after, None, 0.5, 3, 21, 3, 7, 1.5, 0)
        weight = np.abs(cv2.Sobel(before, cv2.CV_32F, 1, 0)).astype(np.float64)
        found.append(float((flow[..., 0] * weight).sum() / (weight.sum() + 1e-9)))
    return float(np.mean(found))


def _judged(name: str, value: Interval, unit: str, bar: float | None, detail: str) -> Measure:
    return Measure(name, value, unit, bar, None if bar is None else bool(value.mean >= bar), detail)


def line(measure: Measure) -> str:
    """For people."""
    v = measure.value
    verdict = {None: "", True: "  passed", False: "  NOT passed"}[measure.passed]
    bar = "" if measure.bar is None else f" (bar {measure.bar:g})"
    return (
        f"{measure.name}: {v.mean:+.3f} [{v.low:+.3f}, {v.high:+.3f}] {measure.unit}{bar}{verdict}; "
        f"{measure.detail}"
    )

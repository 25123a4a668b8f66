"""Which samples a step trains on: an infinite stream that is a pure function of (seed, stage, batch).

1. Kinds interleave at exactly the stage's share of events, without chance: element n of the stream is an
   event where floor((n + 1) share) steps on.
2. Within a kind, epoch follows epoch; each is the order of the samples by a word keyed by (seed, stage, kind,
   epoch) and the sample's id, so neither the order of the index nor other samples move one.
3. Each sample of an epoch draws its history, keyed by (seed, stage, epoch) and its id, among those that its
   known latents allow.
4. Elements of one history wait for each other, in queues that live on over epochs. A full queue is a global
   batch, and batches are numbered in the order in which they fill. Nothing is dropped, repeated or cut short.

So the place in the data is a number, the step; ranks, threads and restarts do not enter.
Source: DESIGN rule 9; spec/faults.md S5, S9, F9.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.clip import ClipKind
from schemas.errors import UserError
from trainer.config import Preset
from trainer.curriculum import Objective, Stage

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Texts = npt.NDArray[np.str_]

_BLOCK = 1 << 16
"""Elements of the stream that are worked out at a time, at most. No step depends on it."""


class PlanError(UserError):
    """Samples and a stage that make no stream; one line."""


class Draw(NamedTuple):
    """One sample of a step. position: place in the stream before the queues, by which its random draws are
    keyed. epoch: how often its kind has gone round before. row: of the corpus index. history: in chunks."""

    position: int
    epoch: int
    row: int
    history: int


@dataclass(frozen=True)
class SampleTable:
    """What the plan knows of N samples, a column each.

    row: int64 [N], place in the corpus index, which `filter` keeps; what a reader takes. latents: T.
    actions_known: leading latents whose six action values are all known.
    """

    row: Ints
    sample_id: Texts
    kind: Texts
    latents: Ints
    actions_known: Ints
    split: Texts
    game: Texts
    tier: Texts

    def __post_init__(self) -> None:
        if len({len(getattr(self, f.name)) for f in fields(self)}) != 1:
            raise ValueError("the columns of a sample table have one length")

    def __len__(self) -> int:
        return len(self.row)

    def filter(self, chosen: npt.NDArray[np.bool_]) -> SampleTable:
        """The samples where `chosen` [N] is true: `table.filter(table.split == "train")`."""
        return SampleTable(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


def latents_read(stage: Stage, preset: Preset, history: int) -> int:
    """T of a batch: the history and the target; frame queries lie inside the history."""
    asked = 0 if stage.objective is Objective.QUERIES else stage.target
    return preset.chunk * history + asked


def word(seed: int, *role: str | int) -> int:
    """64 bits that depend on the seed and the role alone."""
    digest = hashlib.sha256("|".join(map(str, (seed, *role))).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Plan:
    """The stream of one stage over the samples of a table.

    Samples whose known latents allow no history of the stage are left out. Raises PlanError when a kind that
    the stage asks for is left without samples.
    """

    def __init__(self, table: SampleTable, stage: Stage, preset: Preset, seed: int) -> None:
        self.stage = stage
        self._histories = np.array(sorted(set(stage.histories)), np.int64)
        needs = [latents_read(stage, preset, int(h)) for h in self._histories]
        if not needs or needs[0] < 1:
            raise PlanError(f"stage {stage.name}: histories {list(stage.histories)} leave nothing to predict")
        usable = np.minimum(table.latents, table.actions_known)
        self._fitting = np.searchsorted(np.array(needs), usable, side="right")
        self._share = Fraction(stage.events).limit_denominator(10_000)
        self._rows, self.samples = table.row, len(table)
        self._seed = seed
        keys = [hashlib.sha256(name.encode()).digest()[:8] for name in table.sample_id.tolist()]
        self._keys = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64)
        shares = {ClipKind.NAVIGATION: 1 - self._share, ClipKind.EVENT: self._share}
        self._of_kind = {
            kind: np.flatnonzero((table.kind == str(kind)) & (self._fitting > 0))
            for kind, share in shares.items()
            if share > 0
        }
        for kind, own in self._of_kind.items():
            if not len(own):
                given = np.count_nonzero(table.kind == str(kind))
                raise PlanError(
                    f"stage {stage.name} takes {float(shares[kind]):.0%} of its samples from {kind} clips, "
                    f"and of {given} none has {needs[0]} latents with known actions: give more clips, or "
                    "another share of events"
                )
        self._orders: dict[ClipKind, tuple[int, Ints]] = {}
        # Where each block begins: steps before it, and what waits in the queues. A run of 710,000 samples and
        # 10 epochs has some 100 blocks.
        self._begins: list[int] = [0]
        self._waiting: list[Ints] = [np.zeros((0, 4), np.int64)]
        self._held: tuple[int, Ints] = (-1, np.zeros((0, stage.batch, 4), np.int64))
        self._size = min(_BLOCK, max(self.samples, 32 * stage.batch))

    def batch(self, step: int) -> tuple[Draw, ...]:
        """The global batch of a step: `stage.batch` samples of one history. step: 0, 1, ..."""
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        while step >= self._begins[-1]:
            self._block(len(self._begins) - 1)
        number = bisect_right(self._begins, step) - 1
        rows: list[list[int]] = self._block(number)[step - self._begins[number]].tolist()
        return tuple(Draw(*row) for row in rows)

    def describe(self, steps: int) -> Expected:
        """What the first `steps` steps draw, counted."""
        kinds: Counter[str] = Counter()
        histories: Counter[int] = Counter()
        number, left = 0, steps
        while left > 0:
            drawn = self._block(number)[:left].reshape(-1, 4)
            number, left = number + 1, left - len(drawn) // self.stage.batch
            events = int(np.count_nonzero(self._is_event(drawn[:, 0])))
            kinds[str(ClipKind.EVENT)] += events
            kinds[str(ClipKind.NAVIGATION)] += len(drawn) - events
            for history, count in zip(*np.unique(drawn[:, 3], return_counts=True), strict=True):
                histories[int(history)] += int(count)
        clips = {str(kind): len(own) for kind, own in self._of_kind.items()}
        left_out = self.samples - int(np.count_nonzero(self._fitting > 0))
        by_history = {int(h): histories[int(h)] for h in self._histories}
        return Expected(
            self.stage.name,
            steps,
            self.stage.batch,
            clips,
            left_out,
            {k: kinds[k] for k in clips},
            by_history,
        )

    # --- blocks of the stream -----------------------------------------------------------------------------

    def _block(self, number: int) -> Ints:
        """[steps, batch, 4]: the batches that fill while block `number` of the stream passes."""
        if self._held[0] != number:
            while number >= len(self._waiting):
                self._block(len(self._waiting) - 1)
            first = number * self._size
            elements = np.concatenate([self._waiting[number], self._elements(first, first + self._size)])
            full, waiting = self._gather(elements)
            if number + 1 == len(self._waiting):
                self._begins.append(self._begins[number] + len(full))
                self._waiting.append(waiting)
            self._held = number, full
        return self._held[1]

    def _gather(self, elements: Ints) -> tuple[Ints, Ints]:
        """Batches [steps, batch, 4] in the order in which they fill, and the elements that still wait, in the
        order of the stream. elements: [n, 4], columns of `Draw`, in the order of the stream."""
        size = self.stage.batch
        full, waiting = [], []
        for history in self._histories:
            own = elements[elements[:, 3] == history]
            whole = len(own) // size * size
            full.append(own[:whole].reshape(-1, size, 4))
            waiting.append(own[whole:])
        batches, rest = np.concatenate(full), np.concatenate(waiting)
        return batches[np.argsort(batches[:, -1, 0])], rest[np.argsort(rest[:, 0])]

    def _elements(self, first: int, stop: int) -> Ints:
        """[stop - first, 4]: elements of the stream, before the queues."""
        at = np.arange(first, stop, dtype=np.int64)
        event = self._is_event(at)
        events = self._events_before(at)
        out = np.stack([at] * 4, axis=1)
        for kind, own in self._of_kind.items():
            here = np.flatnonzero(event if kind is ClipKind.EVENT else ~event)
            count = events[here] if kind is ClipKind.EVENT else at[here] - events[here]
            epochs, places = np.divmod(count, len(own))
            for epoch in np.unique(epochs).tolist():
                now = here[epochs == epoch]
                chosen = own[self._order(kind, epoch)[places[epochs == epoch]]]
                drawn = _mixed(self._keys[chosen], word(self._seed, self.stage.name, "history", epoch))
                fit = drawn % self._fitting[chosen].astype(np.uint64)
                out[now, 1] = epoch
                out[now, 2] = self._rows[chosen]
                out[now, 3] = self._histories[fit.astype(np.int64)]
        return out

    def _order(self, kind: ClipKind, epoch: int) -> Ints:
        """Permutation of the samples of a kind. The latest of each is kept: 710,000 take 0.1 s."""
        held = self._orders.get(kind)
        if held is None or held[0] != epoch:
            key = word(self._seed, self.stage.name, kind, epoch)
            order = np.argsort(_mixed(self._keys[self._of_kind[kind]], key), kind="stable")
            held = self._orders[kind] = epoch, order
        return held[1]

    def _events_before(self, positions: Ints) -> Ints:
        return positions * self._share.numerator // self._share.denominator

    def _is_event(self, positions: Ints) -> npt.NDArray[np.bool_]:
        return self._events_before(positions + 1) > self._events_before(positions)


@dataclass(frozen=True)
class Expected:
    """What a number of steps draws. clips: samples that take part, by kind; left_out: those too short, or
    whose actions are not known for long enough. draws: by kind. histories: draws by chunks of memory."""

    stage: str
    steps: int
    batch: int
    clips: Mapping[str, int]
    left_out: int
    draws: Mapping[str, int]
    histories: Mapping[int, int]

    @property
    def epochs(self) -> dict[str, float]:
        """How often each clip of a kind is drawn, on average."""
        return {kind: self.draws[kind] / count for kind, count in self.clips.items()}

    def __str__(self) -> str:
        total = max(1, self.steps * self.batch)
        kinds = ", ".join(
            f"{drawn} {kind} ({drawn / total:.1%}; {self.clips[kind]} clips, {self.epochs[kind]:.2f} epochs)"
            for kind, drawn in self.draws.items()
        )
        histories = ", ".join(f"{h}: {n / total:.1%}" for h, n in self.histories.items())
        return (
            f"stage {self.stage}: {self.steps} steps of {self.batch} samples: {kinds}; "
            f"by chunks of history {histories}; {self.left_out} clips are left out (too few known latents)"
        )


def _mixed(keys: Words, key: int) -> Words:
    """A word for each key: the finalizer of SplitMix64 over both."""
    x = keys ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed

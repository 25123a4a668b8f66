"""Threads that read and decode samples ahead of the training loop.

Threads, not processes: reading, checksums and conversion let go of the interpreter, nothing is pickled, and
an error arrives where its sample is asked for. Each makes whole micro-batches. What comes does not depend on
them: the plan says which sample lies where.
Source: DESIGN rule 9; spec/faults.md S5, S9.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.config import Preset
from trainer.curriculum import Stage
from trainer.data.batch import Batch
from trainer.data.buffers import Buffers
from trainer.data.plan import Draw, Plan, PlanError
from trainer.data.sample import Reader, make_batch


class Loader:
    """The share of one data rank in every step, as micro-batches of equal size.

    seed: of the run; samples draw by that of the stage. data_rank, data_world: of the ranks that read
    different samples. threads: that read, a micro-batch each. ahead: steps that are read before they are
    asked for. waited_s: seconds that the caller has waited so far.
    Raises PlanError when a batch does not split into equal shares and micro-batches: then no rank starts.
    """

    def __init__(
        self,
        plan: Plan,
        reader: Reader,
        stage: Stage,
        preset: Preset,
        seed: int,
        data_rank: int = 0,
        data_world: int = 1,
        threads: int = 4,
        ahead: int = 4,
    ) -> None:
        self._own = share(stage, data_rank, data_world)
        self._micro = min(stage.micro, self._own.stop - self._own.start)
        self._plan, self._reader, self._stage, self._preset = plan, reader, stage, preset
        self._seed = stage.seed(seed)
        self._buffers = Buffers()
        self._threads, self._ahead = threads, ahead
        self.waited_s = 0.0

    def steps(self, first: int) -> Iterator[list[Batch]]:
        """Micro-batches of step `first`, of the next, and so on, without end.

        What the reader or a sample raises is raised here, at the step that it belongs to; no sample is left
        out. Close the iterator (or let it go) to stop the threads.
        """
        pool = ThreadPoolExecutor(self._threads, "wp2-loader")
        waiting: deque[list[Future[Batch]]] = deque()
        step = first
        try:
            while True:
                while len(waiting) <= self._ahead:
                    waiting.append(self._submit(pool, step))
                    step += 1
                started = time.perf_counter()
                ready = [batch.result() for batch in waiting.popleft()]
                self.waited_s += time.perf_counter() - started
                yield ready
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, step: int) -> list[Future[Batch]]:
        own = self._plan.batch(step)[self._own]
        return [pool.submit(self._make, own[at : at + self._micro]) for at in range(0, len(own), self._micro)]

    def _make(self, draws: Sequence[Draw]) -> Batch:
        return make_batch(draws, self._reader, self._stage, self._preset, self._seed, self._buffers.tensor)


def share(stage: Stage, data_rank: int, data_world: int) -> slice:
    """The places of a data rank in every global batch. Raises PlanError when they are not equally many for
    every rank, or do not split into equal micro-batches."""
    if not 0 <= data_rank < data_world:
        raise ValueError(f"data rank {data_rank} of {data_world}")
    each, rest = divmod(stage.batch, data_world)
    if rest or each % min(stage.micro, max(1, each)):
        raise PlanError(
            f"stage {stage.name}: {stage.batch} samples a step do not split over {data_world} data ranks in "
            f"equal micro-batches of {stage.micro}: change batch, micro or the number of ranks"
        )
    return slice(data_rank * each, (data_rank + 1) * each)

"""Which workers may begin their next step: the barrier of `training.barriers`, decided at the server for all workers.

A complete barrier (bsp, ssp) sees the steps of all workers, a sampled one (pbsp, pssp) **one common sample** of them:
every idle worker is compared with the same ones (`pass : staleness -> sample_size -> book` of the branch `lda` of
light_actor). The sample is drawn afresh when a step is completed, when a worker comes or goes, and after
`resample_after`: a sample that was held until it passes would be a different, much slower algorithm.

A task that came back is a worker that lags: whoever it is given to, its step is not complete. Without that a barrier
would forget the work of a dead worker. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from p2pnode.training.barriers.predicates import Barrier, resample_after, sample_size

#: A barrier of one's own: which of the idle workers may go on, given the completed steps of all, by worker.
OwnBarrier = Callable[[Mapping[bytes, int], list[bytes]], Iterable[bytes]]


class StepGate:
    """The completed steps of the live workers. `sample` 0: √P, from 1 to 10. `rng` draws the samples."""

    def __init__(self, barrier: Barrier, sample: int, rng: random.Random) -> None:
        self.barrier = barrier
        self.steps: dict[bytes, int] = {}
        self._sample = sample
        self._rng = rng
        self._drawn: list[bytes | int] | None = None
        self._drawn_at = 0.0
        self._base = 0

    def join(self, worker: bytes, begun: int, step: int | None = None) -> None:
        """A new worker begins where the barrier lets it: after the highest step that was `begun`, less the staleness,
        but not before the slowest worker. `step`: it is not new and has completed so many."""
        if worker in self.steps:
            return
        if step is None:
            staleness = self.barrier.staleness
            step = self.lowest() if staleness is None else max(self.lowest(), begun - staleness)
        self.steps[worker] = step
        self._drawn = None

    def leave(self, worker: bytes) -> None:
        if worker in self.steps:
            self._base = self.lowest()
            del self.steps[worker]
            self._drawn = None

    def completed(self, worker: bytes, step: int) -> None:
        """The worker has completed this step. Steps never go back."""
        if worker in self.steps and step > self.steps[worker]:
            self.steps[worker] = step
            self._drawn = None

    def lowest(self) -> int:
        """The step that all workers have completed; without any, that of the last ones."""
        return min(self.steps.values(), default=self._base)

    def passed(
        self, idle: list[bytes], orphans: list[int], now: float, step_seconds: float, own: OwnBarrier | None = None
    ) -> list[bytes]:
        """Those of the `idle` workers that may begin their next step. `orphans` are the steps of tasks that came back,
        `step_seconds` the median time of a step."""
        if own is not None:
            allowed = dict.fromkeys(own(dict(self.steps), list(idle)))
            return [worker for worker in idle if worker in allowed]
        if not self.barrier.samples:
            return list(idle)
        seen = self._seen(orphans, now, step_seconds)
        return [worker for worker in idle if self.barrier.passes(self.steps[worker], seen)]

    def _seen(self, orphans: list[int], now: float, step_seconds: float) -> list[int]:
        """Completed steps of the common sample."""
        lagging = [step - 1 for step in orphans]
        if self.barrier.complete:
            return [*self.steps.values(), *lagging]
        if self._drawn is None or now - self._drawn_at >= resample_after(step_seconds):
            population: list[bytes | int] = [*self.steps, *lagging]
            count = min(sample_size(self._sample, len(population)), len(population))
            self._drawn = self._rng.sample(population, count)
            self._drawn_at = now
        # A worker that has left meanwhile is not waited for; every departure draws afresh anyhow.
        steps = (one if isinstance(one, int) else self.steps.get(one) for one in self._drawn)
        return [step for step in steps if step is not None]

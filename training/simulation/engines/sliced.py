"""Runs the sliced kernel: allocates its arrays, extends those that grow, and collects the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from training.barriers.predicates import sample_size
from training.simulation.engines.compiled import (
    filled,
    laggard_chances,
    lengthened,
    made_outcome,
    model_of,
    slowness_of,
)
from training.simulation.model.outcome import Outcome
from training.simulation.model.plan import Plan
from training.simulation.model.random_streams import DURATIONS, SAMPLES, origin

#: Steps that end within one part of a slice; with its polls they fill a share of a core's cache.
PER_PART = 512
#: The maximum length of a part, as a share of a mean step.
MAX_PART = 1 / 256
#: Completions between two returns from the compiled loop: about a second.
BUDGET = 1 << 22


class SlicedEngine:
    """One run of a re-polled, sampled barrier, which draws from probabilities instead of samples."""

    def __init__(self, plan: Plan, moments_s: Sequence[float] = (), *, keep_trace: bool = False) -> None:
        from training.simulation.engines.sliced_kernel import CHUNK, PARTS, SLICES

        self.plan = plan
        self._barrier = plan.made_barrier()
        self._moments_s = sorted(moments_s)
        self._keep_trace = keep_trace
        self.budget = min(BUDGET, max(1024, 4 * plan.nodes))
        self._per_s = max(plan.nodes / PER_PART, 1 / MAX_PART) / plan.steps.mean_s
        chunks = math.ceil(plan.nodes / CHUNK) + 2 * (SLICES + PARTS)
        self._store = filled((chunks * CHUNK, 8), np.uint64, 0)
        self._fills = filled((SLICES + PARTS,), np.int64, 0)
        self._newest = filled((SLICES + PARTS,), np.int32, -1)
        self._older = filled((chunks,), np.int32, -1)
        self._free = np.arange(-1, chunks, dtype=np.int32)
        self._free[0] = chunks
        self._levels = filled((1,), np.int64, plan.nodes)
        self._kept = filled((len(self._moments_s), 4), np.float64, 0)
        self._traces = tuple(filled((1,), kind, 0) for kind in (np.float64, np.int64, np.int64))
        self._totals = filled((5,), np.int64, 0)
        self._squares = filled((1,), np.float64, 0)
        # Every node has one event, so that a part has at most as many rows as there are nodes.
        self._make_line(min(8 * PER_PART, plan.nodes))

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Run to the end of the plan's duration."""
        from training.simulation.engines import sliced_kernel
        from training.simulation.engines.event_kernel import UPDATES

        plan = self.plan
        model, slowness = model_of(plan), slowness_of(plan)
        origins = np.array([origin(plan.seed, purpose) for purpose in (DURATIONS, SAMPLES)], np.uint64)
        places = (self._store, self._fills, self._newest, self._older)
        sliced_kernel.begin(
            filled((1, 8), np.uint64, 0), origins, *places, self._free, self._per_s, model, slowness, plan.nodes
        )
        queried = min(sample_size(plan.barrier.sample, plan.nodes), plan.nodes - (not plan.self_sampled))
        chances = laggard_chances(plan, queried)
        scalars = np.zeros(6, np.int64)
        answer = sliced_kernel.CONTINUE
        while answer != sliced_kernel.ENDED:
            highest = int(np.flatnonzero(self._levels)[-1])
            self._levels = lengthened(self._levels, highest + self.budget + 2)
            if self._keep_trace:
                size = int(self._totals[UPDATES]) + self.budget
                self._traces = tuple(lengthened(array, size) for array in self._traces)
            answer = sliced_kernel.advance(
                self.budget,
                scalars,
                self._line,
                self._behind,
                self._head,
                *places,
                self._free,
                self._levels,
                chances,
                float(plan.duration_s),
                model,
                slowness,
                self._barrier.staleness or 0,
                queried,
                float(plan.repoll_s),
                np.array(self._moments_s, np.float64),
                self._kept,
                self._traces,
                self._totals,
                self._squares,
                self._per_s,
                self._per_s * self._head.size,
            )
            if answer == sliced_kernel.LONGER:
                self._make_line(2 * int(scalars[sliced_kernel.NEEDED]))
            if progress is not None:
                progress(min(1.0, float(scalars[sliced_kernel.PART]) / (plan.duration_s * self._per_s)))
        steps = np.zeros(plan.nodes, np.int64)
        waited_s = np.zeros(plan.nodes, np.float64)
        line = (self._line, self._behind, self._head)
        sliced_kernel.collect(scalars, *line, *places, float(plan.duration_s), steps, waited_s)
        return made_outcome(
            plan, "grouped", steps, waited_s, self._totals, self._squares, self._moments_s, self._kept,
            self._traces if self._keep_trace else None,
        )  # fmt: skip

    def _make_line(self, rows: int) -> None:
        """Allocate rows for one part, and two buckets per row; called only between two parts."""
        self._line = filled((rows, 8), np.uint64, 0)
        self._behind = filled((rows,), np.int32, -1)
        self._head = filled((1 << math.ceil(math.log2(2 * rows)),), np.int32, -1)

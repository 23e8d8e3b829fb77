"""Runs the compiled kernels: allocates their arrays, extends those that grow, and collects the outcome.

`event_kernel` gives the reference engine's history. `grouped_kernel` gives its distribution, for event-driven samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from p2pnode.training.barriers.predicates import sample_size
from p2pnode.training.simulation.engines.reference import belief_factor
from p2pnode.training.simulation.model.outcome import Counts, Moment, Outcome, Seconds, Trace
from p2pnode.training.simulation.model.plan import DISCIPLINES, Plan
from p2pnode.training.simulation.model.random_streams import DURATIONS, POOLS, SAMPLES, mixed, origin
from p2pnode.training.simulation.model.samplers import REJECTION
from p2pnode.training.simulation.model.step_times import PARAMETERS

#: Completions between two returns from the compiled loop: about a second.
BUDGET = 1 << 20
PAGE = 4096


def can_group(plan: Plan) -> bool:
    """Whether blocked nodes draw how many of them pass: each has a fresh sample, of one size, at every completion."""
    is_one_size = plan.population_error == 0 or plan.barrier.sample > 0
    return plan.discipline == "event" and plan.barrier.method in ("pbsp", "pssp") and is_one_size


class CompiledEngine:
    """One run of the compiled engine."""

    def __init__(self, plan: Plan, moments_s: Sequence[float] = (), *, keep_trace: bool = False) -> None:
        self.plan = plan
        self._moments_s = sorted(moments_s)
        self._budget = min(BUDGET, max(1024, 4 * plan.nodes))
        self._keep_trace = keep_trace
        self._grouped = can_group(plan)
        nodes, barrier = plan.nodes, plan.made_barrier()
        self._barrier = barrier
        # A few events per bucket, and a cycle of buckets longer than most steps: tuned at 10³ and 10⁶ nodes.
        self._per_s = nodes / plan.steps.mean_s
        buckets = 1 << max(4, math.ceil(math.log2(4 * nodes)))
        # NumPy requests large pages; without them a million nodes spend their time on page-table misses.
        self._words = filled((nodes, 8), np.uint64, 0)
        self._steps = filled((nodes,), _step_type(plan), 0)
        self._head = filled((buckets,), np.int32, -1)
        self._levels = filled((1,), np.int64, nodes)
        self._waiting_levels = filled((1,), np.int64, 0)
        self._beta = _betas(plan)
        self._pools = self._made_pools()
        self._holds = self._made_holds()
        self._kept = filled((len(self._moments_s), 4), np.float64, 0)
        self._traces = tuple(filled((1,), kind, 0) for kind in (np.float64, np.int64, np.int64))
        self._totals = filled((5,), np.int64, 0)
        self._squares = filled((1,), np.float64, 0)

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Run to the end of the plan's duration."""
        from p2pnode.training.simulation.engines import event_kernel

        plan = self.plan
        model, slowness = model_of(plan), slowness_of(plan)
        origins = np.array([origin(plan.seed, purpose) for purpose in (DURATIONS, SAMPLES, POOLS)], np.uint64)
        pool, finding = self._pools[0], self._pools[3]
        event_kernel.begin(self._words, origins, pool, finding, self._head, self._per_s, model, slowness)
        scalars = np.zeros(5, np.int64)
        made = self._grouped_advance if self._grouped else self._advance
        advance = made(model, slowness)
        ended = False
        while not ended:
            self._make_room()
            ended = advance(scalars)
            if progress is not None:
                progress(min(1.0, float(scalars[0]) / (plan.duration_s * self._per_s)))
        return self._outcome(event_kernel.waited(self._words, float(plan.duration_s)))

    def _advance(self, model: tuple[Any, ...], slowness: tuple[Any, ...]) -> Callable[[Counts], bool]:
        from p2pnode.training.simulation.engines import event_kernel

        plan, barrier = self.plan, self._barrier

        def advance(scalars: Counts) -> bool:
            return bool(
                event_kernel.advance(
                    self._budget,
                    scalars,
                    self._words,
                    self._steps,
                    self._head,
                    self._levels,
                    float(plan.duration_s),
                    model,
                    slowness,
                    DISCIPLINES.index(plan.discipline),
                    barrier.complete,
                    barrier.samples,
                    barrier.staleness or 0,
                    float(barrier.quantile),
                    self._beta,
                    plan.self_sampled,
                    float(plan.repoll_s),
                    float(plan.pool_renewal_s) / plan.pool_size,
                    self._pools,
                    self._holds,
                    np.array(self._moments_s, np.float64),
                    self._kept,
                    self._traces,
                    self._totals,
                    self._squares,
                    self._per_s,
                )
            )

        return advance

    def _grouped_advance(self, model: tuple[Any, ...], slowness: tuple[Any, ...]) -> Callable[[Counts], bool]:
        from p2pnode.training.simulation.engines import grouped_kernel

        plan, barrier = self.plan, self._barrier
        queried = min(int(self._beta[0]), plan.nodes - (not plan.self_sampled))
        others = plan.nodes if plan.self_sampled else plan.nodes - 1
        chances = grouped_kernel.pass_chances(others, queried, float(barrier.quantile))
        stream = np.array([[mixed(origin(plan.seed, SAMPLES))]], np.uint64)
        blocked = filled((plan.nodes + 1,), np.int32, 0)

        def advance(scalars: Counts) -> bool:
            self._waiting_levels = lengthened(self._waiting_levels, self._levels.size)
            return bool(
                grouped_kernel.advance(
                    self._budget,
                    scalars,
                    self._words,
                    self._steps,
                    self._head,
                    self._levels,
                    self._waiting_levels,
                    blocked,
                    stream,
                    chances,
                    float(plan.duration_s),
                    model,
                    slowness,
                    barrier.staleness or 0,
                    queried,
                    np.array(self._moments_s, np.float64),
                    self._kept,
                    self._traces,
                    self._totals,
                    self._squares,
                    self._per_s,
                )
            )

        return advance

    def _made_pools(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Per node: its pool, the time of renewal, the oldest position, and its stream; one row if unused."""
        plan, barrier = self.plan, self._barrier
        used = plan.discipline == "pool" and barrier.samples and not barrier.complete
        used = used and plan.nodes - 1 > plan.pool_size
        rows, size = (plan.nodes, plan.pool_size) if used else (1, 1)
        if not used and plan.nodes == 1:
            rows = 2  # in a swarm of one node, one row would count as its pool
        return (
            filled((rows, size), np.int32, 0),
            filled((rows,), np.float64, 0),
            filled((rows,), np.int32, 0),
            filled((rows, 1), np.uint64, 0),
        )

    def _made_holds(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Held samples, lists of waiters, the queue of blocked nodes, and scratch space for drawing."""
        plan, barrier = self.plan, self._barrier
        is_notified = barrier.samples and plan.discipline in ("event", "hold")
        holding = is_notified and plan.discipline == "hold" and not barrier.complete
        beta = max(1, int(self._beta.max()))
        rows = plan.nodes if holding else 1
        drawn_from = plan.pool_size if self._pools[0].shape[0] == plan.nodes else plan.nodes
        shuffled = drawn_from if beta * REJECTION > drawn_from else 1
        return (
            filled((rows, beta if holding else 1), np.int32, 0),
            filled((rows,), np.int32, 0),
            filled((rows,), np.int32, -1),
            filled((rows,), np.int32, -1),
            filled((plan.nodes if is_notified else 1,), np.int32, 0),
            filled((beta,), np.int32, 0),
            np.arange(shuffled, dtype=np.int32),
            filled((shuffled,), np.int32, 0),
        )

    def _make_room(self) -> None:
        """Extend the arrays that grow for the completions of one more budget."""
        if self._barrier.complete or self._grouped:
            self._levels = lengthened(self._levels, int(self._steps.max()) + self._budget + 2)
        if self._keep_trace:
            size = int(self._totals[0]) + self._budget
            self._traces = tuple(lengthened(array, size) for array in self._traces)

    def _outcome(self, waited_s: Seconds) -> Outcome:
        updates, passes, tests, queries, gap_sum = (int(total) for total in self._totals)
        moments = tuple(
            Moment(now_s, float(row[0]), float(row[1]), int(row[2]), int(row[3]))
            for now_s, row in zip(self._moments_s, self._kept, strict=True)
        )
        times, nodes, gaps = self._traces
        return Outcome(
            plan=self.plan,
            engine="compiled",
            steps=self._steps.astype(np.int64),
            waited_s=waited_s,
            updates=updates,
            passes=passes,
            tests=tests,
            queries=queries,
            gap_sum=gap_sum,
            gap_squares=float(self._squares[0]),
            moments=moments,
            trace=Trace(times[:updates], nodes[:updates], gaps[:passes]) if self._keep_trace else None,
        )


def model_of(plan: Plan) -> tuple[Any, ...]:
    """Step times in the form of the kernels."""
    steps = plan.steps
    numbers = (float(steps.first), float(steps.second), float(steps.shift_s))
    return (list(PARAMETERS).index(steps.kind), *numbers, np.array(steps.trace_s or (0.0,), np.float64))


def slowness_of(plan: Plan) -> tuple[Any, ...]:
    """Stragglers in the form of the kernels."""
    slow = plan.stragglers
    return slow.count(plan.nodes), float(slow.share), float(slow.factor), slow.transient


def _step_type(plan: Plan) -> type[np.generic]:
    """16 bits if they suffice: samples read the steps of nodes all over the array, so its size matters."""
    return np.int16 if 4 * plan.duration_s / plan.steps.mean_s + 1000 < np.iinfo(np.int16).max else np.int32


def _betas(plan: Plan) -> np.ndarray[Any, Any]:
    """int32[nodes]: the sample size of each node, by its estimate of the population."""
    if plan.population_error == 0.0 or plan.barrier.sample > 0:
        return filled((plan.nodes,), np.int32, sample_size(plan.barrier.sample, plan.nodes))
    beliefs = (belief_factor(plan, node) * plan.nodes for node in range(plan.nodes))
    return np.array([sample_size(0, belief) for belief in beliefs], np.int32)


def lengthened(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """The array, extended with zeros to at least `size`; at least doubled, so that this is rare."""
    if array.size >= size:
        return array
    longer = filled((max(size, 2 * array.size),), array.dtype.type, 0)
    longer[: array.size] = array
    return longer


def filled(shape: tuple[int, ...], kind: type[np.generic], value: int) -> np.ndarray[Any, Any]:
    """A new page-aligned array, every page of it touched; a row of eight words is then one cache line."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    raw = np.empty(size + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    array: np.ndarray[Any, Any] = raw[start : start + size].view(kind).reshape(shape)
    array.fill(value)
    return array

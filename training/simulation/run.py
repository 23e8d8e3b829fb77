"""Simulate a plan: with the compiled engine where it can, with the reference engine where it must.

Both give the same history for the same seed, so that the choice is one of speed alone.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from training.barriers import sample_size
from training.simulation.engine import Engine, Observer, belief_factor
from training.simulation.outcome import Moment, Outcome, Seconds, Trace
from training.simulation.plan import DISCIPLINES, Plan
from training.simulation.samplers import REJECTION
from training.simulation.steptimes import PARAMETERS
from training.simulation.streams import DURATIONS, POOLS, SAMPLES, origin

EngineName = Literal["auto", "compiled", "reference"]


class NotCompiled(Exception):
    """The compiled engine was asked for and cannot run this plan; the message says why."""


def simulate(
    plan: Plan,
    *,
    engine: EngineName = "auto",
    moments_s: Sequence[float] = (),
    keep_trace: bool = False,
    observer: Observer | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run one plan. `progress` is called now and then with the share done, in [0, 1].

    Raises `NotCompiled`, and `BarrierNotFound` for a custom barrier that does not import.
    """
    reason = why_not_compiled(plan) if observer is None else "somebody watches its events"
    if engine == "compiled" and reason:
        raise NotCompiled(reason)
    if engine != "reference" and not reason:
        return Compiled(plan, moments_s, keep_trace=keep_trace).run(progress)
    return Engine(plan, moments_s=moments_s, keep_trace=keep_trace, observer=observer, progress=progress).run()


def has_numba() -> bool:
    """Whether numba is installed; it is not imported for that."""
    return importlib.util.find_spec("numba") is not None


def why_not_compiled(plan: Plan) -> str:
    """Why the compiled engine cannot run this plan; empty where it can."""
    if not has_numba():
        return "numba is not installed"
    if plan.barrier.method == "custom":
        return "a custom barrier is Python"
    if plan.churn.rate > 0 or plan.delay_s > 0:
        return "it knows neither churn nor message delay"
    if plan.sampler != "uniform":
        return "it samples uniformly only"
    if plan.discipline == "hold" and plan.barrier.quantile < 1.0 and plan.barrier.method in ("pbsp", "pssp"):
        return "held samples with a quantile wait for more than one peer"
    return ""


#: Completions between two looks up from the compiled loop: a second or so.
BUDGET = 1 << 20


class Compiled:
    """One run of the compiled engine: the arrays it works on, and the loop that feeds it."""

    def __init__(self, plan: Plan, moments_s: Sequence[float] = (), *, keep_trace: bool = False) -> None:
        self.plan = plan
        self._moments_s = sorted(moments_s)
        self._budget = min(BUDGET, max(1024, 4 * plan.nodes))
        self._keep_trace = keep_trace
        nodes, barrier = plan.nodes, plan.made_barrier()
        self._barrier = barrier
        # A few events per bucket, and a year of buckets longer than most steps: found by trial at 10³ and 10⁶ nodes.
        self._per_s = nodes / plan.steps.mean_s
        buckets = 1 << max(4, math.ceil(math.log2(4 * nodes)))
        # NumPy asks the system for large pages, without which a million nodes wait for page tables.
        self._words = _filled((nodes, 8), np.uint64, 0)
        self._steps = _filled((nodes,), np.int32, 0)
        self._head = _filled((buckets,), np.int32, -1)
        self._levels = _filled((1,), np.int64, nodes)
        self._beta = _betas(plan)
        self._pools = self._made_pools()
        self._holds = self._made_holds()
        self._kept = _filled((len(self._moments_s), 4), np.float64, 0)
        self._traces = tuple(_filled((1,), kind, 0) for kind in (np.float64, np.int64, np.int64))
        self._totals = _filled((5,), np.int64, 0)
        self._squares = _filled((1,), np.float64, 0)

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """To the end of the plan's duration."""
        from training.simulation import kernel

        plan, barrier = self.plan, self._barrier
        steps, slow = plan.steps, plan.stragglers
        model = (
            list(PARAMETERS).index(steps.kind),
            float(steps.first),
            float(steps.second),
            float(steps.shift_s),
            np.array(steps.trace_s or (0.0,), np.float64),
        )
        slowness = (slow.count(plan.nodes), float(slow.share), float(slow.factor), slow.transient)
        origins = np.array([origin(plan.seed, purpose) for purpose in (DURATIONS, SAMPLES, POOLS)], np.uint64)
        pool, finding = self._pools[0], self._pools[3]
        kernel.begin(self._words, origins, pool, finding, self._head, self._per_s, model, slowness)
        scalars = np.zeros(4, np.int64)
        ended = False
        while not ended:
            self._make_room()
            ended = kernel.advance(
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
            if progress is not None:
                progress(min(1.0, float(scalars[0]) / (plan.duration_s * self._per_s)))
        return self._outcome(kernel.waited(self._words, float(plan.duration_s)))

    def _made_pools(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Per node a row of its pool, when it was renewed, its oldest place, and its stream; one row where unused."""
        plan, barrier = self.plan, self._barrier
        used = plan.discipline == "pool" and barrier.samples and not barrier.complete
        used = used and plan.nodes - 1 > plan.pool_size
        rows, size = (plan.nodes, plan.pool_size) if used else (1, 1)
        if not used and plan.nodes == 1:
            rows = 2  # one row in a swarm of one would be taken for its pool
        return (
            _filled((rows, size), np.int32, 0),
            _filled((rows,), np.float64, 0),
            _filled((rows,), np.int32, 0),
            _filled((rows, 1), np.uint64, 0),
        )

    def _made_holds(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Held samples, who waits for whom, the queue of the blocked, and what drawing needs."""
        plan, barrier = self.plan, self._barrier
        told = barrier.samples and plan.discipline in ("event", "hold")
        holding = told and plan.discipline == "hold" and not barrier.complete
        beta = max(1, int(self._beta.max()))
        rows = plan.nodes if holding else 1
        drawn_from = plan.pool_size if self._pools[0].shape[0] == plan.nodes else plan.nodes
        shuffled = drawn_from if beta * REJECTION > drawn_from else 1
        return (
            _filled((rows, beta if holding else 1), np.int32, 0),
            _filled((rows,), np.int32, 0),
            _filled((rows,), np.int32, -1),
            _filled((rows,), np.int32, -1),
            _filled((plan.nodes if told else 1,), np.int32, 0),
            _filled((beta,), np.int32, 0),
            np.arange(shuffled, dtype=np.int32),
            _filled((shuffled,), np.int32, 0),
        )

    def _make_room(self) -> None:
        """For the completions of one more budget, in the arrays that grow."""
        if self._barrier.complete:
            self._levels = _lengthened(self._levels, int(self._steps.max()) + self._budget + 2)
        if self._keep_trace:
            size = int(self._totals[0]) + self._budget
            self._traces = tuple(_lengthened(array, size) for array in self._traces)

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


def _betas(plan: Plan) -> np.ndarray[Any, Any]:
    """int32[nodes]: the sample size of each node, by what it believes the population to be."""
    if plan.population_error == 0.0 or plan.barrier.sample > 0:
        return _filled((plan.nodes,), np.int32, sample_size(plan.barrier.sample, plan.nodes))
    beliefs = (belief_factor(plan, node) * plan.nodes for node in range(plan.nodes))
    return np.array([sample_size(0, belief) for belief in beliefs], np.int32)


def _lengthened(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """The array with zeros behind it up to at least `size`; doubled, so that this stays rare."""
    if array.size >= size:
        return array
    longer = _filled((max(size, 2 * array.size),), array.dtype.type, 0)
    longer[: array.size] = array
    return longer


def _filled(shape: tuple[int, ...], kind: type[np.generic], value: int) -> np.ndarray[Any, Any]:
    """A new array, every page of it touched."""
    array: np.ndarray[Any, Any] = np.empty(shape, kind)
    array.fill(value)
    return array

"""Simulate a plan: with the compiled engine where it can, with the reference engine where it must.

Both give the same history for the same seed, so that the choice is one of speed alone.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from training.barriers import sample_size
from training.simulation.engine import Engine, Observer, belief_factor
from training.simulation.outcome import Moment, Outcome, Trace
from training.simulation.plan import DISCIPLINES, Plan
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
    """Run one plan. `progress` is called with the share done, in [0, 1]: by the reference engine only, whose runs can be
    watched from within. Raises `NotCompiled`, and `BarrierNotFound` for a custom barrier that does not import."""
    reason = why_not_compiled(plan) if observer is None else "somebody watches its events"
    if engine == "compiled" and reason:
        raise NotCompiled(reason)
    if engine != "reference" and not reason:
        return _compiled(plan, moments_s, keep_trace, np.zeros(1, np.float64))
    return Engine(plan, moments_s=moments_s, keep_trace=keep_trace, observer=observer, progress=progress).run()


def simulate_watched(plan: Plan, shown: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Outcome:
    """As `simulate`, from another thread: `shown[0]` is the share done, and setting it below zero ends a compiled run
    at its next look. The compiled engine gives the interpreter back only at its end, so that it does not show much."""
    if why_not_compiled(plan):

        def progress(share: float) -> None:
            shown[0] = share

        return Engine(plan, progress=progress).run()
    return _compiled(plan, (), keep_trace=False, shown=shown)


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


def _compiled(
    plan: Plan, moments_s: Sequence[float], keep_trace: bool, shown: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Outcome:
    from training.simulation import kernel

    barrier = plan.made_barrier()
    steps, slow = plan.steps, plan.stragglers
    beta = np.array(
        [sample_size(plan.barrier.sample, belief_factor(plan, node) * plan.nodes) for node in range(plan.nodes)]
        if plan.population_error > 0 and plan.barrier.sample == 0
        else [sample_size(plan.barrier.sample, plan.nodes)] * plan.nodes,
        np.int32,
    )
    # About one event per bucket: polls are as frequent as steps are long, so both set the width of a bucket.
    buckets = 1 << max(4, math.ceil(math.log2(2 * plan.nodes)))
    per_s = 2.0 * plan.nodes / steps.mean_s
    raw = kernel.run(
        plan.nodes,
        float(plan.duration_s),
        (
            list(PARAMETERS).index(steps.kind),
            float(steps.first),
            float(steps.second),
            float(steps.shift_s),
            np.array(steps.trace_s or (0.0,), np.float64),
        ),
        (slow.count(plan.nodes), float(slow.share), float(slow.factor), slow.transient),
        DISCIPLINES.index(plan.discipline),
        barrier.complete,
        barrier.samples,
        barrier.staleness or 0,
        float(barrier.quantile),
        beta,
        plan.self_sampled,
        float(plan.repoll_s),
        plan.pool_size,
        float(plan.pool_renewal_s),
        np.array([origin(plan.seed, purpose) for purpose in (DURATIONS, SAMPLES, POOLS)], np.uint64),
        np.array(sorted(moments_s), np.float64),
        keep_trace,
        buckets,
        per_s,
        shown,
    )
    counts, waited_s, totals, gap_squares, kept, times, nodes, gaps = raw
    updates, passes, tests, queries, gap_sum = (int(total) for total in totals)
    moments = tuple(
        Moment(now_s, float(row[0]), float(row[1]), int(row[2]), int(row[3]))
        for now_s, row in zip(sorted(moments_s), kept, strict=True)
    )
    return Outcome(
        plan=plan,
        engine="compiled",
        steps=counts.astype(np.int64),
        waited_s=waited_s,
        updates=updates,
        passes=passes,
        tests=tests,
        queries=queries,
        gap_sum=gap_sum,
        gap_squares=float(gap_squares),
        moments=moments,
        trace=Trace(times, nodes, gaps) if keep_trace else None,
    )

"""Runs the compiled kernel: allocates its arrays, extends those that grow, and collects the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from p2pnode.training.barriers.predicates import sample_size
from p2pnode.training.simulation.outcome import Moment, Outcome, Trace, moment_of
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.random_streams import DURATIONS, POOLS, SAMPLES, initial_states
from p2pnode.training.simulation.reference import belief_factor
from p2pnode.training.simulation.samplers import REJECTION
from p2pnode.training.simulation.step_times import PARAMETERS

#: Completions between two extensions of the arrays that grow: about a second.
ROOM = 1 << 20
#: How often progress is reported.
REPORTS = 100

Array = np.ndarray[Any, Any]


class Swarm(NamedTuple):
    """The kernel's arrays, one entry per node where nothing else is said; those of unused features are short."""

    steps: Array
    is_blocked: Array
    completed_s: Array
    waited_s: Array
    last_pass: Array
    #: uint64[nodes, 3]: by purpose, DURATIONS to POOLS.
    streams: Array
    beta: Array
    #: The time of the pending event of a node; `heap` and `queue` list the nodes with one, and those that are blocked.
    at_s: Array
    heap: Array
    queue: Array
    #: Samples that are held, [nodes, β], and how many peers are in each.
    held: Array
    held_count: Array
    #: Known peers, [nodes, pool size], the time of their renewal, and the place of the oldest.
    pool: Array
    renewed_s: Array
    oldest: Array
    #: Scratch space of a draw.
    drawn: Array
    order: Array
    swaps: Array
    #: Nodes by number of completed steps.
    levels: Array
    totals: Array
    gap_squares: Array
    trace_s: Array
    trace_node: Array
    gaps: Array


class Rules(NamedTuple):
    """A plan in the form of the kernel."""

    kind: int
    first: float
    second: float
    shift_s: float
    trace_s: Array
    slow_count: int
    slow_share: float
    slow_factor: float
    transient: bool
    samples: bool
    #: The barrier looks at all nodes; else at a sample, which `holds` keeps and `pooled` draws from a pool.
    complete: bool
    holds: bool
    pooled: bool
    #: Every completion makes all blocked nodes test again. `tests_once`: that is counted as one test.
    is_notified: bool
    tests_once: bool
    lag: int
    quantile: float
    self_sampled: bool
    repoll_s: float
    every_s: float


def run_compiled(
    plan: Plan,
    *,
    moments_s: Sequence[float] = (),
    keep_trace: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """One run to the end of the plan's duration, as `ReferenceEngine.run`."""
    from p2pnode.training.simulation import kernel

    rules = _rules(plan)
    swarm = _swarm(plan, rules)
    kernel.begin(swarm, rules)
    reports = [(plan.duration_s * (number / REPORTS), False) for number in range(1, REPORTS + 1)]
    moments: list[Moment] = []
    for until_s, is_moment in sorted([*reports, *((moment_s, True) for moment_s in moments_s)]):
        is_done = False
        while not is_done:
            swarm = _with_room(swarm, rules, keep_trace)
            is_done = kernel.advance(min(until_s, plan.duration_s), ROOM, swarm, rules)
        if is_moment:
            moments.append(moment_of(until_s, swarm.steps))
        elif progress is not None:
            progress(until_s / plan.duration_s)
    updates, passes, tests, queries, gap_sum = (int(total) for total in swarm.totals[: kernel.LOWEST])
    trace = Trace(swarm.trace_s[:updates], swarm.trace_node[:updates], swarm.gaps[:passes]) if keep_trace else None
    return Outcome(
        plan=plan,
        engine="compiled",
        steps=swarm.steps.astype(np.int64),
        waited_s=swarm.waited_s + swarm.is_blocked * (plan.duration_s - swarm.completed_s),
        updates=updates,
        passes=passes,
        tests=tests,
        queries=queries,
        gap_sum=gap_sum,
        gap_squares=float(swarm.gap_squares[0]),
        moments=tuple(moments),
        trace=trace,
    )


def _rules(plan: Plan) -> Rules:
    barrier, times, slow = plan.made_barrier(), plan.steps, plan.stragglers
    is_sampled = barrier.samples and not barrier.complete
    return Rules(
        kind=list(PARAMETERS).index(times.kind),
        first=float(times.first),
        second=float(times.second),
        shift_s=float(times.shift_s),
        trace_s=np.array(times.trace_s or (0.0,), np.float64),
        slow_count=slow.count(plan.nodes),
        slow_share=float(slow.share),
        slow_factor=float(slow.factor),
        transient=slow.transient,
        samples=barrier.samples,
        complete=barrier.complete,
        holds=is_sampled and plan.discipline == "hold",
        pooled=is_sampled and plan.discipline == "pool" and plan.nodes - 1 > plan.pool_size,
        is_notified=barrier.samples and plan.discipline in ("event", "hold"),
        tests_once=plan.discipline == "hold",
        lag=barrier.staleness or 0,
        quantile=float(barrier.quantile),
        self_sampled=plan.self_sampled,
        repoll_s=float(plan.repoll_s),
        every_s=float(plan.pool_renewal_s) / plan.pool_size,
    )


def _swarm(plan: Plan, rules: Rules) -> Swarm:
    nodes, beta = plan.nodes, _betas(plan)
    most = max(1, int(beta.max()))
    drawn_from = plan.pool_size if rules.pooled else nodes
    shuffled = drawn_from if most * REJECTION > drawn_from else 0
    held_by, pool_of = (nodes if used else 0 for used in (rules.holds, rules.pooled))
    return Swarm(
        steps=np.zeros(nodes, np.int32),
        is_blocked=np.zeros(nodes, np.bool_),
        completed_s=np.zeros(nodes),
        waited_s=np.zeros(nodes),
        last_pass=np.zeros(nodes, np.int64),
        streams=np.stack([initial_states(plan.seed, purpose, nodes) for purpose in (DURATIONS, SAMPLES, POOLS)], 1),
        beta=beta,
        at_s=np.zeros(nodes),
        heap=np.zeros(nodes, np.int32),
        queue=np.zeros(nodes if rules.is_notified else 1, np.int32),
        held=np.zeros((held_by, most), np.int32),
        held_count=np.zeros(held_by, np.int32),
        pool=np.zeros((pool_of, plan.pool_size), np.int32),
        renewed_s=np.zeros(pool_of),
        oldest=np.zeros(pool_of, np.int32),
        drawn=np.zeros(most, np.int32),
        order=np.arange(shuffled, dtype=np.int32),
        swaps=np.zeros(shuffled, np.int32),
        levels=np.array([nodes], np.int64),
        totals=np.zeros(8, np.int64),
        gap_squares=np.zeros(1),
        trace_s=np.zeros(0),
        trace_node=np.zeros(0, np.int64),
        gaps=np.zeros(0, np.int64),
    )


def _betas(plan: Plan) -> Array:
    """int32[nodes]: the sample size of each node, by its estimate of the population."""
    if plan.population_error == 0.0 or plan.barrier.sample > 0:
        return np.full(plan.nodes, sample_size(plan.barrier.sample, plan.nodes), np.int32)
    beliefs = (belief_factor(plan, node) * plan.nodes for node in range(plan.nodes))
    return np.array([sample_size(0, belief) for belief in beliefs], np.int32)


def _with_room(swarm: Swarm, rules: Rules, keep_trace: bool) -> Swarm:
    """The swarm, with the arrays that grow extended for `ROOM` more completions."""
    wanted: dict[str, int] = {}
    if rules.complete:
        wanted["levels"] = int(swarm.steps.max()) + ROOM + 2
    if keep_trace:
        wanted |= dict.fromkeys(("trace_s", "trace_node", "gaps"), int(swarm.totals[0]) + ROOM)
    longer = {}
    for name, size in wanted.items():
        array: Array = getattr(swarm, name)
        if array.size < size:
            longer[name] = np.concatenate([array, np.zeros(max(size - array.size, array.size), array.dtype)])
    return swarm._replace(**longer) if longer else swarm

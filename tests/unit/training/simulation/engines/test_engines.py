"""The compiled engine is the reference engine, event by event; its arithmetic is that of the daemon's predicates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.barriers.test_predicates import pass_probability
from training.barriers.predicates import make_barrier
from training.settings import BarrierSettings
from training.simulation.engines.reference import ReferenceEngine
from training.simulation.model.outcome import Outcome
from training.simulation.model.plan import DISCIPLINES, Churn, Plan
from training.simulation.model.random_streams import Stream
from training.simulation.model.step_times import parse_step_times, parse_stragglers
from training.simulation.run import NotCompiled, simulate, why_not_compiled

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")

SEED = 3


def plan(method: str, nodes: int, sample: int, **changes: Any) -> Plan:
    """Twenty seconds of a small swarm; `changes` are fields of the plan, or texts of its step times and stragglers."""
    print(f"seed {SEED}")
    barrier = BarrierSettings(
        method=method,  # type: ignore[arg-type]
        sample=sample,
        staleness=changes.pop("staleness", 2),
        quantile=changes.pop("quantile", 1.0),
    )
    steps = parse_step_times(changes.pop("steps", "exp:1"))
    slow = parse_stragglers(changes.pop("slow", ""))
    usual: dict[str, Any] = {"duration_s": 20.0, "repoll_s": 0.1, "seed": SEED}
    return Plan(nodes=nodes, barrier=barrier, steps=steps, stragglers=slow, **(usual | changes))


SWARMS: list[dict[str, Any]] = [
    {"nodes": 20, "sample": 3},
    {"nodes": 40, "sample": 3, "slow": "20%x3"},
    {"nodes": 15, "sample": 14, "self_sampled": True},
    {"nodes": 30, "sample": 3, "quantile": 0.7, "steps": "gamma:0.5:2"},
    {"nodes": 60, "sample": 0, "population_error": 0.5, "slow": "10%x3,transient", "steps": "lognormal:0:0.4",
     "pool_size": 20, "pool_renewal_s": 3.0},
    {"nodes": 30, "sample": 4, "steps": "0.2+gamma:3:0.3", "pool_size": 10, "pool_renewal_s": 3.0},
    {"nodes": 1, "sample": 4, "steps": "constant:1"},
]  # fmt: skip


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("method", ["asp", "bsp", "ssp", "pbsp", "pssp"])
def test_the_compiled_history_is_the_reference_history(discipline: str, method: str) -> None:
    """Every completion happens at the same time on the same node, and every count is equal, for each kind of swarm."""
    compared = 0
    for swarm in SWARMS:
        one = plan(method, discipline=discipline, **swarm)
        if why_not_compiled(one):
            assert one.barrier.quantile < 1.0
            continue
        moments = (3.0, 7.0, 50.0)
        slow = simulate(one, engine="reference", keep_trace=True, moments_s=moments)
        fast = simulate(one, engine="compiled", keep_trace=True, moments_s=moments)

        assert_equal_runs(slow, fast)
        compared += 1
    assert compared >= len(SWARMS) - 1


def assert_equal_runs(one: Outcome, other: Outcome) -> None:
    assert one.trace is not None
    assert other.trace is not None
    np.testing.assert_array_equal(one.trace.completed_s, other.trace.completed_s)
    np.testing.assert_array_equal(one.trace.node, other.trace.node)
    np.testing.assert_array_equal(one.steps, other.steps)
    np.testing.assert_array_equal(one.waited_s, other.waited_s)
    assert sorted(one.trace.gaps) == sorted(other.trace.gaps)
    counts = [(run.updates, run.passes, run.tests, run.queries, run.gap_sum) for run in (one, other)]
    assert counts[0] == counts[1]
    for here, there in zip(one.moments, other.moments, strict=True):
        assert (here.now_s, here.least, here.most) == (there.now_s, there.least, there.most)
        assert math.isclose(here.mean, there.mean, abs_tol=1e-9)
        assert math.isclose(here.sd, there.sd, abs_tol=1e-6)


@given(
    mine=st.integers(0, 12),
    others=st.lists(st.integers(0, 12), max_size=7),
    staleness=st.integers(0, 6),
    quantile=st.sampled_from([0.1, 0.25, 0.28, 0.5, 0.75, 0.9, 1.0]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_compiled_predicate_is_the_shared_one(
    mine: int, others: list[int], staleness: int, quantile: float
) -> None:
    """Any steps, staleness and quantile: the compiled verdict equals that of `training.barriers.predicates`."""
    from training.simulation.engines import kernel_parts

    shared = make_barrier(BarrierSettings(method="pssp", sample=1, staleness=staleness, quantile=quantile))

    assert kernel_parts.passes(mine, np.array(others, np.int64), staleness, quantile) == shared.passes(mine, others)


def test_the_compiled_predicate_is_the_shared_one_on_every_small_case() -> None:
    """All steps 0…3 of up to three others, every staleness 0…2 and four quantiles."""
    from training.simulation.engines import kernel_parts

    for staleness, quantile in itertools.product((0, 1, 2), (0.3, 0.5, 0.67, 1.0)):
        shared = make_barrier(BarrierSettings(method="pssp", sample=1, staleness=staleness, quantile=quantile))
        for count in range(4):
            for others in itertools.product(range(4), repeat=count):
                for mine in range(4):
                    steps = np.array(others, np.int64)
                    assert kernel_parts.passes(mine, steps, staleness, quantile) == shared.passes(mine, others)


@pytest.mark.parametrize(
    ("method", "quantile", "others", "beta"), [("pbsp", 1.0, 30, 4), ("pssp", 0.75, 20, 8), ("pbsp", 0.5, 12, 12)]
)
def test_the_grouped_chance_is_that_of_the_shared_predicate(
    method: str, quantile: float, others: int, beta: int
) -> None:
    """For every number of laggards: the chance used for groups is the enumeration of samples through the predicate."""
    from training.simulation.engines import grouped_kernel

    shared = make_barrier(BarrierSettings(method=method, sample=beta, quantile=quantile))  # type: ignore[arg-type]
    chances = grouped_kernel.pass_chances(others, beta, quantile)

    for laggards in range(others + 1):
        assert math.isclose(chances[laggards], pass_probability(shared, others, laggards, beta), abs_tol=1e-12)


@pytest.mark.parametrize("discipline", ["event", "repoll"])
@pytest.mark.parametrize(("method", "quantile"), [("pbsp", 1.0), ("pssp", 1.0), ("pbsp", 0.6)])
def test_groups_have_the_distribution_of_single_draws(method: str, quantile: float, discipline: str) -> None:
    """Over forty seeds grouped and direct runs agree in mean steps, spread and tests within four standard errors."""
    base = plan(method, 60, 5, discipline=discipline, quantile=quantile, slow="10%x3", duration_s=30.0)
    figures: dict[str, list[tuple[float, float, float]]] = {"grouped": [], "compiled": []}
    for seed, engine in itertools.product(range(40), figures):
        run = simulate(replace(base, seed=seed), engine=engine)  # type: ignore[arg-type]
        figures[engine].append((float(run.steps.mean()), float(run.steps.std()), run.tests / run.updates))

    one, other = np.array(figures["grouped"]), np.array(figures["compiled"])
    error = np.sqrt(one.var(axis=0) / 40 + other.var(axis=0) / 40)
    assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) <= 4 * error).all()


def test_a_run_repeats_from_its_seed() -> None:
    """The same plan gives the same steps twice, another seed others."""
    one = plan("pssp", 50, 3)

    first, second = simulate(one), simulate(one)

    np.testing.assert_array_equal(first.steps, second.steps)
    assert not np.array_equal(first.steps, simulate(replace(one, seed=SEED + 1)).steps)


def test_the_barrier_does_not_change_how_long_a_step_takes() -> None:
    """Node and step alone decide a step's time: under asp and under bsp the first twelve of node 7 take as long."""
    stream = Stream(SEED, 0, 7)
    expected = [stream.exponential() for _ in range(12)]
    taken: list[float] = []
    began = {}

    class Watch:
        def started(self, now: float, node: int, step: int) -> None:
            began[node] = now

        def completed(self, now: float, node: int, step: int) -> None:
            if node == 7:
                taken.append(now - began[node])

    simulate(plan("bsp", 20, 0, discipline="event", duration_s=60.0), observer=Watch())

    np.testing.assert_allclose(taken[:12], expected)


def test_what_the_compiled_engine_cannot_do_is_refused_by_name() -> None:
    """Churn, delay, biased samples and custom barriers go to the reference engine, or are refused by name."""
    for changes in ({"churn": Churn(0.1)}, {"delay_s": 0.1}, {"sampler": "biased"}):
        one = plan("pssp", 10, 2, **changes)
        with pytest.raises(NotCompiled):
            simulate(one, engine="compiled")
        assert simulate(one).engine == "reference"


def test_a_custom_barrier_decides() -> None:
    """A custom function that never passes holds every node at its first step."""
    barrier = BarrierSettings(
        method="custom", custom="tests.unit.training.simulation.engines.test_engines:never", sample=2
    )

    run = simulate(Plan(nodes=5, barrier=barrier, duration_s=30.0, repoll_s=0.5))

    assert run.engine == "reference"
    assert (run.steps == 1).all()


def never(_mine: int, _others: list[int]) -> bool:
    return False


def test_delay_slows_a_barrier_by_its_round_trips() -> None:
    """With constant steps under bsp each step costs a round trip, and as much again where the first answer was no."""
    quick = plan("bsp", 8, 0, steps="constant:1", repoll_s=0.05, duration_s=100.0)

    assert int(simulate(quick).steps.min()) >= 95
    slowed = simulate(replace(quick, delay_s=0.25))
    assert 60 <= slowed.steps.mean() <= 100 / 1.5 + 1


def test_the_dead_hold_a_complete_barrier_until_they_are_found() -> None:
    """Under bsp deaths cost about their detection time; newcomers begin at the median and the swarm stays as large."""
    still = plan("bsp", 20, 0, duration_s=200.0, seed=5)
    quick = simulate(replace(still, churn=Churn(0.002, detection_s=1.0)))
    late = simulate(replace(still, churn=Churn(0.002, detection_s=10.0)))

    assert late.steps.size == quick.steps.size == 20
    assert late.steps.max() < quick.steps.max() < simulate(still).steps.max() + 1
    assert late.steps.max() - late.steps.min() <= 1


def test_a_biased_sampler_draws_the_wide_more_often() -> None:
    """The owner of a random id: of 200 nodes the most drawn is drawn at least three times as often as the mean."""
    engine = ReferenceEngine(plan("pssp", 200, 5, sampler="biased"))
    counts = np.zeros(200)
    for _ in range(4000):
        for peer in engine._sampler.draw(0, 5, 0.0, lambda _peer: False):
            counts[peer] += 1

    assert counts.max() > 3 * counts.mean()
    assert counts[0] == 0


def test_a_pool_that_is_renewed_slowly_holds_its_nodes_back() -> None:
    """A small, stale pool is a held sample: fewer steps than from a pool that is renewed at once."""
    base = plan("pbsp", 300, 5, discipline="pool", pool_size=10, duration_s=60.0)

    stale = simulate(replace(base, pool_renewal_s=1e6))
    fresh = simulate(replace(base, pool_renewal_s=0.05))

    assert stale.steps.mean() < 0.95 * fresh.steps.mean()


def test_without_numba_the_history_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is not installed the reference engine runs, and gives the same steps."""
    one = plan("pssp", 30, 3, discipline="pool")
    compiled = simulate(one)
    monkeypatch.setattr("training.simulation.run.has_numba", lambda: False)

    reference = simulate(one)

    assert (compiled.engine, reference.engine) == ("compiled", "reference")
    np.testing.assert_array_equal(compiled.steps, reference.steps)

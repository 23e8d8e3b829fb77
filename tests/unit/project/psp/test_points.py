"""The published numbers of steps within their tolerances; `p2pnode simulate reproduce all` has the full set."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from p2pnode.training.simulation.run import simulate
from tests.harness.runner.long_run import more
from tools.psp.checks import CHECKS
from tools.psp.points import Point, Verdict, compare, measure, plan_of, points, values_of

pytest.importorskip("numba", reason="a thousand nodes need the compiled engine: pip install p2pnode[simulate]")


#: Seeds of a large swarm; `simulate reproduce` takes more. Event-driven samples take seconds a run, and vary less.
MAX_SEEDS, EVENT_SEEDS = 4, 1


#: Left to `simulate reproduce`, because a run takes seconds.
SLOW_SERIES = ("every 0.1", "every 0.1 queries", "event", "event queries", "pssp(4,10) event queries")


@cache
def measured(figure: str) -> list[Verdict]:
    """The quick points of a figure, each over its seeds; over `MAX_SEEDS` where fewer seeds leave the tolerance."""
    wanted = [limit_seeds(point) for point in points() if point.figure == figure and is_quick(point)]
    print(f"{len(wanted)} points, seeds 1…")
    return compare(wanted, measure(wanted, processes=1))


def limit_seeds(point: Point) -> Point:
    if point.plan.nodes < 1000 or point.plan.stragglers.share > 0:
        return point
    is_event = point.plan.discipline == "event" and point.plan.barrier.method in ("pbsp", "pssp")
    return replace(point, seeds=min(point.seeds, EVENT_SEEDS if is_event else MAX_SEEDS))


def is_quick(point: Point) -> bool:
    if point.figure == "disciplines":
        return point.series not in SLOW_SERIES and point.x <= 16
    if point.figure == "doubling":
        return point.series == "bsp" or point.x in (250, 1000)
    return point.figure != "sample_size" or point.x in (1, 4, 16)


def test_every_published_value_is_listed() -> None:
    """291 of the 361 published values are numbers of steps and queries; a range is (lowest, highest)."""
    judged = [point for point in points() if point.tolerance > 0]

    assert len(judged) == 291
    assert all(0 < point.published[0] <= point.published[1] for point in judged)


@pytest.mark.parametrize(
    ("figure", "least"),
    [
        ("straggler_slowness", 36),
        ("stored", 25),
        *more(("sample_size", 3), ("straggler_share", 35), ("steps", 8), ("disciplines", 26)),
    ],
)
def test_the_golden_values_are_reproduced(figure: str, least: int) -> None:
    """Every value of the table is within its tolerance."""
    verdicts = measured(figure)
    for verdict in verdicts:
        print(f"{verdict.point.series} {verdict.point.x:g}: {verdict.point.published}, ours {verdict.ours:.2f}")

    assert len(verdicts) >= least
    assert [(v.point.series, v.point.x, v.point.published, v.ours) for v in verdicts if not v.within] == []


def test_a_wrong_lag_is_noticed() -> None:
    """The comparison is not vacuous: SSP with a lag of 4 does not pass for the figure that was made with 5."""
    right = next(p for p in points() if (p.figure, p.series) == ("steps", "ssp(5)"))
    wrong = limit_seeds(replace(right, plan=plan_of("ssp(4)", 1000, 400)))

    assert not compare([wrong], measure([wrong], processes=1))[0].within


def test_a_held_sample_costs_exactly_beta_queries() -> None:
    """Model H: queries per step equal β, whatever the size of the swarm."""
    for nodes, beta in ((100, 10), (1000, 4)):
        run = simulate(plan_of(f"pbsp({beta})", nodes, 30, "hold"))
        assert run.queries == beta * run.updates


@pytest.mark.parametrize("figure", ["straggler_slowness", *more("doubling")])
def test_the_claims_about_a_figure_hold(figure: str) -> None:
    """A few slow nodes stop BSP and held samples but not PSP; a larger swarm slows BSP but not pSSP."""
    verdicts = measured(figure)
    claims = [check for check in CHECKS if check.figure == figure]

    assert claims
    assert [claim.text for claim in claims if not claim.holds(values_of(verdicts))] == []
    assert all(verdict.within for verdict in verdicts if verdict.point.tolerance > 0)


def test_more_sampling_means_fewer_and_closer_steps() -> None:
    """Event-driven pBSP: mean and standard deviation strictly fall as β grows; asp is β = 0."""
    runs = [simulate(plan_of(name, 1000, 100)) for name in ("asp", "pbsp(2)", "pbsp(8)")]
    means, spreads = [run.steps.mean() for run in runs], [run.steps.std() for run in runs]

    assert means == sorted(means, reverse=True)
    assert spreads == sorted(spreads, reverse=True)

"""The golden tables of the PSP reference within their tolerances; the full set is `p2pnode simulate reproduce all`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from training.simulation.figures import published
from training.simulation.figures.points import Point, Verdict, compare, measure, plan_of, points
from training.simulation.model import bounds
from training.simulation.model.barrier_names import parse_barrier
from training.simulation.run import simulate

pytest.importorskip("numba", reason="a thousand nodes need the compiled engine: pip install p2pnode[simulate]")

#: Seeds of a large swarm; `simulate reproduce` takes more.
MAX_SEEDS = 4
#: Left to `simulate reproduce`, because a run takes seconds.
SLOW_SERIES = ("every 0.1", "every 0.1 queries", "event", "event queries", "pssp(4,10) event queries")


@cache
def measured(figure: str) -> list[Verdict]:
    """The quick points of a figure, each over its seeds; over `MAX_SEEDS` where fewer seeds leave the tolerance."""
    wanted = [limit_seeds(point) for point in points() if point.figure == figure and is_quick(point)]
    print(f"{len(wanted)} points, seeds 1…")
    return compare(wanted, measure(wanted, processes=1))


def limit_seeds(point: Point) -> Point:
    widens = point.plan.nodes < 1000 or point.plan.stragglers.share > 0
    return point if widens else replace(point, seeds=min(point.seeds, MAX_SEEDS))


def is_quick(point: Point) -> bool:
    if point.figure == "disciplines":
        return point.series not in SLOW_SERIES and point.x <= 16
    if point.figure == "doubling":
        return point.series == "bsp" or point.x in (250, 1000)
    return point.figure != "sample_size" or point.x in (1, 4, 16)


def value(verdicts: list[Verdict], series: str, x: float) -> float:
    return next(v.ours for v in verdicts if (v.point.series, v.point.x) == (series, x))


@pytest.mark.parametrize(
    ("figure", "least"),
    [
        ("steps", 8),
        ("sample_size", 3),
        ("disciplines", 26),
        ("straggler_share", 35),
        ("straggler_slowness", 36),
        ("stored", 25),
    ],
)
def test_the_golden_values_are_reproduced(figure: str, least: int) -> None:
    """Every value of the table lies within its tolerance."""
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


def test_a_few_slow_nodes_stop_bsp_and_held_samples_but_not_psp() -> None:
    """P = 100, 5 % slow ×4 to ×10: event-driven pBSP(10) keeps 87 %, BSP and held pBSP(10) at most 60 %."""
    verdicts = measured("straggler_slowness")
    for factor in (4, 6, 8, 10):
        kept = {
            series: value(verdicts, series, factor) / value(verdicts, series, 1)
            for series in ("pbsp(10)", "bsp", "pbsp(10) held")
        }
        assert kept["pbsp(10)"] >= 0.87
        assert kept["bsp"] <= 0.60
        assert kept["pbsp(10) held"] <= 0.60


def test_a_larger_swarm_does_not_slow_pssp_but_bsp() -> None:
    """From 250 to 1,000 nodes pSSP(4,10), re-polled, changes by less than 3 %; BSP falls as T/H_N within 6 %."""
    verdicts = measured("doubling")
    small, large = value(verdicts, "pssp(4,10)", 250), value(verdicts, "pssp(4,10)", 1000)

    assert abs(large / small - 1) < 0.03
    for verdict in verdicts:
        assert verdict.within or verdict.point.series != "bsp"
    assert value(verdicts, "bsp", 1000) < 0.87 * value(verdicts, "bsp", 250)


def test_more_sampling_means_fewer_and_closer_steps() -> None:
    """Event-driven pBSP: mean and standard deviation strictly fall as β doubles; asp is β = 0."""
    runs = [simulate(plan_of(name, 1000, 100)) for name in ("asp", *(f"pbsp({beta})" for beta in (1, 2, 4, 8, 16, 32)))]
    means, spreads = [run.steps.mean() for run in runs], [run.steps.std() for run in runs]

    # At β = 1 and T = 100 asp's mean is within its own noise of pBSP(1)'s: asp is compared with β = 2.
    assert means[0] > means[2] > means[3] > means[4] > means[5] > means[6]
    assert means[1] > means[2]
    assert spreads == sorted(spreads, reverse=True)


def test_pbsp_of_no_sample_is_asp() -> None:
    """β = 0 looks at nobody: the shared predicate passes on an empty sample, as asp does."""
    from training.barriers.predicates import make_barrier

    for mine in range(50):
        assert make_barrier(parse_barrier("pbsp(1)")).passes(mine, [])


@pytest.mark.parametrize("beta", published.BOUNDS)
def test_the_bounds_have_their_golden_values(beta: int) -> None:
    """Both bounds, r = 4, T = 10 000: minima, where they lie, and values at fixed a, to 10⁻³."""
    least_1, at_1, least_2, at_2, *fixed = published.BOUNDS[beta]
    found_1, where_1 = bounds.lowest(bounds.mean_bound, beta, 4, 10_000)
    found_2, where_2 = bounds.lowest(bounds.square_bound, beta, 4, 10_000)
    values = [bounds.mean_bound(a, bounds.share_within(a, beta), 4, 10_000) for a in (0.2, 0.5, 0.8)]
    values += [bounds.square_bound(a, bounds.share_within(a, beta), 4, 10_000) for a in (0.2, 0.5)]

    expected = [least_1, at_1, least_2, at_2, *fixed]
    for ours, theirs in zip([found_1, where_1, found_2, where_2, *values], expected, strict=True):
        assert math.isclose(ours, theirs, abs_tol=published.BOUNDS_TOLERANCE)


def test_the_bounds_hold_for_the_law_of_lags() -> None:
    """On random laws (r < 12, β < 64) the mean and the mean square of the implied lag stay below the bounds."""
    import numpy as np

    generator = np.random.default_rng(7)
    print("seed 7")
    for _ in range(300):
        r, beta, length = int(generator.integers(0, 12)), int(generator.integers(1, 64)), 400
        f = generator.random(r + 1) * generator.random()
        f /= max(1.0, f.sum() / 0.98)
        share = float(f.sum())
        a = share**beta
        law = bounds.lag_law(f, a, r, length)
        lags = np.arange(law.size)

        assert math.isclose(law.sum(), 1.0, rel_tol=1e-9)
        assert (law * lags).sum() <= bounds.mean_bound(a, share, r, length) + 1e-9
        assert (law * lags**2).sum() <= bounds.square_bound(a, share, r, length) + 1e-9

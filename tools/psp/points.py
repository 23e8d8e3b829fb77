"""The runs behind every published number of steps: a `Point` is a plan, its seeds, and the value it should give.

`points` reads them from `published.csv`, `measure` runs them, one process per core, and `compare` applies the
tolerances. Claims about order and shape are in `checks`. The values have two sources (`docs/psp.md`): figures of the
PSP chapter that were digitised, and simulations of the models it states, with several seeds: `low` and `high` are the
extremes over those. Complete barriers have one global clock and vary more than sampled ones, which average over nodes:
they run with more seeds, and so do held samples, in which each node waits for others that wait.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import resources
from multiprocessing import get_context

from p2pnode.training.simulation.outcome import summary
from p2pnode.training.simulation.plan import Discipline, Plan, parse_barrier
from p2pnode.training.simulation.run import simulate
from p2pnode.training.simulation.step_times import parse_step_times, parse_stragglers

#: Seeds behind a published mean.
SEEDS_THERE = 3

Range = tuple[float, float]
Values = dict[tuple[str, str, float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a figure, `series` at `x`; `quantity` is a key of `metrics.summary`.

    `tolerance` is relative; 0: there is no published value, and ours is only shown.
    """

    figure: str
    series: str
    x: float
    plan: Plan
    published: Range
    tolerance: float
    seeds: int
    quantity: str = "mean_steps"
    digitised: float | None = None

    def plans(self) -> list[Plan]:
        """One plan per seed."""
        return [replace(self.plan, seed=seed) for seed in range(1, self.seeds + 1)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A measured point: mean and standard deviation over its seeds, and the relative tolerance allowed."""

    point: Point
    ours: float
    sd: float
    tolerance: float

    @property
    def within(self) -> bool:
        low, high = self.point.published
        return low * (1 - self.tolerance) <= self.ours <= high * (1 + self.tolerance)


def plan_of(
    barrier: str, nodes: int, duration_s: float, how: str = "event", *, steps: str = "exp:1", slow: str = ""
) -> Plan:
    """A plan as published: no delay, and a node may sample itself. `how` is a discipline, or the re-poll interval."""
    disciplines: dict[str, Discipline] = {"event": "event", "hold": "hold"}
    discipline = disciplines.get(how, "repoll")
    return Plan(
        nodes=nodes,
        barrier=parse_barrier(barrier),
        duration_s=duration_s,
        steps=parse_step_times(steps),
        stragglers=parse_stragglers(slow),
        discipline=discipline,
        repoll_s=float(how) if discipline == "repoll" else 1.0,
        self_sampled=True,
    )


def points() -> list[Point]:
    """Every published number of steps and of queries, as `published.csv` lists them."""
    text = resources.files(__package__).joinpath("published.csv").read_text("utf-8")
    return [_point(row) for row in csv.DictReader(text.splitlines())]


def _point(row: Mapping[str, str]) -> Point:
    plan = plan_of(
        row["barrier"],
        int(row["nodes"]),
        float(row["duration_s"]),
        row["how"],
        steps=row["steps"],
        slow=row["slow"],
    )
    return Point(
        figure=row["figure"],
        series=row["series"],
        x=float(row["x"]),
        plan=plan,
        published=(float(row["low"] or 0), float(row["high"] or 0)),
        tolerance=float(row["tolerance"] or 0),
        seeds=int(row["seeds"]),
        quantity=row["quantity"],
        digitised=float(row["digitised"]) if row["digitised"] else None,
    )


def measure(
    wanted: Sequence[Point], *, processes: int, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> dict[Plan, dict[str, float]]:
    """Run every plan of these points once; with one process, in this one."""
    plans = list(dict.fromkeys(plan for point in wanted for plan in point.plans()))
    # Longest first: event-driven runs and many nodes.
    plans.sort(key=lambda plan: -plan.nodes * plan.duration_s * (10 if plan.discipline == "event" else 5))
    found: dict[Plan, dict[str, float]] = {}
    if processes <= 1:
        for plan in plans:
            found[plan] = figures_of(plan)
            progress(len(found), len(plans))
        return found
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(figures_of, plan): plan for plan in plans}
        for future in as_completed(waiting):
            found[waiting[future]] = future.result()
            progress(len(found), len(plans))
    return found


def figures_of(plan: Plan) -> dict[str, float]:
    """The summary of one run, numbers only."""
    figures = summary(simulate(plan))
    percentiles = figures.pop("percentiles")
    figures.pop("engine")
    return {**figures, **{f"p{name}": value for name, value in percentiles.items()}}


def compare(wanted: Sequence[Point], runs: dict[Plan, dict[str, float]]) -> list[Verdict]:
    """Compare each point with its published value. For small swarms the tolerance is at least three standard errors."""
    verdicts = []
    for point in wanted:
        values = [runs[plan][point.quantity] for plan in point.plans()]
        ours = statistics.fmean(values)
        sd = statistics.stdev(values) if len(values) > 1 else 0.0
        error = sd * (1 / SEEDS_THERE + 1 / len(values)) ** 0.5 / max(abs(ours), 1e-12)
        small = point.plan.nodes < 1000 or bool(point.plan.stragglers.share)
        tolerance = max(point.tolerance, 3 * error) if small and point.tolerance > 0 else point.tolerance
        verdicts.append(Verdict(point, ours, sd, tolerance))
    return verdicts


def values_of(verdicts: Sequence[Verdict]) -> Values:
    """Our value by figure, series and x."""
    return {(v.point.figure, v.point.series, v.point.x): v.ours for v in verdicts}

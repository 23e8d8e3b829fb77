"""The runs behind every published number of steps: a `Point` is a plan, its seeds, and the value it should give.

`points` lists them all, `measure` runs them, one process per core, and `compare` applies the tolerances. Claims about
order and shape are in `checks`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.figures.published import Range
from p2pnode.training.simulation.model.barrier_names import parse_barrier
from p2pnode.training.simulation.model.metrics import summary
from p2pnode.training.simulation.model.plan import Discipline, Plan
from p2pnode.training.simulation.model.step_times import parse_step_times, parse_stragglers
from p2pnode.training.simulation.run import simulate

#: Runs per point. Complete barriers have one global clock and vary more; sampled ones average over nodes.
SEEDS_SAMPLED, SEEDS_SMALL, SEEDS_COMPLETE = 2, 4, 12

Values = dict[tuple[str, str, float], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a figure, `series` at `x`; `quantity` is a key of `metrics.summary`."""

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
    """Every published number of steps and of queries."""
    return [
        *_steps(),
        *_sample_size(),
        *_disciplines(),
        *_text_run(),
        *_stragglers(),
        *_scale(),
        *_doubling(),
        *_stored(),
    ]


def _point(
    figure: str,
    series: str,
    x: float,
    plan: Plan,
    value: Range | float,
    *,
    digitised: float | None = None,
    quantity: str = "mean_steps",
    tolerance: float | None = None,
) -> Point:
    method = plan.barrier.method
    complete, small = method in ("bsp", "ssp"), plan.nodes < 1000
    if tolerance is None:
        if complete:
            tolerance = published.COMPLETE
        elif method == "asp":
            tolerance = published.SMALL_SWARM if small or plan.stragglers.share else published.ASP
        elif plan.discipline != "event":
            tolerance = published.HELD_OR_POLLED
        else:
            tolerance = published.SMALL_SWARM if small else published.SAMPLED_EVENT
    seeds = SEEDS_COMPLETE if complete else SEEDS_SMALL if small else SEEDS_SAMPLED
    if plan.discipline == "hold":
        seeds = SEEDS_COMPLETE  # held samples chain: each node waits for others that wait, nearly a global clock
    span = value if isinstance(value, tuple) else (value, value)
    return Point(figure, series, x, plan, span, tolerance, seeds, quantity, digitised)


def _steps() -> Iterable[Point]:
    for name, (digitised, value) in published.STEPS.items():
        yield _point("steps", name, 0, plan_of(name, 1000, 400), value, digitised=digitised)
    asp = plan_of("asp", 1000, 400)
    yield _point("steps", "asp sd", 0, asp, 20.0, quantity="sd_steps", tolerance=published.ASP_SD)


def _sample_size() -> Iterable[Point]:
    for beta, (digitised, value) in published.SAMPLE_SIZE.items():
        name = f"pbsp({beta})" if beta else "asp"  # β = 0 is asp by definition
        yield _point("sample_size", "pbsp", beta, plan_of(name, 1000, 400), value, digitised=digitised)


def _disciplines() -> Iterable[Point]:
    rows = [(f"pbsp({beta})", beta, row) for beta, row in published.DISCIPLINE.items()]
    for name, beta, row in [*rows, ("pssp(4,10)", 10, published.DISCIPLINE_PSSP)]:
        for how, (value, queries) in row.items():
            series = how if how in ("hold", "event") else f"every {how}"
            series = f"pssp(4,10) {series}" if name.startswith("pssp") else series
            plan = plan_of(name, 1000, 400, how)
            yield _point("disciplines", series, beta, plan, value)
            # The published numbers have two digits; a held sample costs exactly β queries.
            half_digit = 0.05 if queries < 5 else 0.5
            tolerance = 0.0025 if how == "hold" else max(published.HELD_OR_POLLED, half_digit / queries)
            yield _point(
                "disciplines",
                f"{series} queries",
                beta,
                plan,
                queries,
                quantity="queries_per_step",
                tolerance=tolerance,
            )


def _text_run() -> Iterable[Point]:
    def plan(name: str, how: str, nodes: int = 200, slow: str = "") -> Plan:
        return plan_of(name, nodes, 200, how, steps="1+exp:1", slow=slow)

    for name, row in published.TEXT_RUN.items():
        for how, value in row.items():
            yield _point("text_run", f"{name} {how}", 0, plan(name, how), value)
    for how, sweep in published.TEXT_RUN_BETA.items():
        for beta, mean in sweep.items():
            yield _point("text_run", f"pbsp by β, {how}", beta, plan(f"pbsp({beta})", how), mean)
    for seconds, mean in published.TEXT_RUN_POLL.items():
        yield _point("text_run", "pbsp(10) by poll interval", seconds, plan("pbsp(10)", f"{seconds:g}"), mean)
    for share, values in published.TEXT_RUN_SLOW.items():
        for series, mean in values.items():
            name, _, how = series.partition(" ")
            yield _point("text_run", f"{series}, {share} % slow ×4", share, plan(name, how, slow=f"{share}%x4"), mean)
    for series, mean in published.TEXT_RUN_LARGE.items():
        name, _, how = series.partition(" ")
        yield _point("text_run", f"{series}, P = 1000", 1000, plan(name, how, nodes=1000), mean)


def _series_plan(series: str) -> tuple[str, str]:
    name, _, held = series.partition(" ")
    return name, "hold" if held else "event"


def _stragglers() -> Iterable[Point]:
    for series, values in published.STRAGGLER_SHARE.items():
        name, how = _series_plan(series)
        for share, value in zip(published.SHARES, values, strict=True):
            yield _point("straggler_share", series, share, plan_of(name, 100, 200, how, slow=f"{share}%x3"), value)
    for series, values in published.STRAGGLER_FACTOR.items():
        name, how = _series_plan(series)
        for factor, value in zip(published.FACTORS, values, strict=True):
            yield _point("straggler_slowness", series, factor, plan_of(name, 100, 200, how, slow=f"5%x{factor}"), value)
    for name, values in published.LARGE_STRAGGLER_SHARE.items():
        for share, value in zip(published.LARGE_SHARES, values, strict=True):
            yield _point("straggler_share_1000", name, share, plan_of(name, 1000, 400, slow=f"{share}%x4"), value)


def _scale() -> Iterable[Point]:
    for series, values in published.SCALE.items():
        for nodes, value in zip(published.SIZES, values, strict=True):
            name = f"pbsp({nodes // 100})" if series == "pbsp(1%)" else series
            yield _point("scale", series, nodes, plan_of(name, nodes, 400), value)
    for nodes in published.SIZES:
        yield _point("scale", "pbsp(10) held, T = 100", nodes, plan_of("pbsp(10)", nodes, 100, "hold"), (24.0, 27.0))


def _doubling() -> Iterable[Point]:
    """Doubling P: bsp should follow its law T/H_N; pSSP has no published value and is only measured."""
    for nodes in (125, 250, 500, 1000):
        harmonic = sum(1.0 / number for number in range(1, nodes + 1))
        yield _point("doubling", "bsp", nodes, plan_of("bsp", nodes, 400), 400 / harmonic)
        plan = plan_of("pssp(4,10)", nodes, 400, "0.1")
        yield Point("doubling", "pssp(4,10)", nodes, plan, (0.0, 400.0), 0.0, SEEDS_SMALL)


def _stored() -> Iterable[Point]:
    for name, (_stored_by_ninox, values) in published.STORED.items():
        for place, share in enumerate(published.SHARES):
            plan = plan_of(name, 60, 100, slow=f"{share}%x4,transient")
            yield _point("stored", name, share, plan, values[place], digitised=_stored_by_ninox[place])


# -- running ----------------------------------------------------------------------------------------------------------


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
        error = sd * (1 / published.SEEDS_THERE + 1 / len(values)) ** 0.5 / max(abs(ours), 1e-12)
        small = point.plan.nodes < 1000 or bool(point.plan.stragglers.share)
        tolerance = max(point.tolerance, 3 * error) if small and point.tolerance > 0 else point.tolerance
        verdicts.append(Verdict(point, ours, sd, tolerance))
    return verdicts


def values_of(verdicts: Sequence[Verdict]) -> Values:
    """Our value by figure, series and x."""
    return {(v.point.figure, v.point.series, v.point.x): v.ours for v in verdicts}

"""Figures of the order in which updates are applied: its inconsistency as measured, and the bounds on its lag.

Definitions are in `training.simulation.model.metrics` and `bounds`, the published values in `published`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.figures.plots import Line, Panel, draw
from p2pnode.training.simulation.figures.studies import run_sequence
from p2pnode.training.simulation.figures.tables import ReproductionRequest, Row, order_row, write_csv
from p2pnode.training.simulation.model import bounds

#: The barriers whose update sequences the simulator Ninox (`docs/psp.md`) drew.
SEQUENCES = ("asp", "ssp(4)", "pbsp(5)", "pbsp(10)", "pssp(4,5)", "pssp(4,10)")


def inconsistency_rows(request: ReproductionRequest) -> list[Row]:
    """Sequence and progress inconsistency of the six runs."""
    runs = [run_sequence(name) for name in SEQUENCES]
    prefix = Panel("Sequence inconsistency", "length of the prefix", "elements per node")
    density = Panel("Progress inconsistency", "steps of the swarm between two passes, per node", "density")
    table: list[tuple[Any, ...]] = []
    for run in runs:
        stride = max(1, run.prefix.size // 500)
        lengths = np.arange(1, run.prefix.size + 1)[::stride]
        prefix.lines.append(Line(run.name, lengths.tolist(), run.prefix[::stride].tolist()))
        counts, edges = np.histogram(run.passes, bins=60, range=(0, 6), density=True)
        density.lines.append(Line(run.name, ((edges[1:] + edges[:-1]) / 2).tolist(), counts.tolist()))
        table += [(run.name, "prefix", int(length), round(float(value), 4))
                  for length, value in zip(lengths, run.prefix[::stride], strict=True)]  # fmt: skip
        for quantity, value in _pass_moments(run.passes).items():
            table.append((run.name, f"pass {quantity}", "", round(value, 4)))
    write_csv(request.folder / "inconsistency.csv", ("barrier", "quantity", "length", "value"), table)
    draw([prefix, density], request.folder / "inconsistency.png", "P = 100, T = 100, event-driven")
    last = {run.name: float(run.prefix[-run.prefix.size // 5 :].mean()) for run in runs}
    spread = {run.name: float(run.passes.std()) for run in runs}
    rows = [
        Row("inconsistency", f"{name}: sequence, last fifth; spread of passes", "",
            f"{last[name]:.2f}; {spread[name]:.2f}", "", None)
        for name in SEQUENCES
    ]  # fmt: skip
    is_in_order = last["asp"] > last["pssp(4,5)"] > last["pssp(4,10)"] > last["pbsp(5)"] > last["pbsp(10)"]
    claim = "sequence: ASP > pSSP(4,5) > pSSP(4,10) > pBSP(5) > pBSP(10)"
    return [*rows, order_row("inconsistency", claim, holds=is_in_order)]


def _pass_moments(passes: Any) -> dict[str, float]:
    """Mean, standard deviation, skew and kurtosis, as the source tabulates them."""
    mean, sd = float(passes.mean()), float(passes.std())
    scaled = (passes - mean) / max(sd, 1e-12)
    return {"mean": mean, "sd": sd, "skew": float((scaled**3).mean()), "kurtosis": float((scaled**4).mean())}


def bound_rows(request: ReproductionRequest) -> list[Row]:
    """The bounds on mean and mean square of the lag, beside their published values."""
    rows, table = [], []
    r, length = 4, 10_000
    panels = [Panel(f"Bound on the mean{what} lag", "a = F(r)^β", "bound") for what in ("", " square of the")]
    grid = [number / 200 for number in range(4, 181)]
    for beta, published_values in published.BOUNDS.items():
        least_1, at_1 = bounds.lowest(bounds.mean_bound, beta, r, length)
        least_2, at_2 = bounds.lowest(bounds.square_bound, beta, r, length)
        fixed = [bounds.mean_bound(a, bounds.share_within(a, beta), r, length) for a in (0.2, 0.5, 0.8)]
        fixed += [bounds.square_bound(a, bounds.share_within(a, beta), r, length) for a in (0.2, 0.5)]
        names = ("min B1", "at a", "min B2", "at a", "B1(.2)", "B1(.5)", "B1(.8)", "B2(.2)", "B2(.5)")
        for name, theirs, ours in zip(names, published_values, (least_1, at_1, least_2, at_2, *fixed), strict=True):
            is_within = abs(theirs - ours) <= published.BOUNDS_TOLERANCE
            rows.append(Row("bounds", f"{name}, β = {beta}", f"{theirs:g}", f"{ours:.3f}", "0.001", is_within))
            table.append((beta, name, theirs, round(ours, 5), is_within))
        for panel, bound in zip(panels, (bounds.mean_bound, bounds.square_bound), strict=True):
            y = [bound(a, bounds.share_within(a, beta), r, length) for a in grid]
            panel.lines.append(Line(f"β = {beta}", grid, [min(value, 150.0) for value in y]))
    write_csv(request.folder / "bounds.csv", ("beta", "quantity", "published", "ours", "within"), table)
    draw(panels, request.folder / "bounds.png", f"r = {r}, T = {length}")
    return rows

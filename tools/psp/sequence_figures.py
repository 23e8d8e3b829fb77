"""Figures of the order in which updates are applied: its inconsistency as measured, and the bounds on its lag.

The inconsistencies are defined in `training.simulation.outcome`. The bounds are equations 1 to 3 of the PSP
chapter (`docs/psp.md`): `r` is the staleness, `T` the length of the update sequence, and γ_t the lag between the true
and the noisy sequence at update t. `F(r)` is the share of peers at most r steps behind, and `a = F(r)^β` the
probability that a whole sample is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.simulation.outcome import Trace
from p2pnode.training.simulation.plots import Line, Panel, draw
from p2pnode.training.simulation.run import simulate
from tools.psp.points import plan_of
from tools.psp.tables import ReproductionRequest, Row, order_row, write_csv

#: The barriers whose update sequences the simulator Ninox (`docs/psp.md`) drew.
SEQUENCES = ("asp", "ssp(4)", "pbsp(5)", "pbsp(10)", "pssp(4,5)", "pssp(4,10)")
#: The experiments `exp_seqdiff` and `exp_frontier` of Ninox.
SEQUENCE_NODES = 100
#: Bounds, r = 4, T = 10,000: β → least B1 and its a, least B2 and its a, B1(.2), B1(.5), B1(.8), B2(.2), B2(.5).
BOUNDS: dict[int, tuple[float, ...]] = {
    1: (14.664, 0.505, 62.251, 0.368, 26.389, 14.667, 27.083, 84.028, 73.333),
    2: (12.709, 0.445, 48.575, 0.313, 17.032, 12.887, 26.561, 54.234, 64.437),
    4: (11.393, 0.387, 40.202, 0.259, 12.925, 11.951, 26.285, 41.157, 59.753),
    8: (10.571, 0.336, 35.383, 0.213, 11.121, 11.476, 26.144, 35.413, 57.381),
    16: (10.083, 0.297, 32.675, 0.176, 10.288, 11.238, 26.072, 32.758, 56.191),
    128: (9.575, 0.238, 29.930, 0.116, 9.596, 11.030, 26.009, 30.555, 55.149),
}
BOUNDS_TOLERANCE = 1e-3


def inconsistency_rows(request: ReproductionRequest) -> list[Row]:
    """Sequence and progress inconsistency of the six runs."""
    prefix = Panel("Sequence inconsistency", "length of the prefix", "elements per node")
    density = Panel("Progress inconsistency", "steps of the swarm between two passes, per node", "density")
    table: list[tuple[Any, ...]] = []
    last, spread = {}, {}
    for name in SEQUENCES:
        trace = simulate(plan_of(name, SEQUENCE_NODES, 100), keep_trace=True).trace
        assert trace is not None
        whole = sequence_inconsistency(trace, SEQUENCE_NODES)
        passes = progress_inconsistency(trace, SEQUENCE_NODES)
        stride = max(1, whole.size // 500)
        lengths, thinned = np.arange(1, whole.size + 1)[::stride].tolist(), whole[::stride].tolist()
        prefix.lines.append(Line(name, lengths, thinned))
        counts, edges = np.histogram(passes, bins=60, range=(0, 6), density=True)
        density.lines.append(Line(name, ((edges[1:] + edges[:-1]) / 2).tolist(), counts.tolist()))
        table += [(name, "prefix", at, round(value, 4)) for at, value in zip(lengths, thinned, strict=True)]
        table += [(name, f"pass {quantity}", "", round(value, 4)) for quantity, value in _pass_moments(passes).items()]
        last[name], spread[name] = float(whole[-whole.size // 5 :].mean()), float(passes.std())
    write_csv(request.folder / "inconsistency.csv", ("barrier", "quantity", "length", "value"), table)
    draw([prefix, density], request.folder / "inconsistency.png", "P = 100, T = 100, event-driven")
    rows = [
        Row("inconsistency", f"{name}: sequence, last fifth; spread of passes", "",
            f"{last[name]:.2f}; {spread[name]:.2f}", "", None)
        for name in SEQUENCES
    ]  # fmt: skip
    is_in_order = last["asp"] > last["pssp(4,5)"] > last["pssp(4,10)"] > last["pbsp(5)"] > last["pbsp(10)"]
    claim = "sequence: ASP > pSSP(4,5) > pSSP(4,10) > pBSP(5) > pBSP(10)"
    return [*rows, order_row("inconsistency", claim, holds=is_in_order)]


def sequence_inconsistency(trace: Trace, nodes: int) -> NDArray[np.float64]:
    """float64[n]: `|true[0:L] △ noisy[0:L]| / P` for every prefix L = 1 … n.

    The true sequence gives every node one step in turn: its element i is step `i div P + 1` of node `i mod P`. The
    noisy one is ordered by completion.
    """
    order = np.argsort(trace.node, kind="stable")
    counts = np.bincount(trace.node, minlength=nodes)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    step = np.empty(trace.node.size, np.int64)
    step[order] = np.arange(trace.node.size) - np.repeat(starts, counts)
    true_place = step * nodes + trace.node
    # An element belongs to both prefixes from the larger of its two positions on.
    both_from = np.maximum(true_place, np.arange(trace.node.size))
    within = both_from[both_from < trace.node.size]
    common = np.cumsum(np.bincount(within, minlength=trace.node.size))
    lengths = np.arange(1, trace.node.size + 1)
    return 2.0 * (lengths - common) / nodes


def progress_inconsistency(trace: Trace, nodes: int) -> NDArray[np.float64]:
    """float64[passes]: at each pass of a barrier, completions in the swarm since that node's last pass, over P.

    Steps never decrease, so the distance of two step vectors is the number of completions between them.
    """
    return trace.gaps / nodes


def _pass_moments(passes: Any) -> dict[str, float]:
    """Mean, standard deviation, skew and kurtosis, as the source tabulates them."""
    mean, sd = float(passes.mean()), float(passes.std())
    scaled = (passes - mean) / max(sd, 1e-12)
    return {"mean": mean, "sd": sd, "skew": float((scaled**3).mean()), "kurtosis": float((scaled**4).mean())}


def share_within(a: float, beta: int) -> float:
    """F(r), from `a = F(r)^β`."""
    return float(a ** (1.0 / beta))


def normaliser(a: float, share: float, r: int, length: int) -> float:
    """S = (1 − a) / (F(r)(1 − a) + a − a^(T−r+1)), for 0 < a < 1."""
    return (1.0 - a) / (share * (1.0 - a) + a - a ** (length - r + 1))


def mean_bound(a: float, share: float, r: int, length: int) -> float:
    """B1 ≥ (1/T) Σ E(γ_t)."""
    return normaliser(a, share, r, length) * (r * (r + 1) / 2 + a * (r + 2) / (1 - a) ** 2)


def square_bound(a: float, share: float, r: int, length: int) -> float:
    """B2 > (1/T) Σ E(γ_t²)."""
    body = r * (r + 1) * (2 * r + 1) / 6 + a * (r * r + 4) / (1 - a) ** 3
    return normaliser(a, share, r, length) * body


def lowest(bound: Callable[[float, float, int, int], float], beta: int, r: int, length: int) -> tuple[float, float]:
    """The least value of a bound over `a`, and that `a` to three decimal places."""
    grid = np.arange(1, 1000) / 1000.0
    values = [bound(float(a), share_within(float(a), beta), r, length) for a in grid]
    place = int(np.argmin(values))
    return values[place], float(grid[place])


def bound_rows(request: ReproductionRequest) -> list[Row]:
    """The bounds on mean and mean square of the lag, beside their published values."""
    rows, table = [], []
    r, length = 4, 10_000
    panels = [Panel(f"Bound on the mean{what} lag", "a = F(r)^β", "bound") for what in ("", " square of the")]
    grid = [number / 200 for number in range(4, 181)]
    for beta, published_values in BOUNDS.items():
        least_1, at_1 = lowest(mean_bound, beta, r, length)
        least_2, at_2 = lowest(square_bound, beta, r, length)
        fixed = [mean_bound(a, share_within(a, beta), r, length) for a in (0.2, 0.5, 0.8)]
        fixed += [square_bound(a, share_within(a, beta), r, length) for a in (0.2, 0.5)]
        names = ("min B1", "at a", "min B2", "at a", "B1(.2)", "B1(.5)", "B1(.8)", "B2(.2)", "B2(.5)")
        for name, theirs, ours in zip(names, published_values, (least_1, at_1, least_2, at_2, *fixed), strict=True):
            is_within = abs(theirs - ours) <= BOUNDS_TOLERANCE
            rows.append(Row("bounds", f"{name}, β = {beta}", f"{theirs:g}", f"{ours:.3f}", "0.001", is_within))
            table.append((beta, name, theirs, round(ours, 5), is_within))
        for panel, bound in zip(panels, (mean_bound, square_bound), strict=True):
            y = [bound(a, share_within(a, beta), r, length) for a in grid]
            panel.lines.append(Line(f"β = {beta}", grid, [min(value, 150.0) for value in y]))
    write_csv(request.folder / "bounds.csv", ("beta", "quantity", "published", "ours", "within"), table)
    draw(panels, request.folder / "bounds.png", f"r = {r}, T = {length}")
    return rows

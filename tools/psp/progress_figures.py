"""Figures of completed steps: measures their points, and writes PNG, CSV and rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2pnode.training.simulation.plots import Line, Panel, draw, step_panel
from p2pnode.training.simulation.run import simulate
from tools.psp.checks import CHECKS
from tools.psp.points import Verdict, compare, measure, plan_of, points, values_of
from tools.psp.tables import ReproductionRequest, Row, order_row, write_csv

POINT_FIGURES = (
    "steps", "sample_size", "disciplines", "text_run", "straggler_share", "straggler_slowness",
    "straggler_share_1000", "scale", "doubling", "stored",
)  # fmt: skip

_LABELS = {
    "sample_size": "sample size β",
    "disciplines": "sample size β",
    "straggler_share": "slow nodes in percent",
    "straggler_share_1000": "slow nodes in percent",
    "stored": "slow steps in percent",
    "straggler_slowness": "factor of 5 % slow nodes",
    "scale": "nodes",
    "doubling": "nodes",
}


def progress_rows(request: ReproductionRequest) -> list[Row]:
    """Make the figures of completed steps that the request names."""
    names = [name for name in POINT_FIGURES if name in request.names]
    wanted = [point for point in points() if point.figure in names]
    if not wanted:
        return []

    def progress(done: int, total: int) -> None:
        request.on_progress(f"{total} runs", done / total)

    verdicts = compare(wanted, measure(wanted, processes=request.processes, progress=progress))
    values = values_of(verdicts)
    rows = []
    for name in names:
        mine = [verdict for verdict in verdicts if verdict.point.figure == name]
        _write_points(request.folder / f"{name}.csv", mine)
        draw(_point_panels(name, mine), request.folder / f"{name}.png", name.replace("_", " "))
        rows += [_row(verdict) for verdict in mine]
        rows += [order_row(name, check.text, holds=check.holds(values)) for check in CHECKS if check.figure == name]
    return rows


def _row(verdict: Verdict) -> Row:
    point = verdict.point
    low, high = point.published
    at = f" at {point.x:g}" if point.x else ""
    what = f"{point.series}{at}"
    if point.tolerance == 0.0:
        return Row(point.figure, what, "", f"{verdict.ours:.4g}", "", None)
    theirs = f"{low:g}" if low == high else f"{low:g}…{high:g}"
    if point.digitised is not None:
        theirs += f" (figure {point.digitised:g})"
    return Row(point.figure, what, theirs, f"{verdict.ours:.4g}", f"{100 * verdict.tolerance:.2g} %", verdict.within)


def _write_points(path: Path, verdicts: Sequence[Verdict]) -> None:
    head = ("series", "x", "quantity", "published_low", "published_high", "digitised", "ours", "sd_over_seeds",
            "seeds", "tolerance", "within")  # fmt: skip
    rows = []
    for verdict in verdicts:
        point = verdict.point
        compared = point.tolerance > 0.0
        low, high = point.published if compared else ("", "")
        rows.append(
            (point.series, point.x, point.quantity, low, high, "" if point.digitised is None else point.digitised,
             round(verdict.ours, 4), round(verdict.sd, 4), point.seeds, round(verdict.tolerance, 4),
             verdict.within if compared else "")
        )  # fmt: skip
    write_csv(path, head, rows)


def _point_panels(name: str, verdicts: Sequence[Verdict]) -> list[Panel]:
    if name == "steps":
        return [_step_distributions()]
    if name == "text_run":
        return [_labelled(verdicts)]
    steps = [verdict for verdict in verdicts if verdict.point.quantity == "mean_steps"]
    log_x = name in ("sample_size", "disciplines", "doubling")
    panels = [_series(steps, name, "mean completed steps", log_x=log_x)]
    costs = [verdict for verdict in verdicts if verdict.point.quantity == "queries_per_step"]
    if costs:
        panels.append(_series(costs, name, "queries per step", log_x=log_x, log_y=True))
    return panels


def _series(verdicts: Sequence[Verdict], name: str, y_label: str, *, log_x: bool, log_y: bool = False) -> Panel:
    panel = Panel("lines: ours; crosses: published", _LABELS.get(name, ""), y_label, log_x=log_x, log_y=log_y)
    for series in dict.fromkeys(verdict.point.series for verdict in verdicts):
        mine = [v for v in verdicts if v.point.series == series and (v.point.x > 0 or not log_x)]
        x = [v.point.x for v in mine]
        panel.lines.append(Line(series, x, [v.ours for v in mine]))
        if mine and mine[0].point.tolerance > 0:
            middle = [sum(v.point.published) / 2 for v in mine]
            panel.lines.append(Line(f"_{series}", x, middle, marks=True, color=series))
    return panel


def _labelled(verdicts: Sequence[Verdict]) -> Panel:
    """Our value against the published one, one mark per value."""
    panel = Panel("each value of the table", "published mean steps", "ours")
    theirs = [sum(verdict.point.published) / 2 for verdict in verdicts]
    panel.lines.append(Line("values", theirs, [verdict.ours for verdict in verdicts], marks=True))
    panel.lines.append(Line("equal", [0, 100], [0, 100]))
    return panel


def _step_distributions() -> Panel:
    names = ("bsp", "ssp(5)", "pbsp(10)", "pssp(5,10)", "asp")
    panel = step_panel([(name, simulate(plan_of(name, 1000, 400))) for name in names])
    for point in points():
        if point.figure == "steps" and point.series in names and point.digitised is not None:
            panel.lines.append(Line(f"_{point.series}", [point.digitised], [0.5], marks=True, color=point.series))
    return panel

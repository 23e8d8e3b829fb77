"""Draws figures as PNG files. matplotlib is an optional dependency and is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pnode.training.errors import TrainingError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from p2pnode.training.simulation.outcome import Outcome


class NoMatplotlib(TrainingError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """A series of a panel. With `marks` only its points are drawn, as for published values."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marks: bool = False
    color: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False


def require_matplotlib() -> Any:
    """pyplot with a backend that draws to files only. Raises `NoMatplotlib`."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib("matplotlib is not installed") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(panels: Sequence[Panel], path: Path, title: str = "") -> None:
    """Draw panels side by side into one file. Raises `NoMatplotlib`, and `OSError` if it cannot be written."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.8), squeeze=False)
    try:
        for panel, ax in zip(panels, axes[0], strict=True):
            _draw_panel(panel, ax)
        if title:
            figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _draw_panel(panel: Panel, ax: Any) -> None:
    colors: dict[str, str] = {}
    for line in panel.lines:
        base = line.color or line.name
        style: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 7} if line.marks else {"marker": "."}
        if len(line.x) > 60 and not line.marks:
            style = {}
        if base in colors:
            style["color"] = colors[base]
        (drawn,) = ax.plot(line.x, line.y, label=line.name, **style)
        colors.setdefault(base, drawn.get_color())
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    if panel.log_x:
        ax.set_xscale("log")
    if panel.log_y:
        ax.set_yscale("log")
    ax.grid(visible=True, alpha=0.3)
    if panel.lines:
        ax.legend(fontsize="small")


def step_panel(outcomes: Sequence[tuple[str, Outcome]]) -> Panel:
    """The distribution function of completed steps over the nodes, one line per run."""
    panel = Panel("Completed steps at the end", "completed steps", "share of nodes")
    for name, outcome in outcomes:
        x, y = distribution(outcome.steps)
        panel.lines.append(Line(name, x, y))
    return panel


def progress_panel(outcomes: Sequence[tuple[str, Outcome]]) -> Panel:
    """Mean completed steps over time, one line per run."""
    panel = Panel("Mean progress", "seconds", "mean completed steps")
    for name, outcome in outcomes:
        panel.lines.append(
            Line(name, [moment.now_s for moment in outcome.moments], [moment.mean for moment in outcome.moments])
        )
    return panel


def distribution(steps: NDArray[np.int64]) -> tuple[list[float], list[float]]:
    """The corners of the empirical distribution function, which is a staircase."""
    values, counts = np.unique(steps, return_counts=True)
    shares = np.cumsum(counts) / steps.size
    x = np.repeat(values, 2).astype(float)
    y = np.concatenate([[0.0], np.repeat(shares, 2)[:-1]])
    return x.tolist(), y.tolist()

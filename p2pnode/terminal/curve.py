"""Small curves and bars from block characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from p2pnode.terminal.numbers import duration, number, size, whole

_LEVELS = "▁▂▃▄▅▆▇█"


def curve(values: Sequence[float | None], width: int) -> str:
    """At most `width` blocks from left to right, each the mean of as many values as fall into it, from the
    lowest to the highest of all; values that are missing or not finite are left out."""
    known = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not known or width < 1:
        return ""
    count = min(width, len(known))
    edges = [round(at * len(known) / count) for at in range(count + 1)]
    means = [sum(known[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[0 if span <= 0 else min(top, int((mean - low) / span * len(_LEVELS)))] for mean in means)


def bar(done: float, width: int) -> str:
    """A bar of `width` cells, of which the share `done` (0 to 1) is full; it is full only when all is done."""
    full = math.floor(max(0.0, min(1.0, done if math.isfinite(done) else 0.0)) * width + 1e-9)
    return "█" * full + "░" * (width - full)


def left_seconds(done: float, total: float, passed_s: float) -> float | None:
    """Seconds to go if the rest goes as the part that is done; None before anything is."""
    if done <= 0.0 or total <= 0.0 or passed_s <= 0.0:
        return None
    return max(0.0, total - done) * passed_s / done


def progress_text(
    what: str, done: float, total: float, unit: str, left_s: float | None, *, width: int = 80, passed_s: float = 0.0
) -> str:
    """One line: what goes on, a bar, how much of how much, and the time to go; without a total the time that passed."""
    counted = _counted(done, total, unit)
    if total <= 0:
        return f"{what}  {counted}{', ' if counted else ''}for {duration(round(passed_s))}"
    togo = "" if left_s is None else f"  {duration(max(1, round(left_s)))} to go"
    if done >= total:
        togo = ""
    room = min(30, width - len(what) - len(counted) - len(togo) - 4)
    bars = f"  {bar(done / total, room)}" if room >= 5 else ""
    return f"{what}{bars}  {counted}{togo}"


def _counted(done: float, total: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * done / total if total > 0 else 0:3.0f} %"
    if unit == "bytes":
        return f"{size(done)} of {size(total)}" if total > 0 else size(done)
    if not unit and not done:
        return ""
    return f"{number(whole(done))} of {number(whole(total))} {unit}".rstrip() if total > 0 else f"{done:g} {unit}"

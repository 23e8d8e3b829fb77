"""Numbers for people: three significant digits, sizes and durations in readable units, small curves and bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

#: Floats below this are written with an exponent.
SMALLEST_PLAIN = 1e-3
_LEVELS = "▁▂▃▄▅▆▇█"


def short(node_id: object) -> str:
    """The first eight characters of an id."""
    return str(node_id or "")[:8] or "-"


def number(value: Any) -> str:
    """A number with three significant digits, whole numbers with all of theirs; a dash for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0.0:
        return "0"
    size = abs(float(f"{value:.2e}"))  # rounded first: 0.9996 is 1.00
    if size < SMALLEST_PLAIN:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def whole(value: Any) -> Any:
    """A float that is a whole number, as one; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def size(count: Any) -> str:
    """Bytes in a decimal unit: 1.50 MB is 1,500,000 bytes."""
    if isinstance(count, bool) or not isinstance(count, int | float):
        return "-"
    value = float(count)
    if abs(value) < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{number(value)} {unit}"
    return f"{number(value / 1000)} TB"


def rate(bytes_per_s: Any) -> str:
    """Bytes per second in a decimal unit."""
    text = size(bytes_per_s)
    return text if text == "-" else f"{text}/s"


def duration(seconds: Any) -> str:
    """A duration in at most two units: 12.3 ms, 3.2 s, 41 s, 3 min 12 s, 2 h 5 min, 3 d 4 h."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return "-"
    value = max(0.0, float(seconds))
    if value == 0.0:
        return "0 s"
    if value < 0.9995:
        return f"{number(1000 * value)} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        large, small, names = 60, 1, ("min", "s")
    elif whole < 86400:
        large, small, names = 3600, 60, ("h", "min")
    else:
        large, small, names = 86400, 3600, ("d", "h")
    rest = whole % large // small
    return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")


def share(value: Any) -> str:
    """A share from 0 to 1 as per cent."""
    return "-" if isinstance(value, bool) or not isinstance(value, int | float) else f"{100 * value:.0f} %"


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

"""Numbers for people: three significant digits, sizes and durations in readable units."""

from __future__ import annotations

import math
from typing import Any

#: Floats below this are written with an exponent.
SMALLEST_PLAIN = 1e-3


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

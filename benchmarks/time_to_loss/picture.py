"""The losses of the contestants on one line as an SVG. Pure: a text, so no package draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 50, 230, 30, 45
#: Between the baselines of two labels.
LABEL_GAP = 17
TICK, TICK_S = 0.5, 60
FONT = 'font-family="sans-serif" font-size="13"'


@dataclass(frozen=True, slots=True)
class Curve:
    """A loss by the second, with a label at its end."""

    label: str
    colour: str
    losses: Mapping[int, float]
    is_dashed: bool = False


def svg(title: str, note: str, curves: Sequence[Curve], last_s: int) -> str:
    """A line for each curve, up to `last_s`, from the first second that all have; the note is below. Ends in a
    newline."""
    first_s = max(min(curve.losses) for curve in curves)
    shown = [[p for p in sorted(curve.losses.items()) if first_s <= p[0] <= last_s] for curve in curves]
    losses = [loss for points in shown for _, loss in points]
    low, high = TICK * int(min(losses) / TICK), TICK * -int(-max(losses) // TICK)

    def x(second: float) -> float:
        return LEFT + (second - first_s) / (last_s - first_s) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 18, title, weight="bold"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds", anchor="middle"),
        _text(WIDTH - 10, HEIGHT - 8, note, anchor="end", colour="#777777"),
        *(_text(x(s), HEIGHT - BOTTOM + 18, str(s), anchor="middle") for s in range(first_s, last_s + 1, TICK_S)),
    ]
    for number in range(round((high - low) / TICK) + 1):
        loss = low + number * TICK
        parts.append(_line([(LEFT, y(loss)), (WIDTH - RIGHT, y(loss))], "#dddddd", 1))
        parts.append(_text(LEFT - 8, y(loss) + 4, f"{loss:.1f}", anchor="end"))
    for curve, points in zip(curves, shown, strict=True):
        parts.append(_line([(x(s), y(loss)) for s, loss in points], curve.colour, 2.5, dashed=curve.is_dashed))
    ends = sorted(zip(curves, shown, strict=True), key=lambda end: -end[1][-1][1])
    baselines = apart([y(points[-1][1]) for _, points in ends])
    for baseline, (curve, points) in zip(baselines, ends, strict=True):
        parts.append(_text(x(points[-1][0]) + 8, baseline + 4, curve.label, colour=curve.colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def apart(places: Sequence[float]) -> list[float]:
    """Ascending places of labels, moved until no two are nearer than `LABEL_GAP`, around where they were."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _begin(groups[-1]) < _begin(groups[-2]) + LABEL_GAP * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [_begin(group) + LABEL_GAP * number for group in groups for number in range(len(group))]


def _begin(group: Sequence[float]) -> float:
    """Where the first label of a group is that lies around the mean of its places."""
    return sum(group) / len(group) - LABEL_GAP * (len(group) - 1) / 2


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222222", weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, *, dashed: bool = False) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'

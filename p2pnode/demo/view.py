"""The progress of a demo as a table of its nodes: redrawn in place on a terminal, otherwise every two seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

from p2pnode.screen import Redrawn, is_redrawable, style_of
from p2pnode.terminal.lines import Column, Line, Span, Style, cells, labelled, table
from p2pnode.terminal.numbers import bar, curve, duration, number, short, size, whole
from p2pnode.terminal.status_view import STATE_TONES, part

#: Seconds between two printed tables where there is no terminal.
LINE_INTERVAL_S = 2.0
#: The width where there is no terminal.
PLAIN_WIDTH = 80
DEMO_COLUMNS = (
    Column("node", keep=9),
    Column("state", keep=7, most=9),
    Column("step", right=True, keep=8),
    Column("loss", right=True, keep=6),
    Column("accuracy", right=True, keep=8),
    Column("waits for", keep=5),
    Column("nodes", right=True, keep=4),
    Column("sent", right=True, keep=3, most=7),
    Column("received", right=True, keep=2),
)
#: Shorter than in `status`, for the width of a terminal.
_STATES = {"waiting_for_nodes": "few nodes"}


class DemoMoment(NamedTuple):
    """What is drawn: a row of cells per node, the accuracy of the node that is furthest behind (and those before), and
    the seconds since the start."""

    rows: Sequence[Sequence[Span]]
    lowest: float | None
    history: Sequence[float]
    seconds: float


class View:
    """Draws the table of the nodes and prints messages below it."""

    def __init__(self, title: str, stream: TextIO, *, goal: float = 1.0, limit_s: float = 0.0) -> None:
        self._title = title
        self._stream = stream
        self._goal = goal
        self._limit_s = limit_s
        self._redrawn: Redrawn | None = None
        self._next_line = 0.0

    @contextmanager
    def open(self) -> Iterator[View]:
        if not is_redrawable(self._stream):
            self.print(self._title)
            yield self
            return
        with Redrawn(self._stream) as self._redrawn:
            yield self
        self._redrawn = None

    def draw(self, moment: DemoMoment) -> None:
        """Show where the nodes are now."""
        if self._redrawn is not None:
            times = (moment.seconds, self._limit_s)
            self._redrawn.draw(
                lambda style: demo_lines(
                    self._title, moment.rows, (moment.lowest, self._goal), moment.history, times, style
                )
            )
        elif moment.seconds >= self._next_line:
            self._next_line = moment.seconds + LINE_INTERVAL_S
            header = [Column(f"{moment.seconds:.0f} s", keep=9), *DEMO_COLUMNS[1:]]
            style = style_of(self._stream)._replace(width=PLAIN_WIDTH)
            self.print("\n".join(style.render(line) for line in table(header, moment.rows, style)))

    def print(self, text: str) -> None:
        """Lines for people, wrapped on a terminal."""
        style = style_of(self._stream)
        if self._redrawn is not None:
            self._redrawn.clear()
        for line in text.splitlines() or [""]:
            self._stream.write(self._wrapped(line, style) + "\n")
        self._stream.flush()

    def _wrapped(self, line: str, style: Style) -> str:
        indent = len(line) - len(line.lstrip())
        return "\n".join(style.render(piece) for piece in labelled(" " * indent, line[indent:], style, indent=indent))


def demo_row(name: str, status: Mapping[str, Any] | None, names: Mapping[str, str] | None = None) -> list[Span]:
    """The cells of one node of the demo, in the order of `DEMO_COLUMNS`. `names`: of the nodes, by id."""
    if status is None:
        missing: list[Span] = [("-", "dim")] * (len(DEMO_COLUMNS) - 2)
        return [(name, ""), ("starting", "warn"), *missing]
    training, exchange = part(status, "training"), part(status, "exchange")
    state = str(status.get("state", "?"))
    slowest = str(part(status, "waiting").get("slowest") or "")
    return [
        (name, ""),
        (_STATES.get(state, state), STATE_TONES.get(state, "")),
        (str(status.get("step", "?")), ""),
        (number(training.get("loss")), ""),
        (number(part(training, "metrics").get("accuracy")), "bold"),
        ((names or {}).get(slowest, short(slowest)), ""),
        (number(whole(part(status, "population").get("estimate"))), ""),
        (size(exchange.get("bytes_sent")), ""),
        (size(exchange.get("bytes_received")), ""),
    ]


def demo_lines(
    title: str,
    rows: Sequence[Sequence[Span]],
    goal: tuple[float | None, float],
    history: Sequence[float],
    times: tuple[float, float],
    style: Style,
) -> list[Line]:
    """The title, one line per node, and how far the worst of them is: `goal` is its accuracy and the one to reach,
    `history` its accuracies, `times` the seconds passed and those allowed."""
    worst, wanted = goal
    width = 80 if style.width is None else style.width
    counted = f"{number(worst)} of {number(wanted)}"
    clock = f"{duration(round(times[0]))} of at most {duration(times[1])}"
    room = max(0, min(24, width - 34 - cells(counted) - cells(clock)))
    share = 0.0 if worst is None or wanted <= 0 else worst / wanted
    return [
        *labelled("", title, style, indent=0, tone="bold"),
        [],
        *table(DEMO_COLUMNS, rows, style),
        [],
        [
            ("lowest accuracy  ", "dim"),
            (bar(share, 10), "ok" if worst is not None and worst >= wanted else "warn"),
            (f"  {counted}  ", "bold"),
            (curve(history, room), "ok"),
            ("  " if room and history else "", ""),
            (clock, "dim"),
        ],
    ]

"""Draws the progress of a demo: redrawn in place on a terminal, otherwise a table every two seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from p2pnode.screen import Redrawn, TextStream, is_redrawable, style_of
from p2pnode.terminal.demo_view import DEMO_COLUMNS, demo_lines
from p2pnode.terminal.lines import Column, Span, Style, labelled, table

#: Seconds between two printed tables where there is no terminal.
LINE_INTERVAL_S = 2.0
#: The width where there is no terminal.
PLAIN_WIDTH = 80


class DemoMoment(NamedTuple):
    """What is drawn: a row of cells per node, the accuracy of the node that is furthest behind (and those before), and
    the seconds since the start."""

    rows: Sequence[Sequence[Span]]
    lowest: float | None
    history: Sequence[float]
    seconds: float


class View:
    """Draws the table of the nodes and prints messages below it."""

    def __init__(self, title: str, stream: TextStream, *, goal: float = 1.0, limit_s: float = 0.0) -> None:
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

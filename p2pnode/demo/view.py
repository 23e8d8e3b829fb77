"""Draws the progress of a demo: a table redrawn in place on a terminal, otherwise a few lines every two seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from p2pnode import tables

#: Seconds between two printed tables where there is no terminal.
LINE_INTERVAL_S = 2.0


class View:
    """Draws the table of the nodes and prints messages above it."""

    def __init__(self, title: str, stream: Any) -> None:
        self._title = title
        self._stream = stream
        self._live: Any = None
        self._next_line = 0.0

    @contextmanager
    def open(self) -> Iterator[View]:
        if not self._stream.isatty():
            self.print(self._title)
            yield self
            return
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=self._stream), auto_refresh=False) as self._live:
            yield self
        self._live = None

    def draw(self, rows: Sequence[Sequence[str]], seconds: float) -> None:
        if self._live is not None:
            self._live.update(tables.demo_table(rows, f"{self._title}  {seconds:.0f} s"), refresh=True)
        elif seconds >= self._next_line:
            self._next_line = seconds + LINE_INTERVAL_S
            header = (f"{seconds:.0f} s", *tables.DEMO_COLUMNS[1:])
            self.print(tables.columns(header, rows))

    def print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

"""What the terminal of this process can show, lines redrawn in place on it, and progress bars.

Colours and redrawing are for terminals alone; `NO_COLOR` (https://no-color.org) and `TERM=dumb` are respected. A pipe
gets whole lines without escape sequences.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from p2pnode.terminal.lines import Line, Style
from p2pnode.terminal.numbers import left_seconds, progress_text

#: Work that is done sooner shows no bar.
QUIET_S = 1.0
#: Between two redraws of a bar.
REDRAW_S = 0.1
_CLEAR_REST, _CLEAR_LINE, _HIDE, _SHOW = "\x1b[J", "\x1b[K", "\x1b[?25l", "\x1b[?25h"
_ALTERNATE, _NORMAL, _HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"


class TerminalSize(NamedTuple):
    """Cells of a terminal."""

    width: int
    height: int


def is_redrawable(stream: TextIO, environment: Mapping[str, str] | None = None) -> bool:
    """Whether lines can be redrawn in place: on a terminal that moves its cursor."""
    variables = os.environ if environment is None else environment
    return stream.isatty() and variables.get("TERM", "") not in ("", "dumb", "unknown")


def terminal_size(stream: TextIO) -> TerminalSize:
    """The size of the stream's terminal; 80 by 24 where it does not say."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        found = os.get_terminal_size(stream.fileno())
        if found.columns > 0:
            return TerminalSize(found.columns, found.lines or 24)
    found = shutil.get_terminal_size((80, 24))
    return TerminalSize(found.columns, found.lines)


def style_of(stream: TextIO, environment: Mapping[str, str] | None = None) -> Style:
    """What the stream can show now; asked again for each drawing, because a window changes its size."""
    variables = os.environ if environment is None else environment
    return Style(
        width=terminal_size(stream).width if stream.isatty() else None,
        colour=is_redrawable(stream, variables) and not variables.get("NO_COLOR"),
        encoding=getattr(stream, "encoding", None) or "utf-8",
    )


class Redrawn:
    """Lines that are redrawn in place. `whole_screen`: on the terminal's second screen, so that nothing scrolls."""

    def __init__(self, stream: TextIO, *, whole_screen: bool = False) -> None:
        self._stream = stream
        self._whole_screen = whole_screen
        self._above = 0

    def __enter__(self) -> Redrawn:
        self._stream.write((_ALTERNATE if self._whole_screen else "") + _HIDE)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.write(_SHOW + (_NORMAL if self._whole_screen else ""))
        self._stream.flush()

    @property
    def size(self) -> TerminalSize:
        return terminal_size(self._stream)

    def draw(self, make: Callable[[Style], Sequence[Line]]) -> None:
        """Replace what was drawn before; `make` is told the present size. Lines that do not fit are left out: what has
        scrolled away cannot be redrawn."""
        style = style_of(self._stream)
        lines = list(make(style))[: max(1, self.size.height - 1)]
        start = _HOME if self._whole_screen else f"\x1b[{self._above}A\r" if self._above else "\r"
        text = "".join(f"{style.render(line)}{_CLEAR_LINE}\n" for line in lines)
        self._stream.write(f"{start}{text}{_CLEAR_REST}")
        self._stream.flush()
        self._above = len(lines)

    def clear(self) -> None:
        """Remove what was drawn; what is written next takes its place."""
        self._stream.write((f"\x1b[{self._above}A\r" if self._above else "\r") + _CLEAR_REST)
        self._stream.flush()
        self._above = 0


class ProgressBar:
    """One line on a terminal that shows how far a piece of work is, and the time to go.

    It appears when the work has taken `QUIET_S`, and goes when it ends. Without a terminal it writes nothing.
    """

    def __init__(self, what: str, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream: TextIO = stream or sys.stderr
        self._clock = clock
        self._began_s = clock()
        self._drawn_s: float | None = None
        self._is_shown = is_redrawable(self._stream)

    def show(self, done: float, total: float = 1.0, unit: str = "%", what: str | None = None) -> None:
        """`done` of `total` are done now; `what` renames the work, whose time to go then counts from now."""
        now = self._clock()
        if what is not None and what != self._what:
            self._what, self._began_s = what, now
            self._drawn_s = self._drawn_s and now - REDRAW_S
        if not self._is_shown or (now - self._began_s < QUIET_S and self._drawn_s is None):
            return
        if self._drawn_s is not None and now - self._drawn_s < REDRAW_S and done < total:
            return
        self._drawn_s = now
        passed_s = now - self._began_s
        style = style_of(self._stream)
        text = progress_text(
            self._what,
            done,
            total,
            unit,
            left_seconds(done, total, passed_s),
            width=style.width or 80,
            passed_s=passed_s,
        )
        self._stream.write(f"\r{style.render([(text, '')])}{_CLEAR_LINE}")
        self._stream.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._drawn_s is not None:
            self._stream.write(f"\r{_CLEAR_LINE}")
            self._stream.flush()
            self._drawn_s = None


@contextmanager
def progress_bar(what: str, stream: TextIO | None = None) -> Iterator[ProgressBar]:
    """A progress bar on standard error for as long as the block runs."""
    shown = ProgressBar(what, stream)
    try:
        yield shown
    finally:
        shown.close()

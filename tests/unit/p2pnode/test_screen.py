"""What a terminal can show, and progress bars on it."""

from __future__ import annotations

import contextlib
import io

import pytest

from p2pnode.screen import QUIET_S, ProgressBar, Redrawn, is_redrawable, progress_bar, style_of
from p2pnode.terminal.lines import Style


class Terminal(io.StringIO):
    """A terminal of 80 cells."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_colour_is_for_terminals_that_want_it() -> None:
    """A pipe is neither cut nor coloured; NO_COLOR and a dumb terminal are respected."""
    xterm = {"TERM": "xterm"}
    assert style_of(io.StringIO(), xterm) == Style(width=None, colour=False)
    assert style_of(Terminal(), xterm).colour
    assert style_of(Terminal(), xterm).width == 80
    assert not style_of(Terminal(), xterm | {"NO_COLOR": "1"}).colour
    assert style_of(Terminal(), xterm | {"NO_COLOR": ""}).colour  # as no-color.org has it
    for term in ({}, {"TERM": "dumb"}):
        assert not style_of(Terminal(), term).colour
        assert not is_redrawable(Terminal(), term)
    assert not is_redrawable(io.StringIO(), xterm)


def test_lines_are_redrawn_in_place_and_never_scroll() -> None:
    """The second drawing begins where the first did; what does not fit the screen is left out."""
    stream = Terminal()
    with Redrawn(stream) as screen:
        screen.draw(lambda _: [[(str(at), "")] for at in range(100)])
        drawn = stream.getvalue().count("\n")
        screen.draw(lambda _: [[("x", "")]])
    assert drawn == screen.size.height - 1
    assert f"\x1b[{drawn}A" in stream.getvalue()


def test_a_bar_appears_after_a_second_and_goes_at_the_end() -> None:
    """Short work shows nothing; long work shows a share and the time to go; the line is removed."""
    now = [0.0]
    stream = Terminal()
    shown = ProgressBar("packing", stream, clock=lambda: now[0])
    shown.show(0.1)
    assert stream.getvalue() == ""
    now[0] = QUIET_S + 9.0
    shown.show(0.5)
    assert "packing" in stream.getvalue()
    assert " 50 %  10 s to go" in stream.getvalue()
    before = stream.getvalue()
    shown.show(0.500001)  # within the same tenth of a second
    assert stream.getvalue() == before
    shown.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_the_time_of_a_new_stage_counts_from_its_beginning() -> None:
    """Otherwise a stage after a long one would seem to take for ever."""
    now = [0.0]
    stream = Terminal()
    shown = ProgressBar("first", stream, clock=lambda: now[0])
    now[0] = 100.0
    shown.show(0.9, what="second")
    now[0] = 102.0
    shown.show(0.5, what="second")
    assert stream.getvalue().rstrip("\x1b[K").endswith("50 %  2.0 s to go")


def test_without_a_terminal_a_bar_writes_nothing() -> None:
    """Logs and pipes stay free of it, also when the work fails."""
    stream = io.StringIO()
    with contextlib.suppress(ValueError), progress_bar("packing", stream) as shown:
        shown.show(1.0)
        raise ValueError("failed")
    assert stream.getvalue() == ""

"""The demo's progress, on a terminal and where there is none."""

from __future__ import annotations

import io

import pytest

from p2pnode.demo.view import LINE_INTERVAL_S, DemoMoment, View
from p2pnode.terminal.demo_view import demo_row

ROWS = [demo_row("node-0", None)]


class Terminal(io.StringIO):
    """A terminal of 80 cells."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_table_is_printed_every_two_seconds() -> None:
    """The title comes first; draws within the interval print nothing; nothing is an escape sequence."""
    stream = io.StringIO()
    view = View("four nodes", stream)

    with view.open():
        for seconds in (0.0, LINE_INTERVAL_S / 2, LINE_INTERVAL_S):
            view.draw(DemoMoment(ROWS, None, [], seconds))

    lines = stream.getvalue().splitlines()
    assert lines[0] == "four nodes"
    assert sum(line.startswith("node-0") for line in lines) == 2
    assert [line.split()[0] for line in lines if " s " in line] == ["0", "2"]
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_the_table_is_redrawn_and_messages_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor goes up by as many lines as were drawn, is hidden meanwhile, and shown at the end."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    view = View("four nodes", stream, goal=0.95, limit_s=180.0)

    with view.open():
        view.draw(DemoMoment(ROWS, 0.5, [0.5], 1.0))
        drawn = stream.getvalue().count("\n")
        view.draw(DemoMoment(ROWS, 0.6, [0.5, 0.6], 2.0))
        view.print("a message")

    text = stream.getvalue()
    assert f"\x1b[{drawn}A\r" in text
    assert "0.600 of 0.950" in text
    assert text.index("\x1b[?25l") < text.index("a message") < text.index("\x1b[?25h")
    assert text.split("a message")[0].endswith(f"\x1b[{drawn}A\r\x1b[J")


def test_a_dumb_terminal_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot move its cursor, so nothing is redrawn."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with View("four nodes", stream).open() as view:
        view.draw(DemoMoment(ROWS, None, [], 0.0))
    assert "\x1b" not in stream.getvalue()

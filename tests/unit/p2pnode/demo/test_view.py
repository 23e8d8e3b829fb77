"""The demo's progress, on a terminal and where there is none."""

from __future__ import annotations

import io
from typing import Any

import pytest

from p2pnode.demo.view import DEMO_COLUMNS, LINE_INTERVAL_S, DemoMoment, View, demo_lines, demo_row
from p2pnode.terminal.lines import Style, cells

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


STATUS: dict[str, Any] = {
    "state": "waiting_for_nodes",
    "step": 31,
    "training": {"loss": 0.0123456, "metrics": {"accuracy": 0.967}},
    "waiting": {"slowest": "ab" * 20, "its_step": 7},
    "population": {"estimate": 4.0},
    "exchange": {"bytes_sent": 2_512_345, "bytes_received": 999_999_999},
}


def test_all_columns_fit_80_cells() -> None:
    """No heading and no cell is cut in the widest row that a demo has."""
    style = Style(width=80)
    rows = [demo_row("node-63", STATUS | {"step": 10_000}, {"ab" * 20: "node-12"}), demo_row("node-1", None)]
    lines = [style.render(line) for line in demo_lines("a title", rows, (0.62, 0.95), [0.1, 0.62], (9.2, 180.0), style)]
    text = "\n".join(lines)
    assert "…" not in text
    assert all(cells(line) <= 80 for line in lines)
    for words in ("few nodes", "node-12", "0.0123", "0.967", "2.51 MB", "0.620 of 0.950", "9.0 s of at most 3 min"):
        assert words in text
    assert [column.name for column in DEMO_COLUMNS if column.name not in text] == []


def test_a_node_without_an_answer_is_starting() -> None:
    """Every row has as many cells as there are columns, also of half a status."""
    for status in (None, {}, {"training": None, "population": None}):
        assert len(demo_row("node-0", status)) == len(DEMO_COLUMNS)
    assert demo_row("node-0", None)[1][0] == "starting"
    assert demo_row("node-0", STATUS)[5][0] == "abababab"

"""The demo's progress where there is no terminal."""

from __future__ import annotations

import io

from p2pnode.demo.view import LINE_INTERVAL_S, View
from p2pnode.tables import demo_row


def test_without_a_terminal_a_table_is_printed_every_two_seconds() -> None:
    """The title comes first; draws within the interval print nothing."""
    stream = io.StringIO()
    rows = [demo_row("node-0", None)]
    view = View("four nodes", stream)

    with view.open():
        for seconds in (0.0, LINE_INTERVAL_S / 2, LINE_INTERVAL_S):
            view.draw(rows, seconds)

    lines = stream.getvalue().splitlines()
    assert lines[0] == "four nodes"
    assert sum(line.startswith("node-0") for line in lines) == 2
    assert [line.split()[0] for line in lines if " s " in line] == ["0", "2"]

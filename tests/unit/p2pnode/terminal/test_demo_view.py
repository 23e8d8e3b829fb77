"""The table of `p2pnode demo`."""

from __future__ import annotations

from typing import Any

from p2pnode.terminal.demo_view import DEMO_COLUMNS, demo_lines, demo_row
from p2pnode.terminal.lines import Style, cells

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

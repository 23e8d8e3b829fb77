"""Rows of verdicts, and CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

from tools.psp.tables import Row, order_row, write_csv


def test_a_claim_holds_or_fails() -> None:
    """Text and verdict agree."""
    assert order_row("steps", "BSP < ASP", holds=True) == Row("steps", "BSP < ASP", "holds", "holds", "order", True)
    assert order_row("steps", "BSP < ASP", holds=False) == Row("steps", "BSP < ASP", "holds", "fails", "order", False)


def test_a_file_has_a_header_and_its_rows(tmp_path: Path) -> None:
    """Commas and letters beyond ASCII survive."""
    write_csv(tmp_path / "table.csv", ("what", "value"), [("pssp(4,10)", 1.5), ("β", "")])

    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["what", "value"], ["pssp(4,10)", "1.5"], ["β", ""]]

"""Figures of completed steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tools.psp.progress_figures import progress_rows
from tools.psp.tables import ReproductionRequest

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")
pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install p2pnode[simulate]")


@pytest.mark.promise(17)
def test_a_figure_has_a_row_per_point_and_its_files(tmp_path: Path) -> None:
    """`stored`, 25 points of small swarms: all within; the CSV names the same points."""
    stages: list[str] = []
    request = ReproductionRequest(("stored",), tmp_path, None, 1, lambda stage, _share: stages.append(stage))

    rows = progress_rows(request)

    assert len(rows) == 25
    assert all(row.within for row in rows)
    assert stages
    with (tmp_path / "stored.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [f"{row['series']} at {float(row['x']):g}" if float(row["x"]) else row["series"] for row in written] == [
        row.what for row in rows
    ]
    assert (tmp_path / "stored.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_run_for_other_figures(tmp_path: Path) -> None:
    """The bounds are no figure of steps."""
    request = ReproductionRequest(("bounds",), tmp_path, None, 1, lambda _stage, _share: None)

    assert progress_rows(request) == []
    assert list(tmp_path.iterdir()) == []

"""`simulate reproduce`: files, table and exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.cli import main
from p2pnode.errors import ExitCode

pytest.importorskip("numba", reason="advice tries twenty barriers: pip install p2pnode[simulate]")


def test_reproduce_writes_figures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bounds`: a PNG, a CSV with the published values, a table of verdicts, and exit code 0 as all are within."""
    assert main(["simulate", "reproduce", "bounds", "--out", str(tmp_path / "out")]) == 0

    assert "54 of 54 within tolerance" in capsys.readouterr().out
    assert (tmp_path / "out" / "bounds.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "bounds.csv").read_text().splitlines()[1] == "1,min B1,14.664,14.66434,True"
    assert main(["simulate", "reproduce", "nothing"]) == ExitCode.USAGE
    assert main(["simulate", "reproduce", "list"]) == 0

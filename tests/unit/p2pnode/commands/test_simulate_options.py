"""`p2pnode simulate`: runs that are compared, options that are refused, and a missing matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pnode.cli import main
from p2pnode.errors import ExitCode

pytest.importorskip("numba", reason="advice tries twenty barriers: pip install p2pnode[simulate]")


def test_simulate_prints_what_a_swarm_would_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON with one entry per barrier compared, in order; the same seed gives the same figures; a PNG where asked."""
    plot = tmp_path / "out.png"
    line = ["simulate", "--nodes", "50", "--duration", "30", "--compare", "asp,bsp,ssp,pbsp,pssp", "--stragglers",
            "5%x4", "--seed", "3", "--json"]  # fmt: skip

    assert main([*line, "--plot", str(plot)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(line) == 0

    assert json.loads(capsys.readouterr().out) == first
    assert [run["barrier"] for run in first["runs"]] == ["asp", "bsp", "ssp", "pbsp", "pssp"]
    steps = [run["mean_steps"] for run in first["runs"]]
    assert steps[1] < steps[4] < steps[0]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong",
    [["--steps", "nothing"], ["--barrier", "none"], ["--stragglers", "much"], ["--discipline", "none"],
     ["--quantile", "2"], ["--engine", "none"], ["--duration", "-1"], ["--barrier", "custom", "--custom", "no:thing"],
     ["--engine", "compiled", "--churn", "0.1"]],
)  # fmt: skip
def test_impossible_options_are_refused_with_a_hint(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one sentence and what to do."""
    assert main(["simulate", "--nodes", "5", "--duration", "5", *wrong]) == ExitCode.USAGE
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "hint: " in message


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is run: what is missing, and how to get it."""
    import builtins

    usual = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    for line in (["simulate", "--nodes", "5", "--plot", "x.png"], ["simulate", "reproduce", "bounds"]):
        assert main(line) == ExitCode.USAGE
        message = capsys.readouterr().err
        assert "matplotlib is not installed" in message
        assert "p2pnode[simulate]" in message

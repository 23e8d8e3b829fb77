"""`simulate advise`: what is measured becomes a model, and the rule chooses; and `simulate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pnode import client as client_module
from p2pnode.cli import main
from p2pnode.errors import ExitCode
from training.settings import BarrierSettings
from training.simulation.advice import Measured, Prediction, advise, candidates, choose
from training.simulation.model.step_times import Stragglers

pytest.importorskip("numba", reason="advice tries twenty barriers: pip install p2pnode[simulate]")

TRACE = tuple(0.5 + 0.05 * (number % 10) for number in range(40))


def prediction(name: str, progress: float, spread: float, queries: float = 1.0) -> Prediction:
    return Prediction(name, BarrierSettings(), progress, progress, spread, 0.5, queries, 0.0)


def test_slow_nodes_are_found_in_the_announced_medians() -> None:
    """Two of ten nodes at four times the median are 20 % stragglers ×4; the trace is scaled to the swarm's median."""
    steps, stragglers = Measured((1.0, 3.0), (1.0,) * 8 + (4.0,) * 2, 10).model()

    assert stragglers == Stragglers(0.2, 4.0)
    assert steps.trace_s == (0.5, 1.5)


def test_the_rule_takes_the_closest_of_those_that_keep_enough() -> None:
    """Too slow ones are left out; of equals the cheaper; what runs now is compared and not recommended."""
    tried = [prediction("asp", 1.0, 9.0), prediction("bsp", 0.4, 0.1), prediction("pbsp", 0.9, 1.0, 5.0),
             prediction("pssp", 0.9, 1.0, 3.0), prediction("as it runs", 0.99, 0.5)]  # fmt: skip

    assert choose(tried, 0.85).name == "pssp"
    assert choose(tried, 0.95).name == "asp"
    assert choose(tried, 0.3).name == "bsp"


def test_stragglers_are_waited_for_where_that_is_asked() -> None:
    """With a slow node no complete barrier keeps 85 %; asked to keep a quarter only, bsp is closest together."""
    measured = Measured(TRACE, (0.7,) * 19 + (2.8,), 20)
    found = advise(measured)

    assert found.nodes == 20
    assert found.choice.name not in ("asp", "bsp", "ssp(4)")
    assert 0.85 <= found.choice.progress <= 1.0
    assert found.choice.spread_steps <= found.predictions[0].spread_steps
    assert advise(measured, keep=0.2).choice.name == "bsp"


def test_samples_are_below_the_population() -> None:
    """Among three workers nobody can sample ten."""
    assert all(barrier.sample < 3 for barrier in candidates(3).values())
    with pytest.raises(ValueError, match="a barrier needs two"):
        advise(Measured(TRACE, (0.7,), 1))


class FakeClient:
    """What a node of twelve says."""

    def __init__(self, address: str) -> None:
        assert address == "127.0.0.1:8080"
        self.address = address

    def status(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "population": {"estimate": 12.4, "workers": 12.0},
            "training": {"step_seconds": 0.7},
            "barrier": {"method": "pssp", "sample": 4, "staleness": 4, "quantile": 1.0},
        }

    def steps(self, limit: int = 100) -> list[dict[str, Any]]:
        return [{"step": number, "train_seconds": seconds} for number, seconds in enumerate(TRACE)][:limit]

    def peers(self) -> list[dict[str, Any]]:
        return [{"state": "training", "step_seconds": 0.7} for _ in range(11)]


def test_advise_reads_a_node_and_recommends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer names a barrier, its predicted progress and inconsistency, and what the swarm does now."""
    monkeypatch.setattr(client_module, "NodeClient", FakeClient)

    assert main(["simulate", "advise", "--from", "http://127.0.0.1:8080/", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["nodes"] == 12
    assert answer["recommended"]["name"] in {entry["name"] for entry in answer["candidates"]}
    assert 0.85 <= answer["recommended"]["progress"] <= 1.01
    assert answer["present"]["barrier"] == {"method": "pssp", "sample": 4, "staleness": 4}

    assert main(["simulate", "advise", "--from", "127.0.0.1:8080"]) == 0
    assert "[barrier]" in capsys.readouterr().out


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


def test_reproduce_writes_figures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bounds`: a PNG, a CSV with the published values, a table of verdicts, and exit code 0 as all are within."""
    assert main(["simulate", "reproduce", "bounds", "--out", str(tmp_path / "out")]) == 0

    assert "54 of 54 within tolerance" in capsys.readouterr().out
    assert (tmp_path / "out" / "bounds.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "bounds.csv").read_text().splitlines()[1] == "1,min B1,14.664,14.66434,True"
    assert main(["simulate", "reproduce", "nothing"]) == ExitCode.USAGE
    assert main(["simulate", "reproduce", "list"]) == 0

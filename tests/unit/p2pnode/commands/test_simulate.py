"""`p2pnode simulate` as a user types it: what it prints, writes and recommends, and a hint for what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pnode import client as client_module
from p2pnode.cli import main
from p2pnode.errors import ExitCode

SMALL = ["simulate", "--nodes", "20", "--duration", "15", "--engine", "reference"]


def test_one_barrier_as_json_twice_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object with the run's figures; the same seed gives the same, another seed another."""
    command = [*SMALL, "--barrier", "pbsp", "--sample", "4", "--stragglers", "10%x4", "--json", "--seed"]
    printed = []
    for seed in ("3", "3", "4"):
        assert main([*command, seed]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    (run,) = printed[0]["runs"]
    assert run["barrier"] == "pbsp"
    assert 0 < run["least_steps"] <= run["mean_steps"] <= run["most_steps"]
    assert printed[0] == printed[1]
    assert printed[1]["runs"] != printed[2]["runs"]


def test_barriers_are_compared_in_a_table_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A line per barrier, bsp below asp, and a PNG file."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install p2pnode[simulate]")
    picture = tmp_path / "out.png"
    assert main([*SMALL, "--compare", "asp,bsp,pssp", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = {line.split()[0]: float(line.split()[1]) for line in lines[1:4]}
    assert list(steps) == ["asp", "bsp", "pssp"]
    assert steps["bsp"] < steps["pssp"] <= steps["asp"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--barrier", "nope"], ["nope", "pssp"]),
        (["--compare", "asp,nope"], ["nope", "pssp"]),
        (["--barrier", "nowhere:rule"], ["nowhere:rule"]),
        (["--steps", "exp:-1"], ["exp:-1"]),
        (["--steps", "trace:/nowhere.json"], ["/nowhere.json"]),
        (["--stragglers", "150%x4"], ["150%x4"]),
        (["--sampler", "fair"], ["fair", "uniform"]),
        (["--nodes", "0"], ["--nodes"]),
        (["--duration", "0"], ["duration"]),
        (["--discipline", "none"], ["none", "pool"]),
        (["--quantile", "2"], ["quantile"]),
        (["--engine", "none"], ["none", "compiled"]),
        (["--engine", "compiled", "--churn", "0.1"], ["churn"]),
    ],
)
def test_what_cannot_be_simulated_is_said(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, a sentence that names what was given, a hint, and nothing on standard output."""
    assert main(["simulate", *arguments]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "\nhint: " in err
    assert all(word in err for word in words)


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is run: what is missing, and how to get it."""
    import builtins

    usual = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    assert main(["simulate", "--nodes", "5", "--plot", "x.png"]) == ExitCode.USAGE
    message = capsys.readouterr().err
    assert "matplotlib is not installed" in message
    assert "p2pnode[simulate]" in message


pytest.importorskip("numba", reason="advice tries twenty barriers: pip install p2pnode[simulate]")


TRACE = tuple(0.5 + 0.05 * (number % 10) for number in range(40))


class FakeClient:
    """The answers of a node in a swarm of twelve."""

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

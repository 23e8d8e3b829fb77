"""`p2pnode simulate advise`: reads a node and prints a recommendation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2pnode import client as client_module
from p2pnode.cli import main

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

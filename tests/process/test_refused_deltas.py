"""A node whose deltas are refused again and again is told so, by its own status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all, until

TRAINER = (sys.executable, "-m", "tests.process.harness.plain_trainer")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "settings", "reason", "do"),
    [
        # The other node waits for nobody.
        (("1.0",), {"barrier.method": "ssp", "barrier.staleness": 1}, "(late)", "training.local_steps"),
        (("0.05", "nan"), {}, "(not_finite)", "learning rate"),
    ],
    ids=["late", "not finite"],
)
def test_repeated_refusals_are_a_finding_of_the_refused_node(
    arguments: tuple[str, ...], settings: dict[str, Any], reason: str, do: str, tmp_path: Path
) -> None:
    """With the reason and what to do, and only there."""
    common = {"training.local_steps": 1, "training.min_nodes": 2, "barrier.method": "asp"}
    good = ProcessNode(tmp_path, "good", common, script=(*TRAINER, "0.02"), forks=True)
    nodes = [good]
    try:
        until(lambda: bool(good.address), START_S, "the first node is up", nodes)
        bad = ProcessNode(
            tmp_path, "bad", common | settings, bootstrap=good.address, script=(*TRAINER, *arguments), forks=True
        )
        nodes.append(bad)

        def said(node: ProcessNode) -> list[dict[str, str]]:
            return [found for found in node.status().get("health", []) if "were refused" in found["what"]]

        until(lambda: bool(said(bad)), START_S, "the refused node says so", nodes)
        [found] = said(bad)
        assert reason in found["what"]
        assert do in found["do"]
        assert said(good) == []
    finally:
        kill_all(nodes)

"""One state directory copied and started twice: nodes that share an identity report it and stop."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.errors import ExitCode
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, ProcessNode, kill_all, until

SETTINGS: dict[str, Any] = {
    **SHORT_STEPS,
    "training.checkpoint_s": 0,
    "training.task": "tests.harness.trainers.tasks:Slow",
    "training.options": {"seconds": 0.02},
}


def copy_of_running(source: Path, target: Path) -> None:
    """A copy of a state directory in use. A file that is being replaced has a temporary one, which may go meanwhile."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.tmp"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., ProcessNode]]:
    started: list[ProcessNode] = []

    def start(name: str, bootstrap: str = "") -> ProcessNode:
        node = ProcessNode(tmp_path, name, SETTINGS, bootstrap=bootstrap, forks=True, needs_torch=True)
        started.append(node)
        return node

    yield start
    kill_all(started)


@pytest.mark.timeout(600)
def test_two_daemons_on_one_copied_state_directory_stop(tmp_path: Path, launch: Callable[..., ProcessNode]) -> None:
    """The original trains; its copy joins through a third node. Both end with the documented code, one clear sentence
    and a hint; the third trains on. A copy of the third, which dials it, meets its own identity in the hello, and ends
    alone."""
    founder = launch("founder")
    until(lambda: bool(founder.address), START_S, "the founder can be asked", [founder])
    original = launch("original", founder.address)
    until(lambda: original.step > 2, START_S, "the original trains", [founder, original])
    identity = original.status()["node"]["id"]
    copy_of_running(tmp_path / "original", tmp_path / "copy")
    copy = launch("copy", founder.address)

    for daemon in (original, copy):
        assert daemon.process.wait(START_S) == ExitCode.IDENTITY_IN_USE, daemon.output()
        lines = daemon.output().splitlines()
        [line] = [line for line in lines if line.startswith("error:")]
        assert f"this node's identity {identity[:8]} is in use elsewhere" in line
        assert "runs with the same key" in line
        [hint] = [line for line in lines if line.startswith("hint:")]
        assert "remove identity.key and incarnation" in hint
        assert str(daemon.state_dir) in hint
        assert "Traceback" not in daemon.output()
    before = founder.step
    until(lambda: founder.step > before, START_S, "the founder trains on", [founder])
    # The log is written by a thread: a step may be known before the line is there.
    until(lambda: bool(founder.events("identity_used_twice")), START_S, "its log has what it saw", [founder])

    copy_of_running(tmp_path / "founder", tmp_path / "twin")
    twin, address = launch("twin", founder.address), founder.address

    assert twin.process.wait(START_S) == ExitCode.IDENTITY_IN_USE, twin.output()
    assert f"{address} runs with the same key" in twin.output()
    before = founder.step
    until(lambda: founder.step > before, START_S, "the founder trains on", [founder])

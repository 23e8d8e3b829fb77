"""`p2pnode start --local`: several real nodes in one command, one more beside them, and Ctrl-C for all."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import ANSWER_S, START_S, until


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `p2pnode start --run digits ARGUMENTS`, its output in a file named by the number of the start."""
    started: list[subprocess.Popen[bytes]] = []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}

    def launch(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{len(started)}.txt").open("wb") as output:
            started.append(
                start_p2pnode(
                    ["start", *arguments],
                    cwd=tmp_path,
                    env=environment | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
                    stdout=output,
                    stderr=output,
                )
            )
        return started[-1]

    yield launch
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in started:
        process.wait(60)


def test_nodes_on_one_machine_find_each_other(tmp_path: Path, local: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Two nodes by one command, a third by `--local` alone with no other flag: all train one run with the first one's
    task, each with its own directory and ports; one Ctrl-C each ends them with exit code 0, and nothing is left."""
    home = tmp_path / ".local" / "state" / "p2pnode" / "digits"
    folders = [home / "local" / str(number) for number in (1, 2, 3)]

    def status(folder: Path) -> dict[str, Any]:
        found = find(folder)
        try:
            return NodeClient.of(found, timeout_s=ANSWER_S).status() if found and found.alive else {}
        except UserError:
            return {}

    def train(count: int) -> bool:
        return all(status(folder).get("step", 0) >= 1 for folder in folders[:count])

    # A task that sleeps: three that compute would take all cores from the other tests.
    given = ("training.eval_steps=0", "training.checkpoint_s=0", "training.options={seconds = 0.02}")
    settings = [part for setting in given for part in ("--set", setting)]
    two = local("--local", "2", "--run", "digits", "--task", "tests.harness.trainers.tasks:Slow", *settings)
    until(lambda: train(2), START_S, "two train")
    one = local("--local")
    until(lambda: train(3), START_S, "the third trains")

    nodes = [status(folder) for folder in folders]
    assert {node["run"] for node in nodes} == {"digits"}
    until(lambda: all(status(folder)["population"]["estimate"] == 3 for folder in folders), 90, "all know each other")
    assert len({node["node"]["address"] for node in nodes}) == 3
    pids = [found.pid for folder in folders if (found := find(folder))]
    for process in (one, two):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of its group gets it
        assert process.wait(60) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    printed = (tmp_path / "0.txt").read_text().splitlines()
    assert {line[:3] for line in printed} == {"[1]", "[2]"}
    assert {line[:3] for line in (tmp_path / "1.txt").read_text().splitlines()} == {"[3]"}

"""The demo as a whole, with stand-ins for the daemons: success, failure, interruption, and nothing left behind.

The long run has it as a user starts it, with real daemons: in test_wheel.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.demo import run as demo_run
from p2pnode.demo.plan import DemoPlan, goal_held
from p2pnode.demo.run import run
from tests.harness.project.repository import ROOT

ALONE = (sys.executable, "-c", "print('{\"accuracy\": 0.7}')")
PLAN = DemoPlan(nodes=2, program=(sys.executable, "-m", "tests.process.harness.fake_node"), alone_command=ALONE)


@pytest.fixture(autouse=True)
def _watch_for_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test ends with no process of the demo alive and an empty temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(ROOT)
    yield
    monkeypatch.undo()
    assert children(str(tmp_path)) == []
    assert list(tmp_path.glob("p2pnode-demo-*")) == []


def children(mark: str) -> list[str]:
    """Command lines of processes that mention a text of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if mark in command and entry.name != str(os.getpid()):
            found.append(command)
    return found


def test_a_swarm_that_learns_is_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    """The goal is reached: exit code 0, alone and together are printed, and JSON is the last line."""
    assert run(PLAN, as_json=True) == 0

    output = capsys.readouterr()
    answer = json.loads(output.out.splitlines()[-1])
    assert (answer["success"], answer["nodes"], answer["alone"]) == (True, 2, 0.7)
    assert answer["accuracy"] >= 0.95
    assert len(answer["steps_per_node"]) == 2
    assert "alone 0.700, together 0.9" in output.err


def limit_when(monkeypatch: pytest.MonkeyPatch, enough: Callable[[list[float]], bool]) -> None:
    """The time limit comes when each has `enough` accuracies: a loaded machine starts and trains slowly."""
    ahead_s = [0.0]

    def looked(accuracies: list[list[float]], goal: float) -> bool:
        if all(map(enough, accuracies)):
            ahead_s[0] = 1000.0
        return goal_held(accuracies, goal)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0], sleep=time.sleep)
    monkeypatch.setattr(demo_run, "time", clock)
    monkeypatch.setattr(demo_run, "goal_held", looked)


def test_a_goal_out_of_reach_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 10 at the time limit, with what was reached."""
    limit_when(monkeypatch, lambda of_one: of_one[-1:] == [0.6])
    assert run(dataclasses.replace(PLAN, task="fake:Unable", time_limit_s=500.0)) == 10

    printed = capsys.readouterr().out
    assert "the goal was not reached within 500 s" in printed
    assert "together 0.600" in printed


def test_a_daemon_that_crashes_early_is_named_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo stops at once and prints the node, its exit code and its last lines."""
    assert run(dataclasses.replace(PLAN, task="fake:Die")) == 10

    printed = capsys.readouterr().out
    assert "node-1 ended early with exit code 8" in printed
    assert "the data is missing" in printed


def test_a_part_that_fails_alone_leaves_the_comparison_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The swarm has reached its goal all the same; the part is named."""
    failing = (sys.executable, "-c", "raise SystemExit(3)")
    assert run(dataclasses.replace(PLAN, alone_command=failing), as_json=True) == 0

    output = capsys.readouterr()
    answer = json.loads(output.out.splitlines()[-1])
    assert (answer["alone"], answer["alone_each"]) == (None, [])
    assert "alone-0 failed with exit code 3" in output.err


def test_a_daemon_that_does_not_leave_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals are ignored: the process is killed all the same."""
    monkeypatch.setattr(demo_run, "LEAVE_S", 0.3)
    monkeypatch.setattr(demo_run, "TERM_S", 0.3)
    assert run(dataclasses.replace(PLAN, nodes=1, task="fake:Ignore")) == 0

    assert "a node had to be killed" in capsys.readouterr().out


def test_files_are_kept_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--keep leaves configurations and logs in the folder that is printed."""
    assert run(dataclasses.replace(PLAN, nodes=1, keep=tmp_path / "kept")) == 0

    (folder,) = (tmp_path / "kept").iterdir()
    assert str(folder) in capsys.readouterr().out
    assert (folder / "local" / "1" / "node.log").exists()
    assert not (folder / "local" / "1" / "status.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM or a closed terminal in the middle: exit code 10, what was reached, no process and no file."""
    code = (
        "import dataclasses, sys; from tests.process.test_demo import PLAN; from p2pnode.demo.run import run;"
        "sys.exit(run(dataclasses.replace(PLAN, until=1.0)))"
    )
    demo = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("p2pnode-demo-*/local/*/status.json"))) < 2:
        assert time.monotonic() < deadline
        assert demo.poll() is None
        time.sleep(0.05)

    demo.send_signal(number)
    printed, _ = demo.communicate(timeout=90)

    assert demo.returncode == 10
    assert "it was interrupted" in printed

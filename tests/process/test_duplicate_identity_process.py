"""One state directory copied and started twice, beside a third node that both can reach: both report it and stop."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.client import NodeClient, find
from p2pnode.errors import ExitCode, UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import ANSWER_S
from tests.process.test_swarm_process import SHORT_STEPS

#: Importing torch on a loaded machine is most of every wait here.
START_S = 180.0


class Daemon:
    """`p2pnode start` on a state directory, with its own log."""

    def __init__(self, state_dir: Path, bootstrap: str = "") -> None:
        self.state_dir = state_dir
        self._log = state_dir.with_suffix(".log")
        arguments = ["--port", "0", "--status-port", "0", "--state-dir", str(state_dir)]
        arguments += ["--bootstrap", bootstrap] if bootstrap else []
        arguments += ["--task", "tests.harness.trainers.tasks:Slow"]
        for setting in (*SHORT_STEPS, "training.checkpoint_s=0", "training.options={seconds = 0.02}"):
            arguments += ["--set", setting]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        with self._log.open("wb") as output:
            self.process = start_p2pnode(
                ["start", *arguments],
                cwd=state_dir.parent,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def status(self) -> dict[str, Any]:
        """Its status, empty while it cannot be asked."""
        found = find(self.state_dir)
        try:
            if found is not None and found.pid == self.process.pid:
                return NodeClient(found.address, timeout_s=ANSWER_S).status()
        except UserError:
            pass
        return {}

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        end_s = time.monotonic() + START_S
        while not condition(status := self.status()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end_s, f"{what}: {self.log}"
            time.sleep(0.05)
        return status

    def end(self) -> None:
        """Kill what is left of its session, trainer included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def copy_of_running(source: Path, target: Path) -> None:
    """A copy of a state directory in use. A file that is being replaced has a temporary one, which may go meanwhile."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.tmp"))


@pytest.fixture
def launch() -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(state_dir: Path, bootstrap: str = "") -> Daemon:
        started.append(Daemon(state_dir, bootstrap))
        return started[-1]

    yield start
    for daemon in started:
        daemon.end()


@pytest.mark.timeout(600)
def test_two_daemons_on_one_copied_state_directory_stop(tmp_path: Path, launch: Callable[..., Daemon]) -> None:
    """The original trains; its copy joins through a third node. Both end with the documented code, one clear sentence
    and a hint; the third trains on."""
    founder = launch(tmp_path / "founder")
    address = founder.until(bool, "the founder can be asked")["node"]["address"]
    original = launch(tmp_path / "original", address)
    identity = original.until(lambda status: status.get("step", 0) > 2, "the original trains")["node"]["id"]
    copy_of_running(tmp_path / "original", tmp_path / "copy")
    copy = launch(tmp_path / "copy", address)

    for daemon in (original, copy):
        assert daemon.process.wait(START_S) == ExitCode.IDENTITY_IN_USE, daemon.log
        [line] = [line for line in daemon.log.splitlines() if line.startswith("error:")]
        assert f"this node's identity {identity[:8]} is in use elsewhere" in line
        assert "runs with the same key" in line
        [hint] = [line for line in daemon.log.splitlines() if line.startswith("hint:")]
        assert "remove identity.key and incarnation" in hint
        assert str(daemon.state_dir) in hint
        assert "Traceback" not in daemon.log
    before = founder.status()["step"]
    founder.until(lambda status: status.get("step", 0) > before, "the founder trains on")
    # The log is written by a thread: a step may be known before the line is there.
    founder.until(lambda _: "identity_used_twice" in founder.log, "its log has what it saw")


@pytest.mark.timeout(600)
def test_a_copy_of_a_founder_that_dials_it_stops(tmp_path: Path, launch: Callable[..., Daemon]) -> None:
    """The copy meets its own identity in the bootstrap's hello: it never joins, and the founder is not disturbed."""
    founder = launch(tmp_path / "founder")
    address = founder.until(lambda status: status.get("step", 0) > 2, "the founder trains")["node"]["address"]
    copy_of_running(tmp_path / "founder", tmp_path / "copy")
    copy = launch(tmp_path / "copy", address)

    assert copy.process.wait(START_S) == ExitCode.IDENTITY_IN_USE, copy.log
    assert f"{address} runs with the same key" in copy.log
    assert founder.process.poll() is None
    before = founder.status()["step"]
    founder.until(lambda status: status.get("step", 0) > before, "the founder trains on")

"""A founder's state directory survives every mistaken command, and a plain start in it continues."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.errors import ExitCode
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import run_p2pnode, start_p2pnode
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, StartedNode, until

STRANGERS = Invitation.of("strangers", ["127.0.0.1:1"], KeyRing((SwarmKey(bytes(32)),))).line
NAMESAKES = Invitation.of("digits", ["127.0.0.1:1"], KeyRing((SwarmKey(bytes(32)),))).line


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a state directory, without those that every start may change."""
    changing = ("lock", "incarnation", "trainer.log")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in changing
    }


class Founder:
    """One node, started again and again on the default directory of its home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / ".local" / "state" / "p2pnode" / "digits"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        self.environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
        self.node: StartedNode | None = None
        self.log = home / "log.txt"

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_p2pnode(arguments, cwd=self.home, env=self.environment, timeout=60)

    def start(self, *arguments: str) -> None:
        with self.log.open("ab") as output:
            process = start_p2pnode(
                ["start", *arguments], cwd=self.home, env=self.environment, stdout=output, stderr=output
            )
        self.node = node = StartedNode(process, self.folder, self.log)
        until(lambda: node.step >= 3, START_S, "it trains")

    def stop(self) -> None:
        assert self.node is not None
        self.node.process.send_signal(signal.SIGTERM)
        assert self.node.wait() == 0


@pytest.fixture
def founder(tmp_path: Path) -> Iterator[Founder]:
    made = Founder(tmp_path)
    yield made
    if made.node is not None:
        made.node.kill()


def test_mistaken_commands_break_no_state_directory(founder: Founder) -> None:
    """While the node runs and after it has ended: a second start, another run, another swarm's invitation, a namesake's
    invitation and foreign bootstraps are refused and write nothing; a plain `p2pnode start` then continues the run."""
    # A task that sleeps: one that computes would take a core from the other tests.
    given = {"training.task": "tests.harness.trainers.tasks:Slow", "training.options": "{seconds = 0.1}"}
    settings = [
        part
        for key, value in {**SHORT_STEPS, **given, "training.checkpoint_s": 1}.items()
        for part in ("--set", f"{key}={value}")
    ]
    founder.start("--run", "digits", "--port", "0", "--status-port", "0", *settings)
    until(lambda: (founder.folder / "checkpoints").is_dir(), START_S, "it has a checkpoint")
    place = ("--state-dir", str(founder.folder))
    mistakes = [
        (("start", *place, "--run", "other"), ExitCode.MISMATCH, 'belongs to run "digits"'),
        (("start", *place, "--invite", STRANGERS), ExitCode.MISMATCH, 'belongs to run "digits"'),
        (("key", "join", STRANGERS, *place), ExitCode.MISMATCH, "is of an open swarm"),
        (("key", "join", NAMESAKES), ExitCode.MISMATCH, "is of an open swarm"),
    ]

    again = founder.command("start", *place, "--invite", NAMESAKES, "--port", "0", "--status-port", "0")
    assert (again.returncode, "another node runs on" in again.stderr) == (ExitCode.STATE_DIRECTORY, True), again.stderr
    assert not (founder.folder / "swarm.json").exists()
    founder.stop()
    before = contents(founder.folder)
    mistakes.append((("start", "--invite", NAMESAKES), ExitCode.MISMATCH, "is of an open swarm"))
    for arguments, code, message in mistakes:
        refused = founder.command(*arguments)
        assert (refused.returncode, message in refused.stderr) == (code, True), (arguments, refused.stderr)
        assert "Traceback" not in refused.stderr
    assert contents(founder.folder) == before
    assert [entry.name for entry in founder.folder.parent.iterdir()] == ["digits"]

    shown = founder.command("config", "show", "--origin").stdout
    assert f'run = "digits"  # {founder.folder / "node.json"}' in shown
    assert f"local_steps = 1  # {founder.folder / 'node.json'}" in shown
    founder.start()
    # A thread writes the log: the status may tell of a step before the line is in the file.
    loaded = "checkpoint_loaded"
    until(lambda: loaded in founder.log.read_text().rpartition('"swarm_open"')[2], START_S, "it loads its checkpoint")
    founder.stop()

    kept = founder.command("forget")
    assert (kept.returncode, "nothing was removed" in kept.stderr) == (ExitCode.USAGE, True)
    assert "checkpoints" in kept.stdout
    gone = founder.command("forget", "--force")
    assert gone.returncode == 0, gone.stderr
    assert not founder.folder.exists(), [gone.stdout, *founder.folder.rglob("*")]
